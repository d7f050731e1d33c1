"""ComfyUI: see nodes.py. Little is imported before a node runs."""
