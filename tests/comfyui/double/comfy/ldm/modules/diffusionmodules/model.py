"""Double of comfy/ldm/modules/diffusionmodules/model.py (Comfy-Org/ComfyUI a125cd84).

It is the double of ldm's file, with ComfyUI's layers, and a Decoder that takes more arguments.
"""

from pathlib import Path

from comfy.ops import disable_weight_init as ops  # noqa: F401 - of the source below

_DOUBLE = Path(__file__).parents[6] / "webui" / "double"
_PLACE = _DOUBLE / "ldm" / "modules" / "diffusionmodules" / "model.py"
_SOURCE = _PLACE.read_text(encoding="utf-8")
for _name in ("Conv2d", "GroupNorm", "Linear"):
    _SOURCE = _SOURCE.replace(f"nn.{_name}(", f"ops.{_name}(")
_SOURCE = _SOURCE.replace("forward(self, z):", "forward(self, z, **kwargs):")
exec(compile(_SOURCE, _PLACE, "exec"))
