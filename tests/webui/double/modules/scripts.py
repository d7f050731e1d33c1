"""Double of modules/scripts.py.

The surface was read in lshqqytiger/stable-diffusion-webui-amdgpu e61adddd.
Script, loading, and ScriptRunner's hooks in their order.
"""

import re
import sys
from collections import namedtuple
from pathlib import Path

import gradio as gr

from modules import (
    errors,
    extensions,
    paths,
    script_callbacks,
    script_loading,
    scripts_postprocessing,
)

AlwaysVisible = object()


class PostSampleArgs:
    def __init__(self, samples):
        self.samples = samples


class PostprocessBatchListArgs:
    def __init__(self, images):
        self.images = images


class Script:
    name = None
    section = None
    filename = None
    args_from = None
    args_to = None
    alwayson = False
    is_txt2img = False
    is_img2img = False
    tabname = None
    group = None
    create_group = True
    infotext_fields = None
    paste_field_names = None
    api_info = None
    setup_for_ui_only = False
    controls = None

    def title(self):
        raise NotImplementedError

    def ui(self, is_img2img):
        pass

    def show(self, is_img2img):
        return True

    def setup(self, p, *args):
        pass

    def before_process(self, p, *args):
        pass

    def process(self, p, *args):
        pass

    def before_process_batch(self, p, *args, **kwargs):
        pass

    def process_batch(self, p, *args, **kwargs):
        pass

    def process_before_every_sampling(self, p, *args, **kwargs):
        pass

    def post_sample(self, p, ps, *args):
        pass

    def postprocess_batch(self, p, *args, **kwargs):
        pass

    def postprocess_batch_list(self, p, pp, *args, **kwargs):
        pass

    def postprocess(self, p, processed, *args):
        pass

    def elem_id(self, item_id):
        tab = "img2img_" if self.is_img2img else "txt2img_"
        tab = tab if self.show(True) == self.show(False) else ""
        title = re.sub(r"[^a-z_0-9]", "", re.sub(r"\s", "_", self.title().lower()))
        return f"script_{tab}{title}_{item_id}"


current_basedir = paths.script_path
scripts_data = []
postprocessing_scripts_data = []
ScriptClassData = namedtuple("ScriptClassData", ["script_class", "path", "basedir", "module"])


def load_scripts():
    """Clears all callbacks; executes each extension's scripts, its folder on sys.path just then."""
    global current_basedir, scripts_txt2img, scripts_img2img, scripts_postproc
    scripts_data.clear()
    postprocessing_scripts_data.clear()
    script_callbacks.clear_callbacks()
    syspath = sys.path
    for extension in extensions.active():
        for path in extension.list_files("scripts", ".py"):
            try:
                sys.path = [extension.path, *sys.path]
                current_basedir = extension.path
                module = script_loading.load_module(path)
                for value in module.__dict__.values():
                    if not isinstance(value, type):
                        continue
                    data = ScriptClassData(value, path, extension.path, module)
                    if issubclass(value, Script):
                        scripts_data.append(data)
                    elif issubclass(value, scripts_postprocessing.ScriptPostprocessing):
                        postprocessing_scripts_data.append(data)
            except Exception:
                errors.report(f"Error loading script: {Path(path).name}", exc_info=True)
            finally:
                sys.path = syspath
                current_basedir = paths.script_path
    scripts_txt2img = ScriptRunner()
    scripts_img2img = ScriptRunner()
    scripts_postproc = scripts_postprocessing.ScriptPostprocessingRunner()


