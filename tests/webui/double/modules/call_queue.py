"""Double of modules/call_queue.py.

The surface was read in lshqqytiger/stable-diffusion-webui-amdgpu e61adddd.
One generation at a time.
"""

import threading

queue_lock = threading.RLock()


def wrap_queued_call(func):
    def f(*args, **kwargs):
        with queue_lock:
            return func(*args, **kwargs)

    return f
