"""Double of comfy/utils.py (Comfy-Org/ComfyUI a125cd84): a progress bar that remembers."""

_shown = []


class ProgressBar:
    def __init__(self, total, node_id=None):
        self.total = total

    def update_absolute(self, value, total=None, preview=None):
        _shown.append((value, total))
