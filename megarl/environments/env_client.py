"""A client of verifiers' environment server (0.4): ZeroMQ with msgpack. It imports nothing of verifiers.

A message is [id, method, content]. Its answers are [id, kind, content]: any number of `delta`, then one `reply`. The
deltas of a run carry its traces piece by piece; the reply says how many pieces there have to be.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgpack
import zmq
import zmq.asyncio

from megarl.common.values import MIB
from megarl.environments.gateway_client import AttemptLost

logger = logging.getLogger(__name__)

LARGEST_MESSAGE = 256 * MIB
CANCEL_S = 5.0  # in which a cancelled run is told to the server


class EnvironmentLost(AttemptLost):
    """The environment server has died; another one is started for the next attempt."""


class EnvironmentFailed(RuntimeError):  # noqa: N818
    """The environment server has refused a request, or answered with what is no answer."""


@dataclass
class TraceSoFar:
    """Holds what has arrived of a trace: its values by name, and the numbers of its `nodes` and `calls`."""

    values: dict[str, Any] = field(default_factory=dict)
    nodes: int = 0
    calls: int = 0
    errors: list[Any] = field(default_factory=list)


class Traces:
    """Puts the traces of one run together."""

    def __init__(self) -> None:
        self._traces: dict[str, TraceSoFar] = {}

    def apply(self, delta: Mapping[str, Any]) -> None:
        """Take a delta. Raises KeyError or TypeError for what is none."""
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
    """The connection to one server. To be used, and closed, in one event loop."""

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
        """Tell whether the server answers within `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._ask("health", {})
        except TimeoutError:
            return False
        return True

    async def run(self, request: Mapping[str, Any]) -> list[TraceSoFar]:
        """Run an environment once; return its traces. A run whose caller is cancelled is cancelled at the server.

        `request`: `task_data`, `client`, `model` and `sampling`, as verifiers' RunRequest. Raises EnvironmentLost if
        the server dies, and EnvironmentFailed if it refuses the request, or if its answer is incomplete.
        """
        answer, traces = await self._ask("run", request)
        return traces.finish(answer.get("traces") or [])

    def lose(self, reason: str) -> None:
        """End all requests with EnvironmentLost, those of the future too."""
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
        """Give each frame to its request. What cannot be read ends the request that it is for, or is dropped."""
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
                told = f"a message of the environment server cannot be read: {type(error).__name__}: {error}"
                logger.warning("%s", told)
                if opened is not None and not opened.reply.done():
                    opened.reply.set_exception(EnvironmentFailed(told))
