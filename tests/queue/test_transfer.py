"""Trajectories through a real TransferQueue: bit-exact, unpadded, bounded, separated by partition.

A group of which nothing was generated goes through the recorded batches and the step's plan too.
"""

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.common.errors import RolloutError
from megarl.queue import transfer
from megarl.queue.dump import read_batch, write_batch
from megarl.queue.images import ImageRef
from megarl.queue.row_format import decode, encode
from megarl.queue.sample_lines import sample_record
from megarl.queue.trajectory import Trajectory, VersionSpan
from megarl.queue.transfer import QueueReader, QueueServer, QueueWriter, bounded, image_key, start_queue
from megarl.rollout.agents.trajectory_builder import failed_trajectory
from megarl.run.record.batch_metrics import record_batch
from megarl.run.step.plan import plan_step
from megarl.telemetry.metrics.declarations import step_metrics
from tests.support.attacks.queue_attack import attack
from tests.support.pool import pool as _tokens  # noqa: F401  (one Ray access token for this process)
from tests.support.rollout.declared_streams import EVERY_DTYPE, declared
from tests.support.trainer.configs import config
from tests.support.trainer.trained_groups import trained_as_planned

float32 = st.floats(width=32, allow_nan=False, max_value=0.0)
image_refs = st.builds(ImageRef, st.text(max_size=4), st.integers(0, 9), st.integers(1, 9), st.integers(1, 9))


@st.composite
def groups(draw: st.DrawFn, group_id: int = 0) -> list[Trajectory]:
    rows = []
    prompt = draw(st.lists(st.integers(0, 151_935), min_size=1, max_size=6))
    for index in range(draw(st.integers(1, 4))):
        response = draw(st.lists(st.integers(0, 151_935), max_size=6))
        cut = draw(st.integers(0, len(response)))
        spans = [
            VersionSpan(3, 0, cut, replica=draw(st.integers(-1, 300))),
            VersionSpan(7, cut, len(response), 2, 1, 0),
        ]
        status = draw(st.sampled_from(["ok", "failed"]))
        rows.append(
            Trajectory(
                group_id=group_id,
                sample_index=index,
                prompt_ids=prompt,
                response_ids=response,
                rollout_logprobs=[draw(float32) for _ in response],
                versions=tuple(span for span in spans if span.end > span.start),
                finish_reason=draw(st.sampled_from(["stop", "length", "abort"])),
                reward=draw(st.floats(-1e3, 1e3)),
                reward_components={"parsed": draw(st.floats(0, 1))},
                status=status,
                failure="it failed" if status == "failed" else "",
                reward_error="late" if status == "failed" else "",
                dataset=draw(st.sampled_from(["", "gsm8k"])),
                part=draw(st.integers(0, 3)),
                images=tuple(draw(st.lists(image_refs, max_size=2))),
            )
        )
    return rows


@settings(deadline=None, max_examples=50)
@given(groups())
def test_encoding_is_exact(rows: list[Trajectory]) -> None:
    fields, tags = encode(rows)
    assert decode(fields, tags) == rows
    # No padding: a head of 32 bytes, 4 for each token of the prompt, 9 for one of the response, 48 for each span.
    sizes = [32 + 4 * len(row.prompt_ids) + 9 * len(row.response_ids) + 48 * len(row.versions) for row in rows]
    assert fields["trajectory"].values().numel() == sum(sizes)


