"""The channel of a thread during training, on two real ranks: it mixes with no other collective, and it always ends."""

from collections.abc import Callable
from typing import Any

import pytest

from megarl.run.ranks.control_group import SLICE_S

pytestmark = pytest.mark.world


@pytest.mark.parametrize("layout", [{"tensor": 2}, {}], ids=["one replica", "two replicas"])
def test_a_thread_shares_batches_while_the_ranks_train(world: Callable[[int], Any], layout: dict[str, int]) -> None:
    got = world(2).run("tests.support.ranks.sync.channel:alongside_training", layout=layout)
    replicas = 1 if layout else 2
    for rank, part in enumerate(got):
        first, shares, hashes = part["found"]
        assert first == "asked by rank 0"
        assert shares == {f"from {rank if replicas == 2 else 0}"}
        assert hashes == {f"plan of {replica}" for replica in range(replicas)}
        assert part["sums"] == [number * 2.0 * (2 if replicas == 1 else 1) for number in range(200)]
        assert part["bounds"] == ([SLICE_S] * 3 if rank == 0 else [])


def test_the_bound_counts_from_when_the_trainer_waits(world: Callable[[int], Any]) -> None:
    """Before, it asks as long as training takes; then, too, no question is longer than a slice."""
    bound_s = 0.5
    first, second = world(2).run("tests.support.ranks.sync.channel:hurried", bound_s=bound_s)
    *before, last, after = first["bounds"]
    assert before and set(before) == {SLICE_S} and 0 < last <= bound_s and after == SLICE_S
    waited = "the trainer waited 0 s (timeouts.generate_s) for its batch; at last, 1 group in flight"
    assert first["error"] == f"BatchNotReady: {waited}"
    assert second == {"error": f"PeerFailedError: trainer rank 0 failed: BatchNotReady: {waited}", "bounds": []}


def test_a_hurried_wait_ends_as_soon_when_it_is_closed(world: Callable[[int], Any]) -> None:
    """A process that leaves Ray while a thread of it waits there crashes, and its failure is not reported."""
    bounds = world(2).run("tests.support.ranks.sync.channel:closed_in_a_hurry")[0]
    assert bounds == [SLICE_S]


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("close", ["ChannelClosed: the run stops", "PeerFailedError: trainer rank 0 failed: ChannelClosed"]),
        (
            "failure",
            ["RolloutError: no engine is left", "PeerFailedError: trainer rank 0 failed: RolloutError: no"],
        ),
    ],
)
def test_the_wait_of_every_rank_ends_with_rank_0_s(world: Callable[[int], Any], how: str, expected: list[str]) -> None:
    got = world(2).run("tests.support.ranks.sync.channel:ended", how=how)
    assert [text.startswith(begin) for text, begin in zip(got, expected, strict=True)] == [True, True], got
