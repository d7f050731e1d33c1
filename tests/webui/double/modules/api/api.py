"""Double of modules/api/api.py.

The surface was read in lshqqytiger/stable-diffusion-webui-amdgpu e61adddd.
How alwayson_scripts become script arguments.
"""

from contextlib import closing

import gradio as gr

from modules import processing, scripts, shared
from modules.call_queue import queue_lock


class HTTPException(Exception):  # noqa: N818
    """fastapi's, which the real one raises."""


class Api:
    def __init__(self):
        self.default_script_arg_txt2img = self.init_default_script_args(scripts.scripts_txt2img)
        self.default_script_arg_img2img = self.init_default_script_args(scripts.scripts_img2img)

    @staticmethod
    def init_default_script_args(script_runner):
        last = max([1, *(script.args_to for script in script_runner.scripts)])
        script_args = [None] * last
        script_args[0] = 0
        with gr.Blocks():
            for script in script_runner.scripts:
                if script.ui(script.is_img2img):
                    values = [elem.value for elem in script.ui(script.is_img2img)]
                    script_args[script.args_from : script.args_to] = values
        return script_args

    @staticmethod
    def init_script_args(alwayson_scripts, default_script_args, script_runner):
        script_args = default_script_args.copy()
        for name, request in alwayson_scripts.items():
            names = [script.title().lower() for script in script_runner.scripts]
            if name.lower() not in names:
                raise HTTPException(f"always on script {name} not found")
            script = script_runner.scripts[names.index(name.lower())]
            given = request.get("args", [])
            for index in range(min(script.args_to - script.args_from, len(given))):
                script_args[script.args_from + index] = given[index]
        return script_args

    def text2imgapi(self, alwayson_scripts=None, **fields):
        return self._run(
            processing.StableDiffusionProcessingTxt2Img,
            scripts.scripts_txt2img,
            self.default_script_arg_txt2img,
            alwayson_scripts,
            fields,
        )

    def img2imgapi(self, alwayson_scripts=None, **fields):
        return self._run(
            processing.StableDiffusionProcessingImg2Img,
            scripts.scripts_img2img,
            self.default_script_arg_img2img,
            alwayson_scripts,
            fields,
        )

    def _run(self, kind, runner, defaults, alwayson_scripts, fields):
        args = self.init_script_args(alwayson_scripts or {}, defaults, runner)
        with queue_lock, closing(kind(sd_model=shared.sd_model, **fields)) as p:
            p.scripts = runner
            p.script_args = tuple(args)
            return processing.process_images(p)
