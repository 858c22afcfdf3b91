"""Forks the ranks of test worlds: see world.py. A rank's process group stays; each function has its own layout."""

import ctypes
import gc
import importlib
import os
import pickle
import pkgutil
import signal
import sys
import traceback
from datetime import timedelta
from multiprocessing.connection import Client, Connection

from megarl.common.trust.object_guard import guard_object_collectives

MAX_THREADS = 120  # between functions: their own groups are gone then; some caches and thread pools may stay


def main() -> None:
    """Import what ranks need once, and fork ranks as the session asks for them."""
    commands = Connection(int(sys.argv[1]))
    _import_all()
    while True:
        try:
            ranks, address, key = commands.recv()
        except (EOFError, ConnectionError):
            return
        commands.send([_fork(commands, variables, address, key) for variables in ranks])


def _import_all() -> None:
    """Import torch, Megatron-Core and every function that ranks run, and take them all out of garbage collection.

    A collection that visits all imported modules takes 0.2 s, which is more than most functions of a rank take.
    """
    from megarl import platforms

    platforms.activate()
    import torch

    torch.set_num_threads(1)
    package = importlib.import_module("tests.support.ranks")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
    gc.collect()
    gc.freeze()
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        raise RuntimeError(f"importing has started {threads - 1} threads: a process with threads cannot be forked")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # a rank that died leaves no zombie


def _fork(commands: Connection, variables: dict[str, str], address: tuple[str, int], key: bytes) -> int:
    """Return the process id of a new rank with these environment variables."""
    pid = os.fork()
    if pid:
        return pid
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: die with the parent
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        commands.close()
        os.environ.update(variables)
        _serve(address, key)
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def _serve(address: tuple[str, int], key: bytes) -> None:
    """Run the functions that the session asks this rank for, until the session closes the connection."""
    import torch

    guard_object_collectives()  # as join_peers does in a run
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
    connection = Client(address, authkey=key)
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
