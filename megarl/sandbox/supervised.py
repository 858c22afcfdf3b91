"""Runs one program in a sandbox: starts it, feeds it, reads bounded output, and ends all its processes.

Every process of a run is in a pid namespace. `_end` kills its init; so does the kernel when the thread that started the
run ends (PR_SET_PDEATHSIG, by bubblewrap's --die-with-parent). All others die with their init. A run ends with its
init: the kernel reports that only after it has reaped all the others.

bubblewrap ties its processes together only late in its start. So the program begins only with a permission, which it
gets once the init is known here; without one, a partial start ends by itself. `megarl.sandbox.guard` cleans up if this
process is killed in such a moment.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Sequence
from typing import IO

from megarl.sandbox.bubblewrap import MIB, PROGRAM, SCRATCH
from megarl.sandbox.limits import LimitName, Limits, RunResult, SandboxError

_HELD = ("RssAnon", "RssShmem", "VmSwap")


def usage(init: int) -> tuple[int, int] | None:
    """Return (bytes, entries) of the sandbox whose init has the pid `init` on the host; None if it has ended.

    Bytes: memory of all processes and the scratch directory; entries: of that directory. The sandbox has its own /proc,
    so only its processes count. Raises PermissionError if that is hidden.
    """
    root = f"/proc/{init}/root"
    try:
        if not os.path.lexists(f"{root}{PROGRAM}"):  # its root is still the host's
            return None
        processes = [name for name in os.listdir(f"{root}/proc") if name.isdigit()]
        scratch = os.statvfs(f"{root}{SCRATCH}")
    except (FileNotFoundError, ProcessLookupError):
        return None
    memory = sum(_held(f"{root}/proc/{name}/status") for name in processes)
    memory += (scratch.f_blocks - scratch.f_bfree) * scratch.f_frsize
    return memory, scratch.f_files - scratch.f_ffree


def _held(path: str) -> int:
    """Return a process's bytes that are not files, in memory or swapped out; shared bytes count in each process."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            fields = dict(line.split(":", 1) for line in file if ":" in line)
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(int(fields[name].split()[0]) << 10 for name in _HELD if name in fields)


class OwnedDescriptors:
    """Descriptors of one thread, each closed once: after its use, or by `close` without arguments."""

    def __init__(self) -> None:
        self._open: set[int] = set()

    def add(self, descriptor: int) -> int:
        """Take ownership of a descriptor, and return it."""
        self._open.add(descriptor)
        return descriptor

    def pipe(self) -> tuple[int, int]:
        """Return the reading and the writing end of a pipe."""
        reading, writing = os.pipe2(os.O_CLOEXEC)
        return self.add(reading), self.add(writing)

    def in_memory(self, name: str, content: bytes) -> int:
        """Return a descriptor of an anonymous file with `content`, positioned at its beginning."""
        descriptor = self.add(os.memfd_create(name, os.MFD_CLOEXEC))
        with open(descriptor, "wb", closefd=False) as file:
            file.write(content)
        os.lseek(descriptor, 0, os.SEEK_SET)
        return descriptor

    def close(self, *descriptors: int) -> None:
        """Close the given descriptors if still open here; all of them without arguments."""
        for descriptor in (set(descriptors) or set(self._open)) & self._open:
            self._open.discard(descriptor)
            os.close(descriptor)


END_S = 10.0  # for the kernel to end the processes
WATCH_S = 0.1  # between two checks of a run's memory
_CHUNK = 1 << 16
_STATUS_BYTES = 1 << 14


