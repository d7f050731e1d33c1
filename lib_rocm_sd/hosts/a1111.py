"""The name under which scripts/rocm_sd.py knows the WebUI's room: after an update, "Reload UI"
executes that file anew, beside the library that Python has imported before.
"""

from lib_rocm_sd.hosts.webui import register

__all__ = ["register"]
