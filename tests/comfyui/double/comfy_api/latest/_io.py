"""Double of comfy_api/latest/_io.py (Comfy-Org/ComfyUI a125cd84): what a node gives."""


class NodeOutput:
    def __init__(self, *args, ui=None, expand=None, block_execution=None):
        self.args = args

    @property
    def result(self):
        return self.args if self.args else None

    def __getitem__(self, index):
        return self.args[index]
