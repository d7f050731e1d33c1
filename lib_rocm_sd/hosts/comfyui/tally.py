"""What was ours in this process, what was left to ComfyUI, and why."""

from __future__ import annotations

from lib_rocm_sd.hosts.ours import Tally

UNET = "UNet"
LEFT = "left to ComfyUI's own code: "
"""How the report's events about calls begin."""

tally = Tally(f"{LEFT}{{what}}: {{why}}")
"""The process's."""
