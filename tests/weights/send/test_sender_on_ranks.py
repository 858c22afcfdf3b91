"""Several trainer ranks: one order of broadcasts, whoever owns what; one outcome on all of them."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.models.tiny import make_tiny_model
from tests.support.worlds.world import World

pytestmark = pytest.mark.world


@pytest.mark.parametrize(
    ("owners", "senders"), [("one", [0]), ("stages", [0, 1]), ("interleaved", [0, 1]), ("late", [0, 1])]
)
def test_any_ownership_arrives_in_one_order(world: Callable[[int], World], owners: str, senders: list[int]) -> None:
    results = world(2).run("tests.support.ranks.sync.weight_sync:publish_with", owners=owners)
    assert [result["senders"] for result in results] == [senders, senders]
    assert results[0]["reports"] == results[1]["reports"], "every rank gets the leader's report"


@pytest.mark.parametrize(("owners", "silent"), [("one", 1), ("stages", 0)])
def test_a_publish_costs_the_store_three_requests_per_member_and_none_per_bucket(
    world: Callable[[int], World], owners: str, silent: int
) -> None:
    """Members are the trainer ranks and the three workers. One of them that is `silent`, and sends nothing, costs 1.

    The two trainer ranks need 3 more, to agree on the members, and the leader 4.
    """
    ranks = world(2).run("tests.support.ranks.sync.weight_sync:requests_of_a_publish", owners=owners)
    members, requests = 2 + 3, sum(rank["requests"] for rank in ranks)
    assert len(ranks[0]["senders"]) == 2 - silent and ranks[0]["buckets"] > 10
    least = 3 * (members - silent) + silent + 3 + 4
    assert least <= requests <= least + 40, "a wait polls; a request of each member per bucket would be 50 and more"


@pytest.mark.parametrize("restarts", [0, 1])
def test_all_ranks_learn_of_a_failed_engine_and_stay_in_step(world: Callable[[int], World], restarts: int) -> None:
    results = world(2).run("tests.support.ranks.sync.weight_sync:publish_while_an_engine_fails", restarts=restarts)
    for result in results:
        if restarts:
            assert result["restarted"] == ("replica 1",) and result["error"] is None
        else:
            assert "engine replica 1 worker 0: division by zero" in result["error"]
            assert result["failed_members"] == ("engine replica 1 worker 0",)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "owners", "first", "staged", "published"),
    [
        ("sleep", "one", 9, False, 1),
        ("sleep", "one", 9, False, 0),
        ("sleep", "stages", 9, False, 1),
        ("stop", "stages", 9, None, 1),  # a process can be stopped before or after its last message
        ("sleep", "one", 0, True, 1),
    ],
)
def test_a_rank_that_hangs_in_a_gather_is_named_by_all_others_in_time(
    world: Callable[[int], World],
    how: str,
    owners: str,
    first: int,
    staged: bool | None,
    published: int,
) -> None:
    """With "one" owner rank 1 sends to nobody but rank 0; with "stages" the engines wait for rank 1 too.

    If the leader hangs with it in a gather that is staged, no engine was paused, and all go on serving.
    """
    results = world(4).run(
        "tests.support.ranks.sync.weight_sync:publish_while_a_rank_hangs",
        how=how,
        owners=owners,
        first=first,
        published=published,
    )
    for rank in (0, 2, 3):
        result = results[rank]
        assert result["failed_members"] == ("trainer rank 1",), result["error"]
        assert re.search(r"trainer rank 0 waited \d+\.\d s for .*trainer rank 1", result["error"]), result["error"]
    untouched = results[0]["pauses"] == [published, published]
    assert staged in (None, untouched)
    assert results[0]["serving"] == [untouched, untouched]
    assert all(
        results[rank]["needs_restart"] == (() if untouched else ("replica 0", "replica 1")) for rank in (0, 2, 3)
    )


@pytest.mark.slow
@pytest.mark.parametrize("published", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_rank_that_hangs_in_a_gather_of_megatron_shards_is_named_in_time(
    world: Callable[[int], World], tmp_path: Path, published: int
) -> None:
    model = make_tiny_model(tmp_path / "model", family="qwen3")
    leader, _ = world(2).run(
        "tests.support.ranks.sync.weight_sync:export_while_a_rank_hangs", model=str(model), published=published
    )
    assert leader["failed_members"] == ("trainer rank 1",), leader["error"]
    assert "packing its part of bucket" in leader["error"]


@pytest.mark.parametrize(
    ("family", "sizes", "senders"),
    [
        ("qwen3", {"tensor": 2}, [0]),
        ("qwen3", {"pipeline": 2}, [0, 1]),
        ("qwen3_moe", {"expert": 2}, [0, 1]),
    ],
)
def test_megatron_shards_arrive_as_the_files_they_came_from(
    world: Callable[[int], World], tmp_path: Path, family: str, sizes: dict[str, int], senders: list[int]
) -> None:
    model = make_tiny_model(tmp_path / "model", family=family)
    owners = world(2).run(
        "tests.support.ranks.sync.weight_sync:export_through_megatron",
        model=str(model),
        sizes=sizes,
        bucket_bytes=20_000,
    )
    assert owners == [senders, senders]
