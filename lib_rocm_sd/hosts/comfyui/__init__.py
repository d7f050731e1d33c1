"""ComfyUI: see nodes.py. Nothing is imported before a node runs."""
