"""Double of ldm_patched/modules/sd.py: memory is asked for before a decode.

The surface was read in Panchovix/stable-diffusion-webui-reForge 3b56b268.
`no_init` is the only way to make one here: what the real one guesses from weights is set by hand.
"""

import torch

from ldm_patched.modules import model_management


class VAE:
    def __init__(self, sd=None, device=None, config=None, dtype=None, metadata=None, no_init=False):
        assert no_init
        self.disable_offload = False

    def throw_exception_if_invalid(self):
        pass

    def decode(self, samples_in, vae_options={}):  # noqa: B006 - as there
        memory_used = self.memory_used_decode(samples_in.shape, self.vae_dtype)
        model_management.load_models_gpu(
            [self.patcher], memory_required=memory_used, force_full_load=self.disable_offload
        )
        try:
            parts = samples_in.split(self._batch(memory_used))
            made = [self._decoded(part.to(self.vae_dtype), **vae_options) for part in parts]
        except model_management.OOM_EXCEPTION:
            made = [self._decoded(samples_in[:, :, :4].to(self.vae_dtype))]
        return torch.cat(made).to(self.output_device).movedim(1, -1)

    def encode(self, pixel_samples):
        pixels = self.process_input(pixel_samples.movedim(-1, 1))
        memory_used = self.memory_used_encode(pixels.shape, self.vae_dtype)
        model_management.load_models_gpu(
            [self.patcher], memory_required=memory_used, force_full_load=self.disable_offload
        )
        return self.first_stage_model.encode(pixels.to(self.vae_dtype)).float()

    def _batch(self, memory_used):
        return max(1, int(model_management.get_free_memory(self.device) / memory_used))

    def _decoded(self, samples, **options):
        return self.process_output(self.first_stage_model.decode(samples, **options).float())
