"""Double of comfy/utils.py (Comfy-Org/ComfyUI a125cd84): a progress bar that remembers.

The hook that main.py sets looks for a Cancel each time.
"""

from comfy import model_management

_shown = []
_hooked = [True]


class ProgressBar:
    def __init__(self, total, node_id=None):
        self.total = total

    def update_absolute(self, value, total=None, preview=None):
        if _hooked[0]:
            model_management.throw_exception_if_processing_interrupted()
        _shown.append((value, total))
