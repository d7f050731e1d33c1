"""Double of modules/shared.py with parts of options.py and shared_state.py.

The surface was read in lshqqytiger/stable-diffusion-webui-amdgpu e61adddd.
"""

import time
from types import SimpleNamespace

import torch

from modules.shared_cmd_options import cmd_opts, parser

__all__ = ["cmd_opts", "parser"]


class OptionInfo:
    def __init__(
        self,
        default=None,
        label="",
        component=None,
        component_args=None,
        onchange=None,
        section=None,
        refresh=None,
        comment_before="",
        comment_after="",
        infotext=None,
        restrict_api=False,
        category_id=None,
    ):
        self.default = default
        self.label = label
        self.component = component
        self.component_args = component_args
        self.onchange = onchange
        self.section = section
        self.comment_after = comment_after
        self.infotext = infotext
        self.do_not_save = False

    def info(self, info):
        self.comment_after += f"<span class='info'>({info})</span>"
        return self


class Options:
    def __init__(self, data_labels, restricted_opts):
        self.__dict__["data_labels"] = dict(data_labels)
        self.__dict__["data"] = {key: info.default for key, info in data_labels.items()}

    def __setattr__(self, key, value):
        self.data[key] = value

    def __getattr__(self, item):
        try:
            return self.data[item]
        except KeyError as error:
            raise AttributeError(item) from error

    def add_option(self, key, info):
        self.data_labels[key] = info
        if not info.do_not_save:
            self.data.setdefault(key, info.default)

    def onchange(self, key, func, call=True):
        self.data_labels[key].onchange = func

    def set(self, key, value, is_api=False, run_callbacks=True):
        """What "Apply settings" does with one option."""
        if self.data.get(key) == value or self.data_labels[key].do_not_save:
            return False
        self.data[key] = value
        changed = self.data_labels[key].onchange
        if run_callbacks and changed is not None:
            changed()
        return True


class State:
    def __init__(self):
        self.interrupted = False
        self.skipped = False
        self.stopping_generation = False
        self.job = ""
        self.job_count = 0
        self.sampling_step = 0
        self.current_latent = None
        self.current_image = None
        self.textinfo = None

    def begin(self, job="(unknown)"):
        self.interrupted = self.skipped = self.stopping_generation = False
        self.current_latent = self.textinfo = None
        self.job, self.job_count, self.time_start = job, -1, time.time()

    def end(self):
        self.job, self.job_count = "", 0

    def interrupt(self):
        self.interrupted = True

    def do_set_current_image(self):
        """Called by the web server's threads, for the progress bar; errors are recorded only."""
        if self.current_latent is None:
            return
        from modules import errors, sd_samplers_common

        try:
            self.assign_current_image(sd_samplers_common.sample_to_image(self.current_latent))
        except Exception:
            errors.record_exception()

    def assign_current_image(self, image):
        self.current_image = image


opts = Options(
    {
        "cross_attention_optimization": OptionInfo("Automatic"),
        "upcast_attn": OptionInfo(False),
        "sd_model_checkpoint": OptionInfo("model-0"),
        "live_previews_enable": OptionInfo(True),
        "live_preview_fast_interrupt": OptionInfo(False),
        "live_preview_allow_lowvram_full": OptionInfo(False),
        "show_progress_type": OptionInfo("Full"),
        "show_progress_every_n_steps": OptionInfo(0),
        "infotext_skip_pasting": OptionInfo([]),
        "enable_pnginfo": OptionInfo(True),
        "samples_save": OptionInfo(False),
        "auto_vae_precision": OptionInfo(True),
        "ESRGAN_tile": OptionInfo(192),
        "ESRGAN_tile_overlap": OptionInfo(8),
        "upscaler_for_img2img": OptionInfo(None),
    },
    restricted_opts=set(),
)
state = State()
device = torch.device("cpu")
parallel_processing_allowed = False
loaded_hypernetworks = []
xformers_available = False
sd_model = None
sd_upscalers = []
demo = None
prompt_styles = SimpleNamespace()
