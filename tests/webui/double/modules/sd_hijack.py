"""Double of modules/sd_hijack.py.

The surface was read in lshqqytiger/stable-diffusion-webui-amdgpu e61adddd.
How optimizers are listed, picked, applied and undone.
"""

import ldm.modules.attention
import ldm.modules.diffusionmodules.model
import sgm.modules.attention
import sgm.modules.diffusionmodules.model
from torch.nn.functional import silu

from modules import errors, script_callbacks, shared
from modules.hypernetworks import hypernetwork

diffusionmodules_model_nonlinearity = ldm.modules.diffusionmodules.model.nonlinearity
diffusionmodules_model_AttnBlock_forward = (  # noqa: N816
    ldm.modules.diffusionmodules.model.AttnBlock.forward
)

ldm.modules.attention.MemoryEfficientCrossAttention = ldm.modules.attention.CrossAttention
ldm.modules.attention.BasicTransformerBlock.ATTENTION_MODES["softmax-xformers"] = (
    ldm.modules.attention.CrossAttention
)

optimizers = []
current_optimizer = None


def list_optimizers():
    new_optimizers = [x for x in script_callbacks.list_optimizers_callback() if x.is_available()]
    optimizers.clear()
    optimizers.extend(sorted(new_optimizers, key=lambda x: x.priority, reverse=True))


def apply_optimizations(option=None):
    global current_optimizer

    undo_optimizations()
    if len(optimizers) == 0:
        current_optimizer = None
        return ""

    ldm.modules.diffusionmodules.model.nonlinearity = silu
    sgm.modules.diffusionmodules.model.nonlinearity = silu

    if current_optimizer is not None:
        current_optimizer.undo()
        current_optimizer = None

    selection = option or shared.opts.cross_attention_optimization
    if selection == "Automatic":
        flagged = [
            x for x in optimizers if x.cmd_opt and getattr(shared.cmd_opts, x.cmd_opt, False)
        ]
        matching = flagged[0] if flagged else optimizers[0]
    else:
        matching = next((x for x in optimizers if x.title() == selection), None)

    if selection == "None" or (
        selection == "Automatic" and shared.cmd_opts.disable_opt_split_attention
    ):
        matching = None
    elif matching is None:
        matching = optimizers[0]

    if matching is None:
        print("Disabling attention optimization")
        return ""
    print(f"Applying attention optimization: {matching.name}... ", end="")
    matching.apply()
    print("done.")
    current_optimizer = matching
    return current_optimizer.name


def undo_optimizations():
    # As in the real one, sgm's AttnBlock gets ldm's forward here.
    for family in (ldm, sgm):
        family.modules.diffusionmodules.model.nonlinearity = diffusionmodules_model_nonlinearity
        family.modules.attention.CrossAttention.forward = (
            hypernetwork.attention_CrossAttention_forward
        )
        family.modules.diffusionmodules.model.AttnBlock.forward = (
            diffusionmodules_model_AttnBlock_forward
        )


class StableDiffusionModelHijack:
    optimization_method = None

    def __init__(self):
        self.extra_generation_params = {}
        self.comments = []

    def apply_optimizations(self, option=None):
        try:
            self.optimization_method = apply_optimizations(option)
        except Exception as e:
            errors.display(e, "applying cross attention optimization")
            undo_optimizations()

    def hijack(self, m):
        self.apply_optimizations()

    def undo_hijack(self, m):
        undo_optimizations()

    def redo_hijack(self, m):
        self.undo_hijack(m)
        self.hijack(m)


model_hijack = StableDiffusionModelHijack()
