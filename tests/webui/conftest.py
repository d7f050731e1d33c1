"""What lies in `inside`, `machine` and `forge` runs in processes of its own, with packages of its
own: test_webui_a1111.py, test_webui_a1111_unet.py, test_webui_forge.py, test_machine_code.py,
test_forge_host.py.
"""

collect_ignore = ["inside", "machine", "double", "forge", "forge_double", "reforge_double"]
