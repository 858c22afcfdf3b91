"""A run for the soak's injector of which only the files and some processes are there."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from benchmarks.soak_kinds import KINDS, Fault
from benchmarks.soak_processes import Replica

BUSY = "while True: pass"


def fault_of(name: str, index: int = 0, after_step: int = 1, seconds: float = 0.0) -> Fault:
    return Fault(KINDS[name], index, after_step, 0.0, seconds)


class Run:
    """Two replicas that are processes, and a metrics.jsonl to which steps are added."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory = directory
        self.started: list[psutil.Popen] = []  # all that `close` ends, whatever a test has made of them
        self.replicas = {index: self.start() for index in range(2)}
        monkeypatch.setattr("soak_place.find_replicas", self.find)
        monkeypatch.setattr("soak_place.find_processes", self.find_processes)
        monkeypatch.setattr("soak_place.find_agent", self.find_agent)
        monkeypatch.setattr("soak_watch.restarts_among", lambda ranks: (self.restarts, self.left))
        monkeypatch.setattr("soak_watch.WatchedRun.POLL_S", 0.02)
        self.workers = [self.start().engine for _ in range(2)]
        self.agent, self.restarts, self.left = psutil.Process(), 0, 0
        self.steps = 0

    def start(self) -> Replica:
        engine = psutil.Popen([sys.executable, "-c", BUSY])
        self.started.append(engine)
        return Replica(actor=engine, engine=engine)

    def find(self, run_dir: Path) -> dict[int, Replica]:
        return {index: each for index, each in self.replicas.items() if self.alive(each.engine)}

    def find_processes(self, run_dir: Path, target: str) -> list[psutil.Process]:
        """The processes of every part but the replicas: `workers`."""
        return [each for each in self.workers if self.alive(each)]

    def find_agent(self, run_dir: Path) -> psutil.Process:
        return self.agent

    @staticmethod
    def alive(process: psutil.Process) -> bool:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE

    def step(self, **metrics: float) -> None:
        self.steps += 1
        with (self.directory / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": self.steps, "time/step": 1.0, "wall_time": time.time(), **metrics}) + "\n")

    def close(self) -> None:
        for each in self.started:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.send_signal(signal.SIGCONT)
                each.kill()
                each.wait(60)
