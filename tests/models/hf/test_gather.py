"""Any rows of any tensors arrive on their owner as the whole tensors have them, and again after the weights change."""

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.models.hf import gather
from megarl.models.hf.gather import GatherRequest, GlooWaiter, Rows, TensorPart, build_gathers
from tests.support.waiting import wait_until
from tests.support.worlds.world import World


@pytest.mark.world
@pytest.mark.parametrize(
    ("family", "ranks", "sizes"),
    [
        ("qwen3", 2, {"tensor": 2}),
        ("deepseek_v3", 2, {"tensor": 2, "sequence": True}),
        ("qwen3_moe", 2, {"tensor": 2, "sequence": True, "expert": 2, "expert_tensor": 1}),
        pytest.param("mixtral", 4, {"tensor": 2, "sequence": True, "expert": 2}, marks=pytest.mark.slow),
        ("qwen2", 4, {"tensor": 4, "sequence": True}),
    ],
)
@pytest.mark.parametrize(
    ("dtype", "direct_bytes"),
    [("float32", 2**20), pytest.param("float32", 200, marks=pytest.mark.slow), ("bfloat16", 200)],
)
def test_random_rows_are_those_of_the_whole_tensors(
    world: Callable[[int], World],
    model_dir: Callable[[str], Path],
    family: str,
    ranks: int,
    sizes: dict[str, Any],
    dtype: str,
    direct_bytes: int,
) -> None:
    """Blocks of at least `direct_bytes` have a message of their own; all others of a rank travel together."""
    messages = world(ranks).run(
        "tests.support.ranks.models.models:gathered_rows",
        model_dir=str(model_dir(family)),
        seed=3,
        dtype=dtype,
        direct_bytes=direct_bytes,
        **sizes,
    )
    assert all(messages), "on every rank some rows come from, or go to, another one"


def test_a_target_of_another_shape_or_dtype_is_refused() -> None:
    entry = SimpleNamespace(
        names=("w",),
        shapes=((6, 2),),
        rule=SimpleNamespace(axis=0),
        pieces=lambda rank, size: [SimpleNamespace(source=0, start=0, stop=6, size=6)],
    )
    shard = SimpleNamespace(entry=entry, rank=0, size=1, parameter=torch.arange(12.0).view(6, 2))
    parts = {0: TensorPart(shard, 0, torch.float32, None)}  # type: ignore[arg-type]

    def build(target: torch.Tensor) -> None:
        build_gathers(parts, [GatherRequest((Rows(0, 1, 4),), (target,))], torch.device("cpu"), GlooWaiter())

    build(torch.empty(3, 2))
    for wrong in (torch.empty(4, 2), torch.empty(3, 3), torch.empty(3, 2, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match=r"w: rows 1 to 4 of \(6, 2\) torch.float32 do not fit a target"):
            build(wrong)


def test_segments_that_adjoin_are_merged() -> None:
    def piece(source: int | None, start: int, stop: int) -> SimpleNamespace:
        return SimpleNamespace(source=source, start=start, stop=stop, size=stop - start)

    pieces = [piece(0, 0, 2), piece(0, 2, 5), piece(1, 0, 1), piece(0, 5, 6), piece(None, 0, 3), piece(0, 9, 10)]
    entry = SimpleNamespace(pieces=lambda rank, size: pieces)
    assert gather.segments(entry, 0, 0, 1) == [(0, 0, 5), (6, 5, 6), (10, 9, 10)]  # type: ignore[arg-type]


class SlowWork:
    def __init__(self, error: Exception | None = None) -> None:
        self.go, self._error = threading.Event(), error

    def wait(self) -> None:
        assert self.go.wait(20.0)
        if self._error is not None:
            raise self._error


def test_the_waiter_tells_when_messages_end_and_leaves_no_thread() -> None:
    waiter = GlooWaiter()
    works = [SlowWork(), SlowWork(RuntimeError("lost")), SlowWork()]
    futures = [waiter.wait(work) for work in works]  # type: ignore[arg-type]
    assert not any(future.done() for future in futures)
    for work in works:
        work.go.set()
    assert futures[0].result(20.0) is None and futures[2].result(20.0) is None
    assert isinstance(futures[1].exception(20.0), RuntimeError)
    waiters = lambda: [each for each in threading.enumerate() if each.name == "gather-waiter"]  # noqa: E731
    wait_until(lambda: not waiters(), 60.0, "the end of the waiter's thread")
    again = SlowWork()
    again.go.set()
    assert waiter.wait(again).result(20.0) is None  # type: ignore[arg-type]


class CountedWork:
    """A gloo message that has arrived."""

    def __init__(self) -> None:
        self.waits = 0

    def wait(self) -> None:
        self.waits += 1


@pytest.mark.parametrize(("timeout_s", "in_thread"), [(None, 0), (20.0, 1)])
def test_only_a_wait_with_a_bound_of_its_own_needs_the_thread(
    monkeypatch: pytest.MonkeyPatch, timeout_s: float | None, in_thread: int
) -> None:
    """An export waits as long as the group allows; a thread per tensor would double its time."""
    work = CountedWork()
    monkeypatch.setattr(torch.distributed, "get_backend", lambda group: "gloo")
    monkeypatch.setattr(torch.distributed, "get_global_rank", lambda group, peer: peer)
    monkeypatch.setattr(torch.distributed, "irecv", lambda tensor, group, group_src: work)
    program = gather._Program()
    program.route(None, 1).add(torch.empty(4), (4,), torch.float32, direct=False)  # type: ignore[arg-type]
    waiter = GlooWaiter()
    given: list[Any] = []
    wait = waiter.wait
    monkeypatch.setattr(waiter, "wait", lambda work: given.append(work) or wait(work))
    received = gather.Gather(lambda: program, True, waiter)
    received.bind(torch.empty(received.staging_bytes, dtype=torch.uint8))
    for _ in range(2):
        received.copy()
        received.post()
        assert received.done(timeout_s)
        received.finish()
    assert work.waits == 2 and len(given) == 2 * in_thread