class ScriptRunner:
    def __init__(self):
        self.scripts = []
        self.selectable_scripts = []
        self.alwayson_scripts = []
        self.title_map = {}
        self.infotext_fields = []
        self.paste_field_names = []
        self.inputs = [None]

    def initialize_scripts(self, is_img2img):
        for items in (self.scripts, self.alwayson_scripts, self.selectable_scripts):
            items.clear()
        for data in scripts_data:
            script = data.script_class()
            script.filename = data.path
            script.is_txt2img = not is_img2img
            script.is_img2img = is_img2img
            script.tabname = "img2img" if is_img2img else "txt2img"
            visibility = script.show(script.is_img2img)
            if visibility == AlwaysVisible:
                self.scripts.append(script)
                self.alwayson_scripts.append(script)
                script.alwayson = True
            elif visibility:
                self.scripts.append(script)
                self.selectable_scripts.append(script)

    def create_script_ui(self, script):
        from modules.api import models

        script.args_from = script.args_to = len(self.inputs)
        try:
            controls = script.ui(script.is_img2img)
        except Exception:
            errors.report(f"Error calling: {script.filename}/ui", exc_info=True)
            return
        script.controls = controls
        if controls is None:
            return
        script.name = script.title().lower()
        args = []
        for control in controls:
            control.custom_script_source = Path(script.filename).name
            info = models.ScriptArg(label=control.label or "", value=control.value)
            choices = getattr(control, "choices", None)
            if choices is not None:
                info.choices = [x[0] if isinstance(x, tuple) else x for x in choices]
            args.append(info)
        script.api_info = models.ScriptInfo(script.name, script.alwayson, script.is_img2img, args)
        self.infotext_fields += script.infotext_fields or []
        self.paste_field_names += script.paste_field_names or []
        self.inputs += controls
        script.args_to = len(self.inputs)

    def prepare_ui(self):
        self.inputs = [None]

    def setup_ui(self):
        self.title_map = {script.title().lower(): script for script in self.scripts}
        for script in self.alwayson_scripts:
            if script.create_group:
                with gr.Group(visible=script.alwayson) as group:
                    self.create_script_ui(script)
                script.group = group
            else:
                self.create_script_ui(script)
        for script in self.selectable_scripts:
            with gr.Group(visible=False) as group:
                self.create_script_ui(script)
            script.group = group
        dropdown = gr.Dropdown(
            label="Script", choices=["None"], value="None", type="index", elem_id="script_list"
        )
        self.inputs[0] = dropdown
        return self.inputs

    def script(self, title):
        return self.title_map.get(title.lower())

    def _each(self, method, p, *first, **kwargs):
        for script in self.alwayson_scripts:
            if getattr(type(script), method, None) is getattr(Script, method):
                continue
            try:
                script_args = p.script_args[script.args_from : script.args_to]
                getattr(script, method)(p, *first, *script_args, **kwargs)
            except Exception:
                errors.report(f"Error running {method}: {script.filename}", exc_info=True)

    def setup_scrips(self, p, *, is_ui=True):
        self._each("setup", p)

    def before_process(self, p):
        self._each("before_process", p)

    def process(self, p):
        self._each("process", p)

    def before_process_batch(self, p, **kwargs):
        self._each("before_process_batch", p, **kwargs)

    def process_batch(self, p, **kwargs):
        self._each("process_batch", p, **kwargs)

    def process_before_every_sampling(self, p, **kwargs):
        self._each("process_before_every_sampling", p, **kwargs)

    def post_sample(self, p, ps):
        self._each("post_sample", p, ps)

    def postprocess_batch(self, p, images, **kwargs):
        self._each("postprocess_batch", p, images=images, **kwargs)

    def postprocess_batch_list(self, p, pp, **kwargs):
        self._each("postprocess_batch_list", p, pp, **kwargs)

    def postprocess(self, p, processed):
        self._each("postprocess", p, processed)

    def reload_sources(self, cache):
        """The developers' "Reload script bodies only": executes the file outside load_scripts."""
        for index, script in list(enumerate(self.scripts)):
            module = cache.get(script.filename)
            if module is None:
                module = cache[script.filename] = script_loading.load_module(script.filename)
            for script_class in module.__dict__.values():
                if type(script_class) is type and issubclass(script_class, Script):
                    self.scripts[index] = script_class()
                    self.scripts[index].filename = script.filename
                    self.scripts[index].args_from = script.args_from
                    self.scripts[index].args_to = script.args_to


scripts_txt2img = None
scripts_img2img = None
scripts_postproc = None


def reload_script_body_only():
    cache: dict = {}
    scripts_txt2img.reload_sources(cache)
    scripts_img2img.reload_sources(cache)
