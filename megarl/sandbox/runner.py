"""Runs untrusted Python programs, each in its own locked-down process, a bounded number at a time."""

from __future__ import annotations

import asyncio
import functools
import os
import platform
import queue
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import astuple

from megarl.sandbox.bubblewrap import Descriptors, Programs, command
from megarl.sandbox.guard import guard_of
from megarl.sandbox.installation import (
    SLOTS_PER_PROCESS,
    check_unused,
    find_program,
    id_of_slot,
    this_installation,
)
from megarl.sandbox.limits import Limits, RunResult, SandboxBusyError, SandboxError
from megarl.sandbox.packages import find_packages
from megarl.sandbox.seccomp import filter_program
from megarl.sandbox.supervised import OwnedDescriptors, SupervisedRun


@functools.cache
def _free_slots() -> queue.SimpleQueue[int]:
    """Return the numbers of this process's places, which determine the user ids of its runs."""
    slots: queue.SimpleQueue[int] = queue.SimpleQueue()
    for slot in range(SLOTS_PER_PROCESS):
        slots.put(slot)
    return slots


@functools.cache
def _programs() -> Programs:
    return Programs(*(find_program(name) for name in ("bwrap", "prlimit", "setpriv")))


@functools.cache
def _filter() -> bytes:
    return filter_program(platform.machine())


class Cancellation:
    """Ends a run from another thread."""

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._open = True

    def cancel(self) -> None:
        """End the run, or prevent its start."""
        with self._lock:
            if self._open:
                os.eventfd_write(self.descriptor, 1)

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        with self._lock:
            if self._open:
                self._open = False
                os.close(self.descriptor)


class Sandbox:
    """Runs programs, `slots` at once (default: one per core); others wait `queue_s` seconds at most.

    `packages`: names of installed packages, or directories, that programs may import; see `find_packages`, whose errors
    it raises. They must be readable by any user on the host.
    """

    def __init__(
        self,
        limits: Limits = Limits(),  # noqa: B008  # frozen
        *,
        slots: int | None = None,
        queue_s: float = 60.0,
        packages: Sequence[str] = (),
    ) -> None:
        self.limits = limits
        self.slots = slots or min(len(os.sched_getaffinity(0)), SLOTS_PER_PROCESS)
        if not 0 < self.slots <= SLOTS_PER_PROCESS:
            raise ValueError(f"a sandbox needs 1 to {SLOTS_PER_PROCESS} slots, not {self.slots}")
        self.queue_s = queue_s
        self.packages = find_packages(packages)
        self._threads = ThreadPoolExecutor(self.slots, "megarl-sandbox")
        self._runs: set[Cancellation] = set()
        self._lock = threading.Lock()
        self._closed = False

    async def run(self, source: str, *, stdin: str = "", timeout_s: float | None = None) -> RunResult:
        """Run a Python program and return how it ended.

        `timeout_s`: wall time of the run, without the wait for a place; None: as in the limits. Raises SandboxBusyError
        if no place became free in time, and SandboxError if the sandbox is unavailable or closed. A cancelled call ends
        its run.
        """
        began: Future[None] = Future()
        cancellation = self._new_run()

        def work() -> RunResult:
            if not began.set_running_or_notify_cancel():
                raise SandboxError("the program is no longer awaited")
            began.set_result(None)
            return self._run(source, stdin.encode("utf-8", "replace"), None, timeout_s, cancellation)

        try:
            future = self._threads.submit(work)
        except RuntimeError as error:
            self._forget(cancellation)
            raise SandboxError("the sandbox is closed") from error

        def ended(_: object) -> None:
            # The thread may need it longer than this call.
            self._forget(cancellation)
            began.cancel()  # if the run was closed before it began

        future.add_done_callback(ended)
        result = asyncio.wrap_future(future)
        try:
            async with asyncio.timeout(self.queue_s):
                await asyncio.wrap_future(began)
            return await result
        except TimeoutError as error:
            cancellation.cancel()
            result.cancel()
            raise SandboxBusyError(
                f"a program waited {self.queue_s:g} s for one of the {self.slots} places of the sandbox in process "
                f"{os.getpid()}; run fewer programs at once, lower their time, or raise the number of places"
            ) from error
        except asyncio.CancelledError:
            cancellation.cancel()
            result.cancel()
            task = asyncio.current_task()
            if task is not None and not task.cancelling():  # the run was cancelled, not this call
                raise SandboxError("the sandbox was closed before the program began") from None
            raise

    def run_now(
        self, source: str, *, stdin: str | int = "", stdout: int | None = None, timeout_s: float | None = None
    ) -> RunResult:
        """Run a program in the calling thread, without waiting for a place. Raises as `run`.

        `stdin` and `stdout` may be descriptors for the program; they are closed here. Output to such a `stdout` is
        neither read nor bounded here.
        """
        given = stdin if isinstance(stdin, int) else stdin.encode("utf-8", "replace")
        cancellation = self._new_run()
        try:
            return self._run(source, given, stdout, timeout_s, cancellation)
        finally:
            self._forget(cancellation)

    def close(self) -> None:
        """End all runs and wait until nothing is left of them. Idempotent."""
        with self._lock:
            self._closed = True
            for each in self._runs:
                each.cancel()
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _new_run(self) -> Cancellation:
        with self._lock:
            if self._closed:
                raise SandboxError("the sandbox is closed")
            cancellation = Cancellation()
            self._runs.add(cancellation)
        return cancellation

    def _forget(self, cancellation: Cancellation) -> None:
        with self._lock:
            self._runs.discard(cancellation)
        cancellation.close()

    def _run(
        self, source: str, stdin: bytes | int, stdout: int | None, timeout_s: float | None, cancellation: Cancellation
    ) -> RunResult:
        seconds = self.limits.timeout_s if timeout_s is None else timeout_s
        with closing(OwnedDescriptors()) as owned, _slot() as slot:
            for each in (stdin, stdout):
                if isinstance(each, int):
                    owned.add(each)
            root_as = None
            if os.geteuid() == 0:
                root_as = id_of_slot(os.getpid(), slot)
                check_unused(root_as)
            status, reports = owned.pipe()
            permission, permits = owned.pipe()
            text = owned.in_memory("program", source.encode("utf-8", "replace"))
            inherited = Descriptors(text, owned.in_memory("filter", _filter()), reports, permission)
            installation = this_installation()
            mark = guard_of(os.getpid(), installation.python)
            line = command(
                installation, _programs(), self.limits, inherited, mark=mark, root_as=root_as, packages=self.packages
            )
            run = SupervisedRun(
                self.limits, seconds, owned, status=status, permits=permits, cancelled=cancellation.descriptor
            )
            return run.run(line, astuple(inherited), stdin, stdout)


@contextmanager
def _slot() -> Iterator[int]:
    """Take one of this process's places for a run, and give it back."""
    try:
        slot = _free_slots().get_nowait()
    except queue.Empty:
        raise SandboxBusyError(
            f"process {os.getpid()} already runs {SLOTS_PER_PROCESS} programs, the maximum"
        ) from None
    try:
        yield slot
    finally:
        _free_slots().put(slot)
