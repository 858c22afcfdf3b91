"""Runs units of work in forked processes, which get one unit at a time and report the bytes done.

Workers are forked once, from a process without threads, and are killed when it ends (PR_SET_PDEATHSIG). With one worker
the units run in the calling process.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import cast

from megarl.checkpoint.convert.target import from_os_error
from megarl.common.errors import ConversionError
from megarl.common.process.memory_tuning import map_large_blocks
from megarl.common.values import MIB

ReportBytes = Callable[[int], None]  # is called with the bytes done since the last call
Work = Callable[[int, ReportBytes], None]  # does the unit with this number
_SILENCE_S = 3600.0
_MAPPED_BYTES = 4 * MIB  # of a block; smaller ones come from a heap, which is faster


def run_units(units: Sequence[int], work: Work, workers: int, report: ReportBytes) -> None:
    """Do every unit once; the first failure ends all workers.

    Raises ConversionError for an OSError, or if a worker reports nothing for an hour. Of a worker process, a ValueError
    and a premature end become a ConversionError too, and other exceptions a RuntimeError with the traceback.
    """
    # On a heap the places of freed copies of tensors would stay below small objects that live on, more with each size.
    map_large_blocks(_MAPPED_BYTES)
    if workers <= 1 or len(units) <= 1:
        for number in units:
            _do(work, number, report)
        return
    _Pool(work, min(workers, len(units)), report).run(list(units))


def _do(work: Work, number: int, report: ReportBytes) -> None:
    try:
        work(number, report)
    except OSError as error:
        raise from_os_error(error, f"writing unit {number}") from error


class _Pool:
    """Forked workers; `_busy` has the unit of each, or None, and `_heard` when it last reported or was given one."""

    def __init__(self, work: Work, workers: int, report: ReportBytes) -> None:
        self._report = report
        self._busy: dict[Connection, int | None] = {}
        self._heard: dict[Connection, float] = {}
        self._processes: dict[Connection, BaseProcess] = {}
        context = multiprocessing.get_context("fork")
        for _ in range(workers):
            ours, theirs = cast("tuple[Connection, Connection]", context.Pipe())
            process = context.Process(target=_serve, args=(work, theirs, [*self._busy, ours], os.getpid()), daemon=True)
            process.start()
            theirs.close()
            self._busy[ours], self._processes[ours] = None, process

    def run(self, units: list[int]) -> None:
        try:
            waiting = units[::-1]
            for connection in self._busy:
                self._next(connection, waiting)
            while any(number is not None for number in self._busy.values()):
                busy = [connection for connection, number in self._busy.items() if number is not None]
                latest = min(self._heard[each] for each in busy) + _SILENCE_S
                for each in wait(busy, timeout=max(0.0, latest - time.monotonic())):
                    self._receive(cast("Connection", each), waiting)
                self._check_silence()
        finally:
            for connection, process in self._processes.items():
                connection.close()
                if any(number is not None for number in self._busy.values()):
                    process.kill()
                process.join(timeout=10)

    def _check_silence(self) -> None:
        """Raise for a worker that hangs, e.g. in a file system, although others may still report."""
        now = time.monotonic()
        silent = sorted(
            number
            for connection, number in self._busy.items()
            if number is not None and now - self._heard[connection] >= _SILENCE_S
        )
        if silent:
            units = f"unit {silent[0]} has" if len(silent) == 1 else f"units {silent} have"
            raise ConversionError(f"{units} made no progress for {_SILENCE_S:.0f} s; continue with --resume")

    def _receive(self, connection: Connection, waiting: list[int]) -> None:
        self._heard[connection] = time.monotonic()
        try:
            kind, value = connection.recv()
        except EOFError:
            process = self._processes[connection]
            process.join(timeout=10)
            raise ConversionError(
                f"the worker of unit {self._busy[connection]} died ({_cause(process.exitcode)}); continue with --resume"
            ) from None
        if kind == "bytes":
            self._report(value)
        elif kind == "done":
            self._next(connection, waiting)
        elif kind == "problem":
            raise ConversionError(value)
        else:
            raise RuntimeError(f"a worker failed:\n{value}")

    def _next(self, connection: Connection, waiting: list[int]) -> None:
        self._busy[connection] = waiting.pop() if waiting else None
        self._heard[connection] = time.monotonic()
        if self._busy[connection] is not None:
            connection.send(self._busy[connection])


def _serve(work: Work, connection: Connection, others: list[Connection], parent: int) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it
    for other in others:
        other.close()

    def report(count: int) -> None:
        connection.send(("bytes", count))

    while True:
        try:
            number = connection.recv()
        except EOFError:
            os._exit(0)
        try:
            _do(work, number, report)
            connection.send(("done", number))
        except ValueError as error:
            connection.send(("problem", str(error)))
        except Exception:
            connection.send(("failure", traceback.format_exc()))


def _cause(code: int | None) -> str:
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        return f"{name}; the machine may be out of memory: try fewer --workers" if name == "SIGKILL" else name
    return f"exit code {code}"
