"""One rank of a test world: see world.py. The process group stays; each function builds and destroys its own layout."""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import pickle
import signal
import traceback
from datetime import timedelta
from multiprocessing.connection import Client

MAX_THREADS = 120  # between functions: their own groups are gone then; some caches and thread pools may stay


def main() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: die with torchrun's agent
    from megarl import platforms

    platforms.activate()
    import torch

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
    key = bytes.fromhex(os.environ["MEGARL_TEST_WORLD_KEY"])
    connection = Client(("127.0.0.1", int(os.environ["MEGARL_TEST_WORLD_PORT"])), authkey=key)
    connection.send(torch.distributed.get_rank())
    leak = ""
    while True:
        try:
            target, kwargs = connection.recv()
        except (EOFError, ConnectionError):
            os._exit(0)
        try:
            module, _, name = target.partition(":")
            if leak:
                raise RuntimeError(leak)  # or the rest of the session would be many times slower, without a word
            answer = (True, getattr(importlib.import_module(module), name)(**kwargs))
        except Exception:
            answer = (False, traceback.format_exc())
        # Plain pickle: torch's own pickler would share tensors by file descriptor, which needs a common key.
        connection.send_bytes(pickle.dumps(answer))
        # A function's model is garbage with cycles, and keeps its gloo groups (3 threads each, always awake) alive.
        del answer, kwargs
        gc.collect()
        gc.collect()  # the first round frees optimizers, whose views of parameters hide DDP's hooks from it
        threads = len(os.listdir("/proc/self/task"))
        leak = f"{target} left {threads} threads behind: process groups that something still refers to"
        leak = leak if threads > MAX_THREADS else ""


if __name__ == "__main__":
    main()
