"""Double of scripts/postprocessing_upscale.py.

The surface was read in lshqqytiger/stable-diffusion-webui-amdgpu e61adddd.
What was upscaled is kept until another picture comes, or is asked for in another way.
"""

import gradio as gr
from modules import scripts_postprocessing, shared

upscale_cache = {}


class ScriptPostprocessingUpscale(scripts_postprocessing.ScriptPostprocessing):
    name = "Upscale"
    order = 1000

    def ui(self):
        return {
            "upscale_enabled": gr.Checkbox(True),
            "upscale_by": gr.Slider(minimum=1.0, maximum=8.0, value=4),
            "upscaler_1_name": gr.Dropdown(choices=[each.name for each in shared.sd_upscalers]),
        }

    def process(
        self,
        pp,
        upscale_enabled=True,
        upscale_mode=1,
        upscale_by=2.0,
        max_side_length=0,
        upscale_to_width=None,
        upscale_to_height=None,
        upscale_crop=False,
        upscaler_1_name=None,
        upscaler_2_name=None,
        upscaler_2_visibility=0.0,
    ):
        upscaler = next((x for x in shared.sd_upscalers if x.name == upscaler_1_name), None)
        if not upscale_enabled or upscaler is None:
            return
        key = (pp.image.tobytes(), upscaler.name, upscale_by)
        if key not in upscale_cache:
            upscale_cache[key] = upscaler.scaler.upscale(pp.image, upscale_by, upscaler.data_path)
        pp.image = upscale_cache[key]
        pp.info["Postprocess upscaler"] = upscaler.name

    def image_changed(self):
        upscale_cache.clear()