def with_spans_of_five_values(row_B: torch.Tensor) -> torch.Tensor:
    """As an earlier release had them; the length is right."""
    row_B = torch.cat([row_B[: 32 + 40], row_B[32 + 48 :]])
    row_B[16:24] = torch.tensor([5]).view(torch.uint8)
    return row_B


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda row_B: row_B[:-1], r"114 bytes, but its head \[2, 3, 6, 0\] needs 115"),
        (lambda row_B: torch.cat([row_B, row_B[:1]]), r"116 bytes, but its head \[2, 3, 6, 0\] needs 115"),
        (with_spans_of_five_values, r"107 bytes, but its head \[2, 3, 5, 0\] needs 107"),
    ],
)
def test_a_row_of_another_form_is_refused(change: Callable[[torch.Tensor], torch.Tensor], problem: str) -> None:
    row = Trajectory(0, 1, [1, 2], [3, 4, 5], [-0.5] * 3, (VersionSpan(0, 0, 3),), "stop", 1.0)
    fields, tags = encode([row])
    values_B = change(fields["trajectory"].values().clone())
    jagged = torch.nested.nested_tensor_from_jagged(values_B, torch.tensor([0, len(values_B)]))
    with pytest.raises(ValueError, match=f"the row of sample 0:1 has {problem}"):
        decode({"trajectory": jagged}, tags)  # type: ignore[arg-type]


def test_a_row_is_read_by_a_process_that_has_declared_its_streams_in_another_order() -> None:
    streams = {"test_weight": [0.5, -1.5], "test_expert": [2**40, -1], "test_flag": [True, False]}
    row = Trajectory(0, 1, [1, 2], [3, 4], [-0.5] * 2, (VersionSpan(0, 0, 2),), "stop", 1.0, streams=streams)
    with declared(*EVERY_DTYPE):
        written = encode([row])
    with declared(*reversed(EVERY_DTYPE)):
        assert decode(*written) == [row]


def test_a_row_without_a_stream_that_this_process_has_declared_is_refused() -> None:
    row = Trajectory(0, 1, [1, 2], [3, 4], [-0.5] * 2, (VersionSpan(0, 0, 2),), "stop", 1.0)
    written = encode([row])
    with declared(), pytest.raises(ValueError, match=r"or this process declares other streams: \['test_weight'\]"):
        decode(*written)