class SupervisedRun:
    """One run. Only the thread that made it may use it, and must outlive it."""

    def __init__(
        self, limits: Limits, timeout_s: float, owned: OwnedDescriptors, *, status: int, permits: int, cancelled: int
    ) -> None:
        """`status`, `permits`, `cancelled`: descriptors on this side.

        `status` gives bubblewrap's report. A byte written to `permits` lets the program begin. `cancelled` becomes
        readable when the run must end at once.
        """
        self._limits = limits
        self._began = time.monotonic()
        self._timeout_s = timeout_s
        self._owned = owned
        self._status, self._permits, self._cancelled = status, permits, cancelled
        self._selector = selectors.DefaultSelector()
        self._texts: dict[str, bytearray] = {"stdout": bytearray(), "stderr": bytearray(), "status": bytearray()}
        self._to_write = memoryview(b"")
        self._limit: LimitName | None = None
        self._init: int | None = None
        self._init_handle: int | None = None
        self._ended = self._stopping = False

    def run(
        self, command: Sequence[str], inherited: Sequence[int], stdin: bytes | int, stdout: int | None
    ) -> RunResult:
        """Start the command and wait for its end.

        `inherited`: descriptors that it gets. `stdin`: its input, or a descriptor for it. `stdout`: a descriptor for
        its output, which is then not read here. These descriptors are closed here once it has started. Raises
        SandboxError if the sandbox could not be made, if the run was cancelled, and if a process could not be ended.
        """
        process = self._start(command, inherited, stdin, stdout)
        stopped = False
        try:
            handle = self._owned.add(os.pidfd_open(process.pid))
            self._register(process, handle)
            stopped = self._follow()
        finally:
            self._end(process)
        if stopped:
            raise SandboxError("the run was cancelled")
        return self._result(process)

    def _start(
        self, command: Sequence[str], inherited: Sequence[int], stdin: bytes | int, stdout: int | None
    ) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            command,
            pass_fds=inherited,
            stdin=stdin if isinstance(stdin, int) else subprocess.PIPE,
            stdout=subprocess.PIPE if stdout is None else stdout,
            stderr=subprocess.PIPE,
            env={},
            cwd="/",
            start_new_session=True,
        )
        self._to_write = memoryview(b"" if isinstance(stdin, int) else stdin)
        self._owned.close(*inherited, *(each for each in (stdin, stdout) if isinstance(each, int)))
        return process

    def _register(self, process: subprocess.Popen[bytes], handle: int) -> None:
        for name, stream in (("stdout", process.stdout), ("stderr", process.stderr)):
            if stream is not None:
                os.set_blocking(stream.fileno(), False)
                self._selector.register(stream.fileno(), selectors.EVENT_READ, name)
        os.set_blocking(self._status, False)
        self._selector.register(self._status, selectors.EVENT_READ, "status")
        self._selector.register(handle, selectors.EVENT_READ, "ended")
        self._selector.register(self._cancelled, selectors.EVENT_READ, "cancelled")
        if process.stdin is not None:
            os.set_blocking(process.stdin.fileno(), False)
            self._write(process.stdin)
            if not process.stdin.closed:
                self._selector.register(process.stdin.fileno(), selectors.EVENT_WRITE, process.stdin)

    def _follow(self) -> bool:
        """Feed and read until the program ends, reaches a limit or is cancelled; return whether it was cancelled."""
        deadline = self._began + self._timeout_s
        watched = self._began
        while not self._ended and self._limit is None:
            left = deadline - time.monotonic()
            if left <= 0:
                self._limit = "time"
                return False
            for key, _ in self._selector.select(min(left, WATCH_S)):
                if key.data == "cancelled":
                    return True
                self._handle(key)
            if time.monotonic() - watched >= WATCH_S and not self._ended:
                self._watch()
                watched = time.monotonic()
        return False

    def _handle(self, key: selectors.SelectorKey) -> None:
        if key.data == "ended":
            self._ended = True
        elif isinstance(key.data, str):
            self._read(key.fd, key.data)
        else:
            self._write(key.data)

    def _read(self, descriptor: int, name: str) -> bool:
        """Read a chunk; return whether there was one. Unregisters a stream at its end."""
        try:
            part = os.read(descriptor, _CHUNK)
        except BlockingIOError:
            return False
        text = self._texts[name]
        text += part
        if not part:
            self._selector.unregister(descriptor)
        elif name == "status":
            self._note_init(text)
        most = _STATUS_BYTES if name == "status" else self._limits.output_kib << 10
        if len(text) > most:
            del text[most:]
            if self._limit is None:
                self._limit = "output"
            return False
        return bool(part)

    def _write(self, stream: IO[bytes]) -> None:
        try:
            while self._to_write:
                self._to_write = self._to_write[os.write(stream.fileno(), self._to_write[:_CHUNK]) :]
        except BlockingIOError:
            return
        except BrokenPipeError:  # the program does not read its input
            self._to_write = memoryview(b"")
        with contextlib.suppress(KeyError):  # it is not registered yet
            self._selector.unregister(stream.fileno())
        stream.close()

    def _note_init(self, status: bytearray) -> None:
        """Read the pid of the namespace's init from bubblewrap's report."""
        line, complete, _ = status.partition(b"\n")
        if self._init is None and complete:
            self._init = int(json.loads(line)["child-pid"])
            with contextlib.suppress(ProcessLookupError, BrokenPipeError):
                self._init_handle = self._owned.add(os.pidfd_open(self._init))
                if not self._stopping:
                    os.write(self._permits, b"+")

    def _watch(self) -> None:
        """End the run if its memory or its files exceed the limits."""
        found = None if self._init is None else usage(self._init)
        if found is None:
            return
        memory, entries = found
        if memory > self._limits.memory_mib * MIB:
            self._limit = "memory"
        elif entries > self._limits.entries:
            self._limit = "disk"

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        """End all processes of the run, read the rest of their output, and close everything.

        Raises SandboxError if the kernel does not end them in time.
        """
        try:
            self._stopping = True
            self._owned.close(self._permits)
            self._wait_for_init()
            process.kill()
            gone = self._end_init()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
            if process.returncode is None or not gone:
                raise SandboxError(f"the processes of a sandbox (pid {process.pid}) did not end in {END_S:g} s")
            self._read_rest()
        finally:
            self._selector.close()
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    with contextlib.suppress(BrokenPipeError):
                        stream.close()

    def _wait_for_init(self) -> None:
        """Wait until the init is known or the run has ended: a kill before that would leave a process behind."""
        deadline = time.monotonic() + END_S
        while not self._ended and self._init_handle is None and (left := deadline - time.monotonic()) > 0:
            for key, _ in self._selector.select(left):
                if key.data in ("ended", "status"):
                    self._handle(key)
                else:
                    self._selector.unregister(key.fd)  # the program has not begun: nothing to feed or read

    def _end_init(self) -> bool:
        """Kill the init of the namespace, and return whether it and all its processes have ended."""
        if self._init_handle is None:
            return self._ended
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._init_handle, signal.SIGKILL)
        with selectors.DefaultSelector() as waiting:
            waiting.register(self._init_handle, selectors.EVENT_READ)
            return bool(waiting.select(END_S))

    def _read_rest(self) -> None:
        """Read the remaining output of the processes, which have all ended."""
        for key in list(self._selector.get_map().values()):
            if key.data in self._texts:
                while self._read(key.fd, key.data):
                    pass

    def _result(self, process: subprocess.Popen[bytes]) -> RunResult:
        status = self._exit_status()
        stderr = self._texts["stderr"].decode("utf-8", "replace")
        if status is None and self._limit is None:
            raise SandboxError(
                f"the sandbox could not be made (bwrap ended with {process.returncode}): {stderr.strip()}"
            )
        if status == -signal.SIGXCPU:
            self._limit = "cpu"
        stdout = self._texts["stdout"].decode("utf-8", "replace")
        status = status if self._limit in (None, "cpu") else None
        return RunResult(status, stdout, stderr, self._limit, time.monotonic() - self._began)

    def _exit_status(self) -> int | None:
        """Return the program's status by bubblewrap's report; None if it was not started, or not waited for.

        bubblewrap reports 128 plus the signal's number for a program ended by a signal.
        """
        for line in self._texts["status"].splitlines():
            with contextlib.suppress(ValueError):
                record = json.loads(line)
                if "exit-code" in record:
                    code = int(record["exit-code"])
                    return 128 - code if 128 < code <= 128 + signal.SIGRTMAX else code
        return None
