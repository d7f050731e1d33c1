"""Double of modules/api/api.py.

The surface was read in lshqqytiger/stable-diffusion-webui-amdgpu e61adddd.
How alwayson_scripts become script arguments.
"""

import json
from contextlib import closing

import gradio as gr
from fastapi.exceptions import HTTPException

from modules import processing, scripts, shared
from modules.api import models


class Api:
    def __init__(self, app, queue_lock):
        self.app = app
        self.queue_lock = queue_lock
        self.default_script_arg_txt2img = self.init_default_script_args(scripts.scripts_txt2img)

    def init_default_script_args(self, script_runner):
        last = max([1, *(script.args_to for script in script_runner.scripts)])
        script_args = [None] * last
        script_args[0] = 0
        with gr.Blocks():
            for script in script_runner.scripts:
                if script.ui(script.is_img2img):
                    values = [elem.value for elem in script.ui(script.is_img2img)]
                    script_args[script.args_from : script.args_to] = values
        return script_args

    def init_script_args(
        self,
        request,
        default_script_args,
        selectable_scripts,
        selectable_idx,
        script_runner,
        *,
        input_script_args=None,
    ):
        script_args = default_script_args.copy()
        for name, given in request.alwayson_scripts.items():
            names = [script.title().lower() for script in script_runner.scripts]
            if name.lower() not in names:
                raise HTTPException(422, f"always on script {name} not found")
            script = script_runner.scripts[names.index(name.lower())]
            values = given.get("args", [])
            for index in range(min(script.args_to - script.args_from, len(values))):
                script_args[script.args_from + index] = values[index]
        return script_args

    def text2imgapi(self, txt2imgreq):
        runner = scripts.scripts_txt2img
        defaults = self.default_script_arg_txt2img
        args = self.init_script_args(txt2imgreq, defaults, None, None, runner)
        kind = processing.StableDiffusionProcessingTxt2Img
        with self.queue_lock, closing(kind(sd_model=shared.sd_model)) as p:
            p.scripts = runner
            p.script_args = tuple(args)
            processed = processing.process_images(p)
        return models.TextToImageResponse(info=json.dumps({"infotexts": processed.infotexts}))
