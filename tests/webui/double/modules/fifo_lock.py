"""Double of modules/fifo_lock.py.

The surface was read in lshqqytiger/stable-diffusion-webui-amdgpu e61adddd.
Whoever holds it and asks again waits for ever; nobody can wait for a time.
"""

import threading


class FIFOLock:
    def __init__(self):
        self._lock = threading.Lock()

    def acquire(self, blocking=True):
        return self._lock.acquire(blocking)

    def release(self):
        self._lock.release()

    __enter__ = acquire

    def __exit__(self, t, v, tb):
        self.release()
