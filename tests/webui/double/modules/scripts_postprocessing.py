"""Double of modules/scripts_postprocessing.py.

The surface was read in lshqqytiger/stable-diffusion-webui-amdgpu e61adddd.
"""

from pathlib import Path

import gradio as gr

from modules import shared


class PostprocessedImage:
    def __init__(self, image):
        self.image = image
        self.info = {}


class ScriptPostprocessing:
    filename = None
    controls = None
    args_from = None
    args_to = None
    order = 1000
    name = None
    group = None

    def ui(self):
        pass

    def process(self, pp, **args):
        pass

    def process_firstpass(self, pp, **args):
        pass

    def image_changed(self):
        pass


class ScriptPostprocessingRunner:
    def __init__(self):
        self.scripts = None
        self.ui_created = False

    def initialize_scripts(self, scripts_data):
        self.scripts = []
        for script_data in scripts_data:
            script = script_data.script_class()
            script.filename = script_data.path
            self.scripts.append(script)

    def create_script_ui(self, script, inputs):
        script.args_from = len(inputs)
        script.controls = script.ui()
        for control in script.controls.values():
            control.custom_script_source = Path(script.filename).name
        inputs += list(script.controls.values())
        script.args_to = len(inputs)

    def scripts_in_preferred_order(self):
        from modules import scripts

        if self.scripts is None:
            self.initialize_scripts(scripts.postprocessing_scripts_data)
        return sorted(self.scripts, key=lambda script: script.order)

    def setup_ui(self):
        inputs = []
        for script in self.scripts_in_preferred_order():
            with gr.Row() as group:
                self.create_script_ui(script, inputs)
            script.group = group
        self.ui_created = True
        return inputs

    def run(self, pp, args):
        calls = []
        for script in self.scripts_in_preferred_order():
            values = args[script.args_from : script.args_to]
            calls.append((script, dict(zip(script.controls, values, strict=True))))
        for script, values in calls:
            script.process_firstpass(pp, **values)
        for script, values in calls:
            if shared.state.skipped:
                break
            shared.state.job = script.name
            script.process(pp, **values)

    def create_args_for_run(self, scripts_args):
        if not self.ui_created:
            with gr.Blocks(analytics_enabled=False):
                self.setup_ui()
        scripts = self.scripts_in_preferred_order()
        args = [None] * max(script.args_to for script in scripts)
        for script in scripts:
            for place, name in enumerate(script.controls, start=script.args_from):
                args[place] = scripts_args.get(script.name, {}).get(name)
        return args

    def image_changed(self):
        for script in self.scripts_in_preferred_order():
            script.image_changed()
