"""Double of modules/ui.py.

The surface was read in lshqqytiger/stable-diffusion-webui-amdgpu e61adddd.
The scripts' part of both tabs, nested and rendered as there.
"""

import gradio as gr

from modules import infotext_utils, script_callbacks, scripts


def create_ui():
    script_callbacks.ui_settings_callback()
    interfaces = []
    for tab, runner in (("txt2img", scripts.scripts_txt2img), ("img2img", scripts.scripts_img2img)):
        runner.prepare_ui()
        runner.initialize_scripts(is_img2img=tab == "img2img")
        with gr.Blocks(analytics_enabled=False) as interface:
            gr.Textbox(label="Prompt", elem_id=f"{tab}_prompt")
            runner.setup_ui()
            infotext_utils.add_paste_fields(tab, None, list(runner.infotext_fields))
        interfaces.append((interface, tab, tab))
    interfaces += script_callbacks.ui_tabs_callback()
    demo = gr.Blocks(analytics_enabled=False, title="Stable Diffusion")
    with demo, gr.Tabs(elem_id="tabs"):
        for interface, label, name in interfaces:
            with gr.TabItem(label, id=name, elem_id=f"tab_{name}"):
                interface.render()
    return demo
