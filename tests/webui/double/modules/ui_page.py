"""Double of modules/ui.py, ui_settings.py and ui_toprow.py, as much of the page as people work on.

The surface was read in lshqqytiger/stable-diffusion-webui-amdgpu e61adddd.
What modules/ui.py of this double has, with Generate and its log, pasting, and the settings.
"""

import html
import time

import gradio as gr

from modules import infotext_utils, processing, script_callbacks, scripts, shared
from modules.call_queue import wrap_queued_call

_FONTS = ("DejaVu Sans", "sans-serif")
"""Of the machine: gradio's own would be fetched from elsewhere."""


def create_ui():
    script_callbacks.ui_settings_callback()
    interfaces = [
        (_generation("txt2img", scripts.scripts_txt2img), "txt2img", "txt2img"),
        (_generation("img2img", scripts.scripts_img2img), "img2img", "img2img"),
        *script_callbacks.ui_tabs_callback(),
        (_settings(), "Settings", "settings"),
    ]
    theme = gr.themes.Default(font=_FONTS, font_mono=("monospace",))
    demo = gr.Blocks(theme=theme, analytics_enabled=False, title="Stable Diffusion")
    with demo, gr.Tabs(elem_id="tabs"):
        for interface, label, name in interfaces:
            with gr.TabItem(label, id=name, elem_id=f"tab_{name}"):
                interface.render()
    return demo


def _generation(tab, runner):
    runner.prepare_ui()
    runner.initialize_scripts(is_img2img=tab == "img2img")
    with gr.Blocks(analytics_enabled=False) as interface:
        with gr.Row(elem_id=f"{tab}_toprow"):
            prompt = gr.Textbox(label="Prompt", elem_id=f"{tab}_prompt", value="", lines=3)
            with gr.Column():
                generate = gr.Button("Generate", elem_id=f"{tab}_generate", variant="primary")
                paste = gr.Button("Read parameters", elem_id=f"{tab}_paste")
        with gr.Row(), gr.Column(elem_id=f"{tab}_settings"):
            runner.setup_ui()
        with gr.Column(elem_id=f"{tab}_results"):
            infotext = gr.HTML(elem_id=f"html_info_{tab}")
            log = gr.HTML(elem_id=f"html_log_{tab}")
        fields = [(prompt, "Prompt"), *runner.infotext_fields]
        infotext_utils.add_paste_fields(tab, None, fields)
    with interface:
        generate.click(
            fn=wrap_queued_call(_generated(runner)),
            inputs=[prompt, *runner.inputs],
            outputs=[infotext, log],
            api_name=tab,
            show_progress="hidden",
        )
        paste.click(
            fn=lambda text: infotext_utils.paste(tab, text),
            inputs=[prompt],
            outputs=[field[0] for field in fields],
            api_name=False,
        )
    return interface


def _generated(runner):
    """Always a txt2img: the page has nowhere to put a picture to begin with."""

    def generate(prompt, *args):
        began = time.perf_counter()
        shared.state.begin(job="a generation")
        try:
            p = processing.StableDiffusionProcessingTxt2Img(prompt=prompt)
            p.scripts, p.script_args = runner, args
            processed = processing.process_images(p)
        finally:
            shared.state.end()
        seconds = time.perf_counter() - began
        return (
            f"<p>{html.escape(processed.info)}</p>",
            f"<p>{html.escape(processed.comments)}</p><div class='performance'>"
            f"Time taken: {seconds:.6f} sec.</div>",
        )

    return generate


def _settings():
    with gr.Blocks(analytics_enabled=False) as interface:
        apply = gr.Button("Apply settings", variant="primary", elem_id="settings_submit")
        done = gr.HTML(elem_id="settings_result")
        keys = [key for key, info in shared.opts.data_labels.items() if info.section]
        made = {key: _setting(key) for key in keys}
        saved = [key for key in keys if not shared.opts.data_labels[key].do_not_save]

        def run(*values):
            changed = [key for key, v in zip(saved, values, strict=True) if shared.opts.set(key, v)]
            return f"<p>{len(changed)} settings changed: {', '.join(changed)}.</p>"

        apply.click(fn=run, inputs=[made[key] for key in saved], outputs=[done])
    return interface


def _setting(key):
    info = shared.opts.data_labels[key]
    kinds = {str: gr.Textbox, int: gr.Number, bool: gr.Checkbox}
    component = info.component or kinds[type(info.default)]
    value = shared.opts.data.get(key, info.default)
    given = info.component_args() if callable(info.component_args) else info.component_args
    return component(label=info.label, value=value, elem_id=f"setting_{key}", **(given or {}))
