"""What lies in `inside` and `machine` runs in processes of its own, with packages of its own:
test_webui_a1111.py, test_webui_a1111_unet.py, test_webui_forge.py, test_machine_code.py.
"""

collect_ignore = ["inside", "machine", "double"]
