"""Double of modules/paths_internal.py.

The surface was read in lshqqytiger/stable-diffusion-webui-amdgpu e61adddd.
Folders, --data-dir included. The test driver names the data folder in an environment variable,
where the real one reads the command line.
"""

import os
from pathlib import Path

modules_path = str(Path(__file__).resolve().parent)
script_path = str(Path(modules_path).parent)
data_path = os.environ["ROCM_SD_DOUBLE_DATA"]
extensions_dir = str(Path(data_path) / "extensions")
default_output_dir = str(Path(data_path) / "outputs")
