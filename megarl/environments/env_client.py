"""A client of verifiers' environment server (0.4), and the server's process: ZeroMQ with msgpack, without verifiers.

A message is [id, method, content]. Its answers are [id, kind, content]: any number of `delta`, then one `reply`. The
deltas of a run carry its traces piece by piece; the reply has the number of pieces.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack
import zmq
import zmq.asyncio

from megarl.common.errors import RolloutError
from megarl.common.process.child_process import kill_session
from megarl.common.rundir.private_directory import VARIABLE
from megarl.common.values import MIB
from megarl.environments.gateway_client import AttemptLost

logger = logging.getLogger(__name__)

LARGEST_MESSAGE = 256 * MIB
CANCEL_S = 5.0  # to report a cancelled run to the server


class EnvironmentLost(AttemptLost):
    """The environment server has died; another one starts for the next attempt."""


class EnvironmentFailed(RuntimeError):  # noqa: N818
    """The environment server refused a request, or sent an invalid answer."""


@dataclass
class TraceSoFar:
    """What has arrived of a trace: its values by name, and the numbers of its `nodes` and `calls`."""

    values: dict[str, Any] = field(default_factory=dict)
    nodes: int = 0
    calls: int = 0
    errors: list[Any] = field(default_factory=list)


class Traces:
    """Assembles the traces of one run."""

    def __init__(self) -> None:
        self._traces: dict[str, TraceSoFar] = {}

    def apply(self, delta: Mapping[str, Any]) -> None:
        """Apply a delta. Raises KeyError or TypeError for an invalid one."""
        name = delta["trace"]
        if delta.get("discard"):
            self._traces.pop(name, None)
            return
        if name not in self._traces:
            self._traces[name] = TraceSoFar(dict(delta["open"]))
        trace = self._traces[name]
        trace.nodes += len(delta.get("nodes") or ())
        trace.calls += len(delta.get("calls") or ())
        trace.errors += delta.get("errors") or ()
        trace.values.update(delta.get("set") or {})

    def finish(self, summaries: list[Mapping[str, Any]]) -> list[TraceSoFar]:
        """Return the traces in the server's order. Raises EnvironmentFailed if a piece is missing."""
        found = []
        for summary in summaries:
            trace = self._traces.get(summary["id"])
            if trace is None or (trace.nodes, trace.calls) != (summary["nodes"], summary["calls"]):
                have = "nothing" if trace is None else f"{trace.nodes} nodes and {trace.calls} calls"
                raise EnvironmentFailed(
                    f"of trace {summary['id']} {have} arrived, but it has {summary['nodes']} nodes and "
                    f"{summary['calls']} calls"
                )
            found.append(trace)
        return found


@dataclass
class _Open:
    reply: asyncio.Future[dict[str, Any]]
    traces: Traces = field(default_factory=Traces)


