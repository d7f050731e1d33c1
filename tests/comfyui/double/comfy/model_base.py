"""Double of comfy/model_base.py (Comfy-Org/ComfyUI a125cd84): a model, one attention if not told
otherwise.
"""

import torch
from comfy.ldm.modules.attention import CrossAttention
from comfy.patcher_extension import WrapperExecutor, WrappersMP, get_all_wrappers


class _Sampling:
    def sigma(self, timestep):
        return timestep / 1000 + 0.5


class BaseModel(torch.nn.Module):
    def __init__(self, model_config, model_type=None, device=None, unet_model=CrossAttention):
        super().__init__()
        self.diffusion_model = unet_model(**model_config)
        self.device, self.current_patcher = device, None
        self.model_sampling, self.adm_channels = _Sampling(), 0

    def apply_model(
        self,
        x,
        t,
        c_concat=None,
        c_crossattn=None,
        control=None,
        transformer_options={},  # noqa: B006
        **kwargs,
    ):
        wrappers = get_all_wrappers(WrappersMP.APPLY_MODEL, transformer_options)
        executor = WrapperExecutor.new_class_executor(self._apply_model, self, wrappers)
        return executor.execute(x, t, c_concat, c_crossattn, control, transformer_options, **kwargs)

    def _apply_model(self, x, t, c_concat, c_crossattn, control, transformer_options, **kwargs):
        if t is None:
            return self.diffusion_model(x, c_crossattn, transformer_options=transformer_options)
        dtype = self.diffusion_model.dtype
        return self.diffusion_model(
            x.to(dtype),
            t,
            context=c_crossattn.to(dtype),
            control=control,
            transformer_options=transformer_options,
            **kwargs,
        ).float()
