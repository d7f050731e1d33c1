"""Where a picture's time goes: `python -m lib_rocm_sd profile`."""
