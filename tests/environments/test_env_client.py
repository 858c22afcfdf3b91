"""The client of an environment server over a stand-in one that speaks the same protocol."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq
import zmq.asyncio

from megarl.environments.env_client import EnvironmentClient, EnvironmentFailed, EnvironmentLost

REQUEST = {"task_data": {}, "client": {}, "model": "m", "sampling": {}}
OPEN = {"trace": "t", "open": {"id": "t"}, "nodes": [{}, {}], "calls": [{}], "set": {"ok": False}}
END = {"success": True, "traces": [{"id": "t", "nodes": 3, "calls": 1}]}
Frames = list[bytes]


class StandInServer:
    """Answers each request by `answer(method, content)`: the frames after the id of each message that it sends."""

    def __init__(self, address: str, answer: Callable[[str, Any], list[Frames]]) -> None:
        self.answer, self.asked = answer, []
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(address)
        self._task = asyncio.create_task(self._serve())

    async def _serve(self) -> None:
        while True:
            client, name, method, content = await self._socket.recv_multipart()
            read = msgpack.unpackb(content)
            self.asked.append((name.decode(), method.decode(), read))
            for frames in self.answer(method.decode(), read):
                await self._socket.send_multipart([client, name, *frames])

    def close(self) -> None:
        self._task.cancel()
        self._socket.close()
        self._context.term()


def message(kind: str, content: Any) -> Frames:
    return [kind.encode(), msgpack.packb(content)]


Answer = Callable[[str, Any], list[Frames]]


@contextlib.asynccontextmanager
async def connected(tmp_path: Path, answer: Answer) -> AsyncIterator[tuple[EnvironmentClient, StandInServer]]:
    address = f"ipc://{tmp_path}/s"
    server, client = StandInServer(address, answer), EnvironmentClient(address)
    try:
        yield client, server
    finally:
        await client.close()
        server.close()


async def test_the_traces_of_a_run_are_put_together_from_its_deltas(tmp_path: Path) -> None:
    repaired = {"trace": "t", "links": {0: [{}]}, "nodes": [{}], "set": {"ok": True, "rewards": {"r": {"score": 1.0}}}}
    gone = [{"trace": "u", "open": {"id": "u"}, "nodes": [{}]}, {"trace": "u", "discard": True}]

    def answer(method: str, content: Any) -> list[Frames]:
        assert method == "run" and content == REQUEST
        return [message("delta", each) for each in (OPEN, *gone, repaired)] + [message("reply", END)]

    async with connected(tmp_path, answer) as (client, _):
        for [trace] in await asyncio.gather(client.run(REQUEST), client.run(REQUEST)):
            assert (trace.nodes, trace.calls, trace.values["ok"]) == (3, 1, True)
            assert trace.values["rewards"] == {"r": {"score": 1.0}}


@pytest.mark.parametrize(
    ("answers", "problem"),
    [
        (
            [message("delta", OPEN), message("reply", END)],
            "of trace t 2 nodes and 1 calls arrived, but it has 3 nodes",
        ),
        ([message("reply", END)], "of trace t nothing arrived"),
        ([message("reply", {"success": False, "error": "ValidationError: no prompt"})], "ValidationError: no prompt"),
    ],
)
async def test_a_run_that_is_refused_or_of_which_a_piece_is_missing_has_failed(
    tmp_path: Path, answers: list[Frames], problem: str
) -> None:
    async with connected(tmp_path, lambda method, content: answers) as (client, _):
        with pytest.raises(EnvironmentFailed, match=problem):
            await client.run(REQUEST)


@pytest.mark.parametrize(
    "bad", [[b"delta", b"\xc1"], [b"delta", msgpack.packb({"nodes": []})], [b"reply", msgpack.packb(7)]]
)
async def test_a_message_that_cannot_be_read_ends_its_own_run_only(tmp_path: Path, bad: Frames) -> None:
    def answer(method: str, content: Any) -> list[Frames]:
        return [bad] if content["model"] == "bad" else [message("reply", {"success": True, "traces": []})]

    async with connected(tmp_path, answer) as (client, _):
        with pytest.raises(EnvironmentFailed, match="cannot be read"):
            await client.run(REQUEST | {"model": "bad"})
        assert await client.run(REQUEST) == []


async def test_frames_that_belong_to_nobody_are_dropped(tmp_path: Path) -> None:
    reply = message("reply", {"success": True})
    async with connected(tmp_path, lambda method, content: [[b"delta"], [], reply, reply]) as (client, _):
        assert await client.run(REQUEST) == []
        assert await client.health(30.0)


async def test_a_cancelled_run_is_cancelled_at_the_server(tmp_path: Path) -> None:
    async with connected(tmp_path, lambda method, content: []) as (client, server):
        running = asyncio.create_task(client.run(REQUEST))
        while not server.asked:
            await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        while len(server.asked) < 2:
            await asyncio.sleep(0.01)
        [(name, _, _), (_, method, content)] = server.asked
        assert (method, content) == ("cancel", {"request_id": name})


async def test_runs_of_a_server_that_has_died_are_lost(tmp_path: Path) -> None:
    async with connected(tmp_path, lambda method, content: []) as (client, server):
        running = asyncio.create_task(client.run(REQUEST))
        while not server.asked:
            await asyncio.sleep(0.01)
        client.lose("it has ended with 7")
        for asked in (running, client.run(REQUEST)):
            with pytest.raises(EnvironmentLost, match="it has ended with 7"):
                await asked
        nobody = EnvironmentClient(f"ipc://{tmp_path}/nobody")
        assert not await nobody.health(0.05)
        await nobody.close()
