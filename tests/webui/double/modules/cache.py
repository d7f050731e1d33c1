"""Double of modules/cache.py.

The surface was read in lshqqytiger/stable-diffusion-webui-amdgpu e61adddd.
Only where the cache lies.
"""

import os
from pathlib import Path

from modules.paths_internal import data_path

cache_dir = os.environ.get("SD_WEBUI_CACHE_DIR", str(Path(data_path) / "cache"))
