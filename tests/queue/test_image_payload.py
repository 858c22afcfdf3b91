"""A step sends each image's file once each way: to each engine that serves it, and to each replica that trains it."""

import asyncio
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megarl.chat.formats import Prompt
from megarl.models.hf.image_patches import ImageProcessor
from megarl.queue.images import ImageRef
from megarl.queue.trajectory import Trajectory
from megarl.queue.transfer import QueueReader, QueueWriter, image_key, start_queue
from megarl.rollout.agents.loop_host import SingleTurn
from megarl.rollout.engine.image_inputs import ImageInputs
from megarl.rollout.engine.messages import GenerateRequest, SamplingSpec
from megarl.rollout.tasks.prompts import PromptTask
from tests.support.models.tiny_vision import make_tiny_vision, picture
from tests.support.rollout.fake_rollout import FakeBatcher, FakeRewards, FakeSource
from tests.support.rollout.group_runner import GroupRunner
from tests.support.trainer.configs import config

GROUPS, SAMPLES, ENGINES = 4, 8, 2
NAMESPACE = "payload-test"


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[QueueWriter, QueueReader]]:
    """A Ray head and a queue in this process: its writer and a reader."""
    from megarl.cluster.pool.ray_head import RayHead, RayShare

    os.environ.update(RAY_worker_niceness="0", RAY_enable_worker_prestart="0", TQ_NUM_THREADS="1")
    head = RayHead(RayShare(4, 0, {}), NAMESPACE, tmp_path_factory.mktemp("logs"), 200.0)
    head.start()
    import ray

    try:
        server = start_queue("run.0", namespace=NAMESPACE, storage_units=2, node_resource=None, timeout_s=400)
        asyncio.run(server.check(60.0))
        where: dict[str, Any] = {"partition": "run.0", "namespace": NAMESPACE, "timeout_s": 60.0}
        writer, reader = QueueWriter.attach(**where), QueueReader.attach(**where)
        yield writer, reader
        writer.close()
        reader.close()
        server.close()
    finally:
        ray.shutdown()
        head.stop()


class Pictures(FakeSource):
    """Groups with two pictures each, one of them that of the group before."""

    def __init__(self, model: Path) -> None:
        super().__init__()
        self.processor = ImageProcessor(model, 64 * 28 * 28)
        self.contents = [picture(356, 220, seed) for seed in range(GROUPS + 1)]

    def draw(self, group_id: int) -> PromptTask:
        ids, images, files = [5], [], self.contents[group_id : group_id + 2]
        for content in files:
            images.append(ImageRef(self.processor.hash(content), len(ids), *self.processor.size(content)))
            ids += [9] * images[-1].tokens + [5]
        prompt = Prompt(group_id, [{"role": "user", "content": "x"}], "1", {}, images=tuple(files))
        return PromptTask(prompt, ids, SamplingSpec(16, 1.0, (2,)), images=tuple(images))


class Counted:
    """The file of an image where it is fetched."""

    def __init__(self, reference: Any, fetched: list[int]) -> None:
        self.reference, self.fetched = reference, fetched

    def __await__(self) -> Any:
        content = yield from self.reference.__await__()
        self.fetched.append(len(content))
        return content


async def shown(engine: ImageInputs, requests: list[GenerateRequest]) -> int:
    """Give requests to an engine's side; return the bytes that it has fetched."""
    fetched: list[int] = []
    counted = [replace(each, files=tuple(Counted(file, fetched) for file in each.files)) for each in requests]
    inputs = await asyncio.gather(*(engine.of(each) for each in counted))
    assert all(len(each["mm_placeholders"]["image"]) == 2 for each in inputs)
    return sum(fetched)


def message(requests: list[GenerateRequest]) -> int:
    """The bytes of a call with these requests."""
    from ray._private.worker import global_worker

    return int(global_worker.get_serialization_context().serialize(requests).total_bytes)


def test_each_image_travels_once_each_way(ends: tuple[QueueWriter, QueueReader], tmp_path: Path) -> None:
    model, batcher = make_tiny_vision(tmp_path), FakeBatcher()
    source = Pictures(model)
    own = config("model", sampling={"max_tokens": 16}, batch={"groups": GROUPS, "samples_per_group": SAMPLES})
    runner = GroupRunner(own, SingleTurn(), source, batcher.generate, FakeRewards())
    engines = [ImageInputs(ImageProcessor(model, 64 * 28 * 28)) for _ in range(ENGINES)]

    async def roll_out() -> list[list[Trajectory]]:
        groups = [await runner.run(number) for number in range(GROUPS)]
        for number, engine in enumerate(engines):  # the samples of a group are on both
            requests = [request for request, _, _ in batcher.asked][number::ENGINES]
            assert {image.hash for each in requests for image in each.images} == set(
                map(source.processor.hash, source.contents)
            )
            plain = [replace(each, images=(), files=()) for each in requests]
            sent = await shown(engine, requests) + message(requests) - message(plain)
            print(f"engine {number}: {sent} bytes for {distinct}")
            assert distinct <= sent <= 1.1 * distinct
        return groups

    distinct = sum(map(len, source.contents))
    groups = asyncio.run(roll_out())
    train(ends, source, groups)


def train(ends: tuple[QueueWriter, QueueReader], source: Pictures, groups: list[list[Trajectory]]) -> None:
    """Send the groups through the queue to two replicas that train every second sample of each."""
    writer, reader = ends

    async def write() -> None:
        for number, rows in enumerate(groups):
            await writer.put_group(rows, source.draw(number).files())

    asyncio.run(write())
    original, received = reader.get, [0]

    async def counted(keys: list[str]) -> Any:
        data, tags = await original(keys)
        received[0] += data["trajectory"].values().numel() + sum(len(str(tag)) for tag in tags if tag)
        return data, tags

    reader.get = counted  # type: ignore[method-assign]
    for replica in range(2):
        rows = [row for each in groups for row in each[replica::2]]
        wanted = {image.hash for row in rows for image in row.images}
        distinct = sum(len(content) for content in source.contents if source.processor.hash(content) in wanted)
        received[0] = 0
        files = reader.fetch_images(rows)
        print(f"replica {replica}: {received[0]} bytes for {distinct}")
        assert set(files) == wanted and distinct <= received[0] <= 1.1 * distinct
        assert [row.images for row in reader.fetch([row.key for row in rows])] == [row.images for row in rows]
    names = [image_key(number, each) for number in range(GROUPS) for each in source.draw(number).files()]
    asyncio.run(writer.clear([*(row.key for rows in groups for row in rows), *names]))