class EnvironmentClient:
    """The connection to one server. Use and close it in one event loop."""

    def __init__(self, address: str) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, LARGEST_MESSAGE)
        self._socket.connect(address)
        self._open: dict[str, _Open] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._lost = ""
        self._receiver = asyncio.get_running_loop().create_task(self._receive())

    async def health(self, timeout_s: float) -> bool:
        """Return whether the server answers within `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._ask("health", {})
        except TimeoutError:
            return False
        return True

    async def run(self, request: Mapping[str, Any]) -> list[TraceSoFar]:
        """Run an environment once, and return its traces. Cancelling the call cancels the run at the server.

        `request`: `task_data`, `client`, `model` and `sampling`, as verifiers' RunRequest. Raises EnvironmentLost if
        the server dies, and EnvironmentFailed if it refuses the request or its answer is incomplete.
        """
        answer, traces = await self._ask("run", request)
        return traces.finish(answer.get("traces") or [])

    def lose(self, reason: str) -> None:
        """End all requests, also future ones, with EnvironmentLost."""
        self._lost = reason
        for each in self._open.values():
            if not each.reply.done():
                each.reply.set_exception(EnvironmentLost(reason))

    async def close(self) -> None:
        """Close the connection; open requests end as lost."""
        self.lose(self._lost or "the connection to the environment server was closed")
        self._receiver.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CANCEL_S)
        with contextlib.suppress(asyncio.CancelledError):
            await self._receiver
        self._socket.close()
        self._context.term()

    async def _ask(self, method: str, content: Mapping[str, Any]) -> tuple[dict[str, Any], Traces]:
        if self._lost:
            raise EnvironmentLost(self._lost)
        name = uuid.uuid4().hex
        opened = self._open[name] = _Open(asyncio.get_running_loop().create_future())
        try:
            await self._send(name, method, content)
            answer = await opened.reply
        except asyncio.CancelledError:
            if method == "run":
                self._start_cancel(name)
            raise
        finally:
            del self._open[name]
        if not answer.get("success"):
            raise EnvironmentFailed(str(answer.get("error") or f"the server answered {method} with {answer!r}"))
        return answer, opened.traces

    async def _send(self, name: str, method: str, content: Mapping[str, Any]) -> None:
        await self._socket.send_multipart([name.encode(), method.encode(), msgpack.packb(content, use_bin_type=True)])

    def _start_cancel(self, name: str) -> None:
        async def cancel() -> None:
            with contextlib.suppress(Exception):
                async with asyncio.timeout(CANCEL_S):
                    await self._send(uuid.uuid4().hex, "cancel", {"request_id": name})

        task = asyncio.get_running_loop().create_task(cancel())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _receive(self) -> None:
        """Give each frame to its request. An unreadable frame fails its request, or is dropped."""
        while True:
            frames = await self._socket.recv_multipart()
            opened: _Open | None = None
            try:
                name, kind, data = frames
                opened = self._open.get(name.decode())
                if opened is None or opened.reply.done():
                    continue
                content = msgpack.unpackb(data, raw=False, strict_map_key=False)
                if kind == b"reply":
                    opened.reply.set_result(dict(content))
                elif kind == b"delta":
                    opened.traces.apply(content)
            except Exception as error:
                message = f"a message of the environment server cannot be read: {type(error).__name__}: {error}"
                logger.warning("%s", message)
                if opened is not None and not opened.reply.done():
                    opened.reply.set_exception(EnvironmentFailed(message))


PROGRAM = Path(__file__).with_name("server_program.py")
TOKEN_VARIABLE = "MEGARL_GATEWAY_API_KEY"  # verifiers hides names with API_KEY from the programs that it starts
START_S = 300.0  # its imports alone take many CPU seconds, while engines start too
LOOK_S = 1.0
_PASSED = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "TZ", "HF_HOME", "SSL_CERT_FILE")
_TAIL = 2000  # characters of the log that an error shows


@dataclass(frozen=True)
class EnvironmentSpec:
    """An environment to serve. `python`: of its virtual environment. `paths`: directories with the taskset's modules.

    `environment`: verifiers' EnvConfig as JSON content. `variables`: additional environment variables.
    """

    python: Path
    environment: Mapping[str, Any]
    paths: Sequence[Path] = ()
    variables: Mapping[str, str] = field(default_factory=dict)


class EnvironmentServer:
    """Runs an environment in its own process and virtual environment, restarted if it dies. For one event loop.

    The process leads a session, so that it is killed with everything it started. Of the run's environment it gets only
    the variables that a program needs, and the gateway's token.
    """

    def __init__(self, spec: EnvironmentSpec, log: Path, token: str) -> None:
        """`log`: the file for its output; `token`: of the gateway's clients. Nothing is started yet."""
        self._spec, self._log, self._token = spec, log, token
        self._starting = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._client: EnvironmentClient | None = None
        self._watch: asyncio.Task[None] | None = None

    async def run(self, request: Mapping[str, Any]) -> list[TraceSoFar]:
        """Run the environment once, see `EnvironmentClient.run`; start the server if necessary."""
        return await (await self._connected()).run(request)

    @property
    def pid(self) -> int | None:
        """The running process, which leads its group, or None."""
        alive = self._process is not None and self._process.returncode is None
        return self._process.pid if alive and self._process is not None else None

    async def close(self) -> None:
        """Kill the server and everything it started."""
        if self._process is not None:
            if self.pid is not None:
                kill_session(self.pid)
            await self._process.wait()
        if self._watch is not None:
            await self._watch
        await self._disconnect()

    async def _connected(self) -> EnvironmentClient:
        async with self._starting:
            if self._client is None or self.pid is None:
                await self._disconnect()
                self._client = await self._start()
            return self._client

    async def _disconnect(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    async def _start(self) -> EnvironmentClient:
        """Start the server, and return its client. Raises RolloutError if it does not answer within START_S."""
        directory = os.environ.get(VARIABLE) or tempfile.gettempdir()
        socket = tempfile.mkdtemp(prefix="env-", dir=directory) + "/s"
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            try:
                self._process = process = await asyncio.create_subprocess_exec(
                    # -P: the program's directory has modules of megarl, which it must not import.
                    str(self._spec.python), "-P", str(PROGRAM), stdin=asyncio.subprocess.PIPE, stdout=log, stderr=log,
                    env=self._variables(), start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                raise RolloutError(
                    f"the environment server cannot be started: {error}; run make setup-environments"
                ) from error
        assert process.stdin is not None
        asked = {"address": f"ipc://{socket}", "environment": self._spec.environment}
        process.stdin.write(json.dumps(asked).encode() + b"\n")
        client = EnvironmentClient(f"ipc://{socket}")
        try:
            await self._answers(process, client)
        except BaseException:
            kill_session(process.pid)
            await client.close()
            raise
        self._watch = asyncio.get_running_loop().create_task(self._report_end(process, client))
        return client

    async def _answers(self, process: asyncio.subprocess.Process, client: EnvironmentClient) -> None:
        until = time.monotonic() + START_S
        while not await client.health(LOOK_S):
            if process.returncode is not None:
                message = f"the environment server has ended with {process.returncode} at its start"
            elif time.monotonic() > until:
                message = f"a sample waited {START_S:.0f} s for the environment server to start"
            else:
                continue
            raise RolloutError(f"{message}; {self._log} ends with: {self._tail()}")

    async def _report_end(self, process: asyncio.subprocess.Process, client: EnvironmentClient) -> None:
        code = await process.wait()
        with contextlib.suppress(ProcessLookupError):  # nothing that it started is left
            os.killpg(process.pid, signal.SIGKILL)
        client.lose(f"the environment server has ended with {code}; see {self._log}")

    def _variables(self) -> dict[str, str]:
        passed = {name: os.environ[name] for name in _PASSED if name in os.environ}
        # As in an activated virtual environment: verifiers' programs look for uv, which is installed in it.
        passed["PATH"] = os.pathsep.join([str(self._spec.python.parent), passed.get("PATH", os.defpath)])
        paths = os.pathsep.join(str(path.resolve()) for path in self._spec.paths)
        return {
            **passed,
            "PYTHONPATH": paths,
            "PYTHONUNBUFFERED": "1",
            TOKEN_VARIABLE: self._token,
            **self._spec.variables,
        }

    def _tail(self) -> str:
        with contextlib.suppress(OSError):
            return self._log.read_text(errors="replace")[-_TAIL:]
        return "nothing"
