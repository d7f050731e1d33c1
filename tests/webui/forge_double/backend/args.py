"""Double of backend/args.py: those flags that matter to us.

The surface was read in lllyasviel/stable-diffusion-webui-forge dfdcbab6.
"""

import argparse

parser = argparse.ArgumentParser()
parser.add_argument("--vae-in-fp16", action="store_true")
parser.add_argument("--always-gpu", action="store_true")
args = parser.parse_known_args([])[0]
dynamic_args = {"embedding_dir": "./embeddings", "emphasis_name": "original"}
