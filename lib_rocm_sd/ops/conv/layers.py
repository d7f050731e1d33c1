"""The convolutions of a UNet's step as problems."""

from __future__ import annotations

from lib_rocm_sd.ops.conv.problem import ConvProblem
from lib_rocm_sd.unet_step import Conv


def problem_of_layer(layer: Conv) -> ConvProblem:
    """In half precision, with weights as they lie."""
    sizes = (layer.batch, layer.height, layer.width, layer.in_channels)
    fused = (layer.norm, layer.shortcut, layer.shortcut_channels, layer.statistics)
    return ConvProblem(
        *(layer.kind, *sizes, layer.out_channels, "float16", *fused),
        embedding=layer.embedding,
        in_rows=True,
    )