def test_bounded_raises_in_time_and_passes_errors_on() -> None:
    ends = threading.Event()
    with pytest.raises(TimeoutError, match="a wait did not end"):
        bounded(lambda: ends.wait(300), 0.1, "a wait")
    ends.set()
    assert bounded(lambda: 7, 60, "seven") == 7
    with pytest.raises(ZeroDivisionError):
        bounded(lambda: 1 // 0, 60, "a division")


def test_a_result_that_comes_when_a_slice_of_the_wait_ends_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    class EndsMeanwhile(Future[str]):
        def result(self, timeout: float | None = None) -> str:
            if not self.done():
                self.set_result("rows")
                raise TimeoutError
            return super().result(timeout)

    def submit(coroutine: Coroutine[Any, Any, str], loop: object) -> Future[str]:
        coroutine.close()
        return EndsMeanwhile()

    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", submit)
    library: Any = SimpleNamespace(_loop=None)
    client = transfer._Client(library, "run.0", 60.0, lambda: pytest.fail("there is nothing to wait for"))
    assert client.call(asyncio.sleep(0, "rows"), "send 1 rows") == "rows"


class Actor:
    """Stands for an actor of the queue that answers, hangs, has died or cannot be reached, for a time or forever."""

    def __init__(self, state: str) -> None:
        self.state = state
        self.asked = 0

    @property
    def get_zmq_server_info(self) -> Any:
        return SimpleNamespace(remote=self._answer)

    async def _answer(self) -> None:
        self.asked += 1
        if self.state == "cut off" or (self.state == "cut off for a time" and self.asked < 4):
            raise ray.exceptions.ActorUnavailableError("The actor is temporarily unavailable: RpcError", b"0" * 16)
        if self.state == "hangs":
            await asyncio.Event().wait()
        if self.state == "dead":
            raise ConnectionError("the actor died")


@pytest.mark.parametrize(
    ("controller", "storage", "message"),
    [
        ("well", "well", None),
        ("dead", "well", "the controller of the trajectory queue has died"),
        ("well", "dead", "unit 1 of the trajectory queue has died"),
        ("well", "hangs", "unit 1 of the trajectory queue did not answer within 0 s"),
        ("cut off for a time", "cut off for a time", None),
        ("well", "cut off", "unit 1 of the trajectory queue did not answer within 0 s"),
    ],
)
def test_a_look_at_the_queue_names_the_process_that_has_died_or_hangs(
    controller: str, storage: str, message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "_RETRY_S", 0.001)
    server = QueueServer(Actor(controller), {"unit 0": Actor("well"), "unit 1": Actor(storage)})  # type: ignore[arg-type, dict-item]
    with nullcontext() if message is None else pytest.raises(RolloutError, match=message):
        asyncio.run(server.check(60.0 if message is None else 0.05))


@pytest.fixture(scope="module")
def queue(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """A Ray head and the queue of one partition, in this process."""
    from megarl.cluster.pool.ray_head import RayHead, RayShare

    os.environ.update(RAY_worker_niceness="0", RAY_enable_worker_prestart="0", TQ_NUM_THREADS="1")
    head = RayHead(RayShare(4, 0, {}), "queue-test", tmp_path_factory.mktemp("logs"), 200.0)
    head.start()
    import ray

    try:
        server = start_queue("run.0", namespace="queue-test", storage_units=2, node_resource=None, timeout_s=400)
        asyncio.run(server.check(60.0))
        yield {"partition": "run.0", "namespace": "queue-test", "timeout_s": 60.0}
        server.close()
    finally:
        ray.shutdown()
        head.stop()


Ends = tuple[QueueWriter, QueueReader]


@pytest.fixture
def ends(queue: dict[str, Any]) -> Iterator[Ends]:
    writer, reader = QueueWriter.attach(**queue), QueueReader.attach(**queue)
    yield writer, reader
    writer.close()
    reader.close()


def group(group_id: int, lengths: list[int]) -> list[Trajectory]:
    torch.manual_seed(group_id)
    return [
        Trajectory(
            group_id=group_id,
            sample_index=i,
            prompt_ids=[group_id, 1, 2],
            response_ids=list(range(n)),
            rollout_logprobs=(-torch.rand(n)).tolist(),
            versions=(VersionSpan(0, 0, n),) if n else (),
            finish_reason="stop",
            reward=float(i),
            reward_components={"correct": float(i)},
            status="ok" if n else "failed",
            failure="" if n else "empty response",
        )
        for i, n in enumerate(lengths)
    ]


def test_rows_come_back_exact_in_any_order_and_only_those_asked_for(ends: Ends) -> None:
    writer, reader = ends
    written = {row.key: row for g in range(6) for row in group(g, [3, 3, 3] if g == 2 else [g + 1, 17, 0, 1])}

    async def write() -> None:
        by_group = [[row for row in written.values() if row.group_id == g] for g in range(6)]
        await asyncio.gather(*(writer.put_group(rows) for rows in by_group))

    asyncio.run(write())
    assert reader.fetch(list(written)) == list(written.values())
    some = ["5:1", "0:0", "2:2", "3:2"]
    assert reader.fetch(some) == [written[key] for key in some]
    tags = reader.read_tags(some)
    assert [tag.key for tag in tags] == some
    assert [(t.prompt_tokens, t.response_tokens, t.oldest_version, t.status) for t in tags] == [
        (3, 17, 0, "ok"),
        (3, 1, 0, "ok"),
        (3, 3, 0, "ok"),
        (3, 0, -1, "failed"),
    ]
    assert tags[0].reward_components == {"correct": 1.0} and tags[0].total_tokens == 20
    assert {tag.key for tag in reader.read_tags(list(written))} == set(written)
    asyncio.run(writer.clear(list(written)))
    asyncio.run(writer.clear(["0:0"]))
    with pytest.raises(KeyError, match="0 of the 1 requested rows"):
        reader.fetch(["0:0"])
    with pytest.raises(KeyError, match=r"1 of 1 rows are not in the trajectory queue: \['0:0'\]"):
        reader.read_tags(["0:0"])
    assert reader.fetch([]) == []


def test_files_of_images_travel_once_for_a_group_and_go_with_its_rows(ends: Ends) -> None:
    writer, reader = ends
    files = [{"a": b"one", "b": b"the other"}, {"a": b"one"}]
    images = [(ImageRef("a", 0, 1, 1), ImageRef("b", 1, 1, 1)), (ImageRef("a", 1, 1, 1),)]
    groups = [[replace(row, images=images[g]) for row in group(g, [2, 3, 4])] for g in range(2)]
    put: list[int] = []

    async def write() -> None:
        original = writer.put

        async def counted(keys: list[str], fields: Any, tags: list[dict[str, str]]) -> None:
            put.append(fields["trajectory"].values().numel())
            await original(keys, fields, tags)

        writer.put = counted  # type: ignore[method-assign]
        for rows, own in zip(groups, files, strict=True):
            await writer.put_group(rows, own)

    asyncio.run(write())
    rows = [row for each in groups for row in each]
    assert reader.fetch([row.key for row in rows]) == rows
    assert reader.fetch_images(rows) == files[0]
    assert reader.fetch_images(groups[1]) == files[1]
    assert reader.fetch_images(group(0, [1])) == {}
    plain = [encode([replace(row, images=()) for row in each])[0]["trajectory"].values().numel() for each in groups]
    assert put == [size + len(b"".join(own.values())) for size, own in zip(plain, files, strict=True)]
    asyncio.run(writer.clear([image_key(0, name) for name in files[0]]))
    with pytest.raises(KeyError):
        reader.fetch_images(groups[0])
    assert reader.fetch_images(groups[1]) == files[1]
    asyncio.run(writer.clear([*(row.key for row in rows), image_key(1, "a")]))


@pytest.mark.parametrize("company", ["alone", "with other groups"])
def test_a_group_of_which_nothing_was_generated(ends: Ends, tmp_path: Path, company: str) -> None:
    """Its rows are empty in every column: prompt, response, mask, log-probs and versions."""
    writer, reader = ends
    failed = [failed_trajectory(1, index, "replica 0 refused a request") for index in range(3)]
    groups = [failed] if company == "alone" else [group(0, [2, 3, 4]), failed, group(2, [1, 1, 5])]
    rows = [row for each in groups for row in each]

    async def write() -> None:
        await asyncio.gather(*(writer.put_group(each) for each in groups))

    asyncio.run(write())
    keys = [row.key for row in rows]
    assert reader.fetch(keys) == rows and reader.fetch([failed[1].key]) == [failed[1]]
    tags = reader.read_tags(keys)
    assert tags == [row.tag for row in rows]
    write_batch(tmp_path, 0, 0, reader.fetch(keys))
    recorded = read_batch(tmp_path, 0)
    assert recorded.trajectories == rows
    for read in (tags, recorded.tags):  # as the training loop and as `megarl replay` plan the step
        plan = plan_step(read, config("model"), dp_size=2, version=0)
        assert (plan.outcome.failed, len(plan.admitted)) == (1, len(groups))
        assert not set(plan.keys_of(0) + plan.keys_of(1)) & {row.key for row in failed}
    metrics = step_metrics()
    record_batch(metrics, plan, trained_as_planned(plan))
    values = metrics.reduce()
    assert (values["groups/failed"], values["batch/failed_samples"]) == (1, 3)
    line = sample_record(1, reader.fetch([failed[0].key])[0], lambda ids: " ".join(map(str, ids)), None)
    assert (line["prompt"], line["response"], line["versions"]) == ("", "", [])
    assert (line["status"], line["failure"]) == ("failed", "replica 0 refused a request")
    asyncio.run(writer.clear(keys))


def test_every_socket_of_the_actors_refuses_a_stranger(queue: dict[str, Any], tmp_path: Path) -> None:
    """Ray sends the library's classes by value: the actors must have got the lock with them."""
    reader = QueueReader.attach(**queue)
    client = reader._client
    units = client.storage_manager.storage_unit_infos.values()
    addresses = [info.to_addr(name) for info in (client.storage_manager.controller_info, *units) for name in info.ports]
    assert len(addresses) == 2 + 2
    assert [attack(each, tmp_path / "ran") for each in addresses] == [False] * 4
    assert not (tmp_path / "ran").exists()
    reader.close()


def test_another_partition_has_its_own_rows(queue: dict[str, Any]) -> None:
    writer, reader = QueueWriter.attach(**queue), QueueReader.attach(**queue)
    other_writer, other_reader = QueueWriter.attach(**queue), QueueReader.attach(**queue)
    other_writer.partition = other_reader.partition = "run.1"
    asyncio.run(writer.put_group(group(1, [2, 2])))
    keys = ["1:0", "1:1"]
    with pytest.raises(KeyError, match="2 of 2 rows"):
        other_reader.read_tags(keys)
    asyncio.run(other_writer.clear(keys))
    assert len(reader.read_tags(keys)) == 2
    asyncio.run(writer.clear(keys))
    for each in (writer, reader, other_writer, other_reader):
        each.close()


def test_attaching_to_a_queue_that_is_not_there_ends_in_time(queue: dict[str, Any]) -> None:
    with pytest.raises(TimeoutError, match=r"waited 1 s for the trajectory queue .*missing\.0"):
        QueueReader.attach(**{**queue, "partition": "missing.0", "timeout_s": 1.0})


def test_storage_stays_off_nodes_without_the_pools_resource(queue: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="no_such_resource"):
        start_queue(
            "run.3", namespace=queue["namespace"], storage_units=1, node_resource="no_such_resource", timeout_s=200
        )


def test_a_queue_that_hangs_is_an_error_naming_the_wait(queue: dict[str, Any]) -> None:
    reader = QueueReader.attach(**queue, who="trainer rank 3")
    release = threading.Event()
    reader._client._loop.call_soon_threadsafe(release.wait, 5)
    reader.timeout_s = 0.2
    with pytest.raises(
        TimeoutError,
        match=r"trainer rank 3 waited 0 s \(timeouts.rpc_s\) for the trajectory queue to send the tags of 1 rows",
    ):
        reader.read_tags(["0:0"])
    release.set()
    reader.close()


def test_a_queue_whose_processes_have_ended_is_not_waited_for(
    queue: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "SLICE_S", 0.1)
    ended = threading.Event()

    def check() -> None:
        if ended.is_set():
            raise RolloutError("a test says so")

    reader = QueueReader.attach(**queue, check=check)
    assert reader.read_tags([]) == []
    release = threading.Event()
    reader._client._loop.call_soon_threadsafe(release.wait, 300)
    ended.set()
    with pytest.raises(RolloutError, match="a test says so"):
        reader.fetch(["g0-0"])
    assert not release.is_set()
    release.set()
    asyncio.run_coroutine_threadsafe(asyncio.sleep(0), reader._client._loop).result(60)  # it goes on
    reader.close()


def test_starting_with_too_few_logical_cpus_ends_in_time_and_says_so(queue: dict[str, Any]) -> None:
    import ray

    class Hog:
        def ready(self) -> None: ...

    hog = ray.remote(Hog).options(num_cpus=1).remote()
    ray.get(hog.ready.remote(), timeout=300)
    with pytest.raises(TimeoutError, match=r"2 actors of 1 CPU each; 0 logical CPUs were free.*engine_start_s"):
        start_queue("run.2", namespace=queue["namespace"], storage_units=1, node_resource=None, timeout_s=3)
    # No thread may be left inside Ray: it would crash this process when the fixture shuts Ray down.
    assert not [thread for thread in threading.enumerate() if "TransferQueue" in thread.name]
    ray.kill(hog)
