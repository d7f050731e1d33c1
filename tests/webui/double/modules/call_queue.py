"""Double of modules/call_queue.py.

The surface was read in lshqqytiger/stable-diffusion-webui-amdgpu e61adddd.
One generation at a time.
"""

from modules import fifo_lock

queue_lock = fifo_lock.FIFOLock()


def wrap_queued_call(func):
    def f(*args, **kwargs):
        with queue_lock:
            return func(*args, **kwargs)

    return f
