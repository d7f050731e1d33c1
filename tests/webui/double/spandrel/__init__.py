"""Double of the package spandrel, by which the WebUI loads upscaling networks: of one architecture.

The surface was read in spandrel 0.3.4.
"""

import torch

from spandrel.architectures.Compact.arch.SRVGG import SRVGGNetCompact


class ImageModelDescriptor:
    def __init__(self, model, scale, input_channels):
        self._model = model
        self.scale, self.input_channels = scale, input_channels
        self.supports_half = True

    @property
    def model(self):
        return self._model

    def to(self, device=None, dtype=None):
        self.model.to(device=device, dtype=dtype)
        return self

    @torch.inference_mode()
    def __call__(self, image):
        return self.model(image).clamp_(0, 1)


class ModelLoader:
    def __init__(self, device=None):
        self.device = device

    def load_from_file(self, path):
        state = torch.load(path, weights_only=True, map_location=self.device)
        features, channels = state["body.0.weight"].shape[:2]
        last = max(int(key.split(".")[1]) for key in state)
        scale = round((len(state[f"body.{last}.bias"]) / channels) ** 0.5)
        shape = {"num_in_ch": channels, "num_out_ch": channels, "num_feat": features}
        network = SRVGGNetCompact(**shape, num_conv=(last - 2) // 2, upscale=scale)
        network.load_state_dict(state)
        return ImageModelDescriptor(network, scale, channels)
