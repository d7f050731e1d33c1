"""Double of modules/infotext_utils.py.

The surface was read in lshqqytiger/stable-diffusion-webui-amdgpu e61adddd.
Quoting, parsing, and what the paste button does.
"""

import json
import re

import gradio as gr

from modules import errors, script_callbacks

re_param = re.compile(r'\s*(\w[\w \-/]+):\s*("(?:\\.|[^\\"])+"|[^,]*)(?:,|$)')


class PasteField(tuple):
    def __new__(cls, component, target, *, api=None):
        return super().__new__(cls, (component, target))

    def __init__(self, component, target, *, api=None):
        super().__init__()
        self.api = api
        self.component = component
        self.label = target if isinstance(target, str) else None
        self.function = target if callable(target) else None


paste_fields: dict[str, dict] = {}


def quote(text):
    if not any(mark in str(text) for mark in ",\n:"):
        return text
    return json.dumps(text, ensure_ascii=False)


def unquote(text):
    if len(text) == 0 or text[0] != '"' or text[-1] != '"':
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def add_paste_fields(tabname, init_img, fields, override_settings_component=None):
    fields = [x if isinstance(x, PasteField) else PasteField(*x) for x in fields or []]
    paste_fields[tabname] = {"init_img": init_img, "fields": fields}


def parse_generation_parameters(x, skip_fields=None):
    *lines, last = x.strip().split("\n")
    res = {"Prompt": "\n".join(lines)}
    for key, value in re_param.findall(last):
        res[key] = unquote(value)
    return res


def paste(tabname, infotext):
    """What connect_paste's inner function returns: an update for each field, by component."""
    params = parse_generation_parameters(infotext)
    script_callbacks.infotext_pasted_callback(infotext, params)
    res = {}
    for output, key in paste_fields[tabname]["fields"]:
        try:
            value = key(params) if callable(key) else params.get(key)
        except Exception:
            errors.report(f"Error executing {key}", exc_info=True)
            value = None
        if value is None:
            res[output] = gr.update()
            continue
        kind = type(output.value)
        value = False if kind is bool and value == "False" else kind(value)
        res[output] = gr.update(value=value)
    return res
