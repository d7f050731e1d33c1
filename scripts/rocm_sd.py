"""The only file that the WebUI executes; our folder is on sys.path only while it does."""

from lib_rocm_sd.hosts import oldest

if oldest.torch_serves():
    from lib_rocm_sd.hosts.a1111 import register as a1111

    RocmSdScript, RocmSdExtras = a1111.register()
