"""What lies in `inside` runs in a process of its own, with packages of its own: test_webui.py."""

collect_ignore = ["inside", "double"]
