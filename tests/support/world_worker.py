"""One rank of a test world: see world.py. The process group stays; each case builds and destroys its own layout."""

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
    while True:
        try:
            target, kwargs = connection.recv()
        except (EOFError, ConnectionError):
            os._exit(0)
        try:
            module, _, name = target.partition(":")
            answer = (True, getattr(importlib.import_module(module), name)(**kwargs))
        except Exception:
            answer = (False, traceback.format_exc())
        # Models hold process groups in reference cycles, and each group has three threads: collect between cases.
        gc.collect()
        # Plain pickle: torch's own pickler would share tensors by file descriptor, which needs a common key.
        connection.send_bytes(pickle.dumps(answer))
        # A case's model is garbage with cycles, and keeps its gloo groups (3 threads each, always awake) alive.
        del answer, kwargs
        gc.collect()


if __name__ == "__main__":
    main()
