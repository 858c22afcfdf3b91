"""Long-lived worlds of ranks for tests: one per world size, given functions by import path.

`World(4, starter).run("tests.support.ranks.training.policy:train", layout={"tensor": 2})` calls that function on
every rank and returns the list of results in rank order. A rank's exception is raised here with its traceback. A silent
rank is an error after `timeout` seconds, and the world is then killed (a world that failed is not reused).

Ranks find each other as under torchrun: its environment variables, and a store that is not of a rank. But all ranks of
a session are forked from one process, a `Starter`, because each would take 5 s to import torch and Megatron-Core.
"""

import contextlib
import multiprocessing
import pickle
import secrets
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection, Listener, wait
from typing import Any

import psutil
from torch.distributed import TCPStore

from tests.support.checkout import ROOT, environment

IMPORT_TIMEOUT_S = 300.0  # the starter imports torch and Megatron-Core
CONNECT_TIMEOUT_S = 120.0
HOST = "127.0.0.1"


class Starter:
    """The process that forks ranks. It is usable at once; the first world waits for its imports."""

    def __init__(self) -> None:
        self._commands, theirs = multiprocessing.Pipe()
        command = [sys.executable, "-m", "tests.support.worlds.world_worker", str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(
                command, env=environment(), cwd=ROOT, start_new_session=True, pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )  # fmt: skip

    def fork(self, ranks: list[dict[str, str]], address: Any, key: bytes) -> list[psutil.Process]:
        """Return a new process for each dict of environment variables, which will connect to `address`."""
        try:
            self._commands.send((ranks, address, key))
            if not self._commands.poll(IMPORT_TIMEOUT_S):
                raise TimeoutError(f"the starter of ranks has not imported all modules in {IMPORT_TIMEOUT_S:.0f} s")
            return [psutil.Process(pid) for pid in self._commands.recv()]
        except (EOFError, ConnectionError) as error:
            code = self._process.wait(timeout=60)
            raise RuntimeError(f"the starter of ranks has ended with code {code}: see this test's output") from error

    def close(self) -> None:
        self._commands.close()
        self._process.kill()
        self._process.wait(timeout=60)


class World:
    def __init__(self, size: int, starter: Starter) -> None:
        self.size = size
        key = secrets.token_bytes(16)
        # By default one rank may wait to be accepted; of eight at once, some would wait forever.
        listener = Listener((HOST, 0), backlog=size, authkey=key)
        listener._listener._socket.settimeout(CONNECT_TIMEOUT_S)  # type: ignore[attr-defined]
        self.store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        self._run_dir = tempfile.TemporaryDirectory(prefix="world-", ignore_cleanup_errors=True)
        common = {"MASTER_ADDR": HOST, "MASTER_PORT": str(self.store.port), "TORCHELASTIC_USE_AGENT_STORE": "True",
                  "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size),
                  "WORLD_RUN_DIR": self._run_dir.name}  # fmt: skip
        ranks = [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]
        self.processes: list[psutil.Process] = []
        self.connections: dict[int, Connection] = {}
        try:
            self.processes = starter.fork(ranks, listener.address, key)
            for _ in range(size):
                connection = listener.accept()
                self.connections[connection.recv()] = connection
        except BaseException:
            self.close()
            raise
        finally:
            listener.close()

    @property
    def alive(self) -> bool:
        return len(self.connections) == self.size and all(process.is_running() for process in self.processes)

    def run(self, target: str, timeout: float = 400.0, **kwargs: Any) -> list[Any]:
        for connection in self.connections.values():
            connection.send_bytes(pickle.dumps((target, kwargs)))  # plain, as in world_worker.py
        results: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + timeout
        rank_of = {id(connection): rank for rank, connection in self.connections.items()}
        while len(results) < self.size:
            missing = [c for rank, c in self.connections.items() if rank not in results]
            ready = wait(missing, timeout=max(0.0, deadline - time.monotonic()))
            failed = [f"rank {r}:\n{value}" for r, (ok, value) in results.items() if not ok]
            if not ready:
                self.close()
                silent = sorted(set(range(self.size)) - set(results))
                raise TimeoutError(f"{target}: no answer from ranks {silent} in {timeout} s\n" + "\n".join(failed))
            for connection in ready:
                rank = rank_of[id(connection)]
                try:
                    results[rank] = connection.recv()
                except EOFError:
                    results[rank] = (False, "the process died")
                if not results[rank][0]:
                    # The others may now wait for this one in a collective: give them a little time only.
                    deadline = min(deadline, time.monotonic() + 5.0)
        failures = [f"rank {r}:\n{value}" for r, (ok, value) in sorted(results.items()) if not ok]
        if failures:
            if len(failures) < self.size:
                self.close()
            raise AssertionError("\n".join(failures))
        return [results[rank][1] for rank in range(self.size)]

    def close(self) -> None:
        for connection in self.connections.values():
            connection.close()
        self.connections = {}
        self._run_dir.cleanup()
        for process in self.processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                # What a rank has spawned itself (Megatron's checkpoint manager) does not die with it.
                for each in [*process.children(recursive=True), process]:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        each.kill()
        _, alive = psutil.wait_procs(self.processes, timeout=120)
        assert not alive, f"ranks that were killed have not ended in 30 s: {alive}"
