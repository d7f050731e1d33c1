"""Double of modules/paths.py.

The surface was read in lshqqytiger/stable-diffusion-webui-amdgpu e61adddd.
"""

from modules.paths_internal import data_path, extensions_dir, script_path

__all__ = ["data_path", "extensions_dir", "script_path"]
