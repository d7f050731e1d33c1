"""Double of modules/call_queue.py.

The surface was read in lshqqytiger/stable-diffusion-webui-amdgpu e61adddd.
One generation at a time.
"""

import threading

queue_lock = threading.RLock()
waiting = []
"""The calls that wait for the others. Not the WebUI's: it is here for the tests."""


def wrap_queued_call(func):
    def f(*args, **kwargs):
        waiting.append(func)
        with queue_lock:
            waiting.remove(func)
            return func(*args, **kwargs)

    return f
