"""Double of ldm_patched/modules/args_parser.py: those flags that matter to us.

The surface was read in Panchovix/stable-diffusion-webui-reForge 3b56b268.
"""

import argparse

parser = argparse.ArgumentParser()
parser.add_argument("--vae-in-fp16", action="store_true")
parser.add_argument("--always-gpu", action="store_true")
args = parser.parse_known_args([])[0]
