"""Long-lived torchrun worlds for tests: one per world size, given functions by import path.

`World(4).run("tests.support.ranks.policy:broadcast", layout={"tensor": 2})` calls that function on every rank and
returns the list of results in rank order. A rank's exception is raised here with its traceback. A silent rank is an
error after `timeout` seconds, and the world is then killed (a world that failed is not reused).
"""

from __future__ import annotations

import contextlib
import os
import pickle
import secrets
import signal
import subprocess
import time
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any

import psutil

from tests.support.checkout import ROOT, environment, torchrun

START_TIMEOUT_S = 120.0  # each rank imports torch and Megatron-Core


class World:
    def __init__(self, size: int) -> None:
        self.size = size
        key = secrets.token_bytes(16)
        # By default one rank may wait to be accepted; of eight at once, some would wait for ever.
        listener = Listener(("127.0.0.1", 0), backlog=size, authkey=key)
        listener._listener._socket.settimeout(START_TIMEOUT_S)  # type: ignore[attr-defined]
        env = environment(MEGARL_TEST_WORLD_PORT=str(listener.address[1]), MEGARL_TEST_WORLD_KEY=key.hex())
        command = torchrun(size, str(Path(__file__).with_name("world_worker.py")))
        self.agent = subprocess.Popen(command, env=env, cwd=ROOT, start_new_session=True)
        self.connections: dict[int, Connection] = {}
        try:
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
        return self.agent.poll() is None and len(self.connections) == self.size

    def run(self, target: str, timeout: float = 120.0, **kwargs: Any) -> list[Any]:
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
        if self.agent.poll() is None:
            # Ranks die with the agent; what they have spawned themselves (Megatron's checkpoint manager) does not.
            descendants = psutil.Process(self.agent.pid).children(recursive=True)
            os.killpg(self.agent.pid, signal.SIGKILL)
            for process in descendants:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        self.agent.wait(timeout=30)
