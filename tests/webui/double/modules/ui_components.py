"""Double of modules/ui_components.py: InputAccordion.

For gradio 3 after lshqqytiger/stable-diffusion-webui-amdgpu e61adddd, for gradio 4 after
lllyasviel/stable-diffusion-webui-forge dfdcbab6, where it is a function around a class.
"""

import gradio as gr

_GRADIO_3 = gr.__version__.startswith("3.")


class InputAccordionImpl(gr.Checkbox):
    """A hidden checkbox, and an accordion that is open when it is checked."""

    global_index = 0

    def __init__(self, value=None, setup=False, **kwargs):
        if not setup:
            super().__init__(value=value, **kwargs)
            return
        self.accordion_id = kwargs.get("elem_id")
        if self.accordion_id is None:
            self.accordion_id = f"input-accordion-{InputAccordionImpl.global_index}"
            InputAccordionImpl.global_index += 1
        hidden = {**kwargs, "elem_id": f"{self.accordion_id}-checkbox", "visible": False}
        super().__init__(value=value, **hidden)
        script = f'function(checked){{ inputAccordionChecked("{self.accordion_id}", checked); }}'
        self.change(fn=None, inputs=[self], **{"_js" if _GRADIO_3 else "js": script})
        shown = {
            **kwargs,
            "elem_id": self.accordion_id,
            "label": kwargs.get("label", "Accordion"),
            "elem_classes": ["input-accordion"],
            "open": value,
        }
        self.accordion = gr.Accordion(**shown)

    def __enter__(self):
        self.accordion.__enter__()
        return self

    def __exit__(self, exc_type, exc_val, exc_tb):
        self.accordion.__exit__(exc_type, exc_val, exc_tb)

    def get_block_name(self):
        return "checkbox"


def InputAccordion(value=None, **kwargs):  # noqa: N802
    return InputAccordionImpl(value=value, setup=True, **kwargs)
