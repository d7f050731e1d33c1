"""Double of modules/shared_cmd_options.py and modules/cmd_args.py.

The surface was read in lshqqytiger/stable-diffusion-webui-amdgpu e61adddd.
Each extension's preload() may add flags. The test driver gives the command line in an environment
variable.
"""

import argparse
import os
import shlex

from modules import script_loading
from modules.paths_internal import extensions_dir

parser = argparse.ArgumentParser()
for flag in (
    "--xformers",
    "--force-enable-xformers",
    "--opt-sdp-attention",
    "--opt-sdp-no-mem-attention",
    "--opt-split-attention",
    "--opt-split-attention-v1",
    "--opt-split-attention-invokeai",
    "--disable-opt-split-attention",
    "--disable-nan-check",
    "--skip-load-model-at-start",
    "--no-half",
    "--no-half-vae",
    "--lowvram",
    "--medvram",
    "--no-prompt-history",
    "--api",
    "--nowebui",
):
    parser.add_argument(flag, action="store_true")
for flag in ("--api-auth", "--server-name", "--cors-allow-origins", "--ngrok"):
    parser.add_argument(flag, type=str)

script_loading.preload_extensions(extensions_dir, parser)
cmd_opts = parser.parse_args(shlex.split(os.environ.get("ROCM_SD_DOUBLE_ARGS", "")))
