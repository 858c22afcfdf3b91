"""Fleet without processes: failover, bounds, and errors that name the replica."""

from __future__ import annotations

import ast
import asyncio
from collections.abc import Callable
from typing import Any

import pytest

import tests.support.ray_token  # noqa: F401  # isort: skip  # before Ray is imported
from ray.exceptions import RayTaskError

from megarl.common.errors import ReplicaFailed, RequestFailed, RolloutError
from megarl.config.schema import TimeoutsConfig
from megarl.rollout.fleet import Fleet, as_rollout_error
from megarl.rollout.requests import GenerateRequest, SamplingSpec
from tests.support.checkout import ROOT

SPEC = SamplingSpec(4, 1.0, (2,))


class Method:
    def __init__(self, function: Any) -> None:
        self.function = function

    def remote(self, *args: Any) -> Any:
        return asyncio.ensure_future(self.function(*args))


class FakeReplica:
    def __init__(self, index: int, fail: Exception | None = None, delay_s: float = 0.0) -> None:
        self.index, self.fail, self.delay_s = index, fail, delay_s
        self.served: list[list[str]] = []
        self.generate = Method(self._generate)

    async def _generate(self, requests: list[GenerateRequest]) -> list[str]:
        await asyncio.sleep(self.delay_s)
        if self.fail is not None:
            raise self.fail
        self.served.append([request.request_id for request in requests])
        return [f"{self.index}:{request.request_id}" for request in requests]


def requests(group: int, n: int = 2) -> list[GenerateRequest]:
    return [GenerateRequest(f"{group}.{i}", [1], SPEC) for i in range(n)]


def fleet_of(
    replicas: dict[int, FakeReplica],
    new: FakeReplica | None = None,
    *,
    generate_s: float = 5.0,
    describe: Callable[[int], str] = str,
) -> Fleet:
    """A fleet whose restarts give `new`."""

    async def restart(index: int, old: Any) -> Any:
        assert old is replicas[index]
        return new

    return Fleet(replicas, TimeoutsConfig(generate_s=generate_s, rpc_s=5), restart, describe)  # type: ignore[arg-type]


def test_groups_are_spread_and_answers_keep_their_order() -> None:
    replicas = {i: FakeReplica(i, delay_s=0.01) for i in range(2)}

    async def run() -> list[Any]:
        pool = fleet_of(replicas)
        return await asyncio.gather(*(pool.generate(group, requests(group)) for group in range(4)))

    answers = asyncio.run(run())
    assert answers == [[f"{g % 2}:{g}.0", f"{g % 2}:{g}.1"] for g in range(4)]


def test_a_failed_replica_is_taken_out_and_its_group_sampled_elsewhere() -> None:
    replicas = {0: FakeReplica(0, ReplicaFailed(0, "replica 0: engine dead")), 1: FakeReplica(1)}

    async def run() -> tuple[Any, Fleet]:
        pool = fleet_of(replicas, describe=lambda i: f"see log {i}")
        return [await pool.generate(g, requests(g)) for g in range(3)], pool

    answers, pool = asyncio.run(run())
    assert answers == [[f"1:{g}.0", f"1:{g}.1"] for g in range(3)]
    assert pool.serving == [1] and "engine dead" in str(pool.lost[0]) and "see log 0" in str(pool.lost[0])


def test_the_last_replicas_failure_is_raised_and_names_it() -> None:
    pool_of_one = {3: FakeReplica(3, ReplicaFailed(3, "replica 3: out of memory"))}

    async def run() -> None:
        await fleet_of(pool_of_one).generate("g", requests(0))

    with pytest.raises(ReplicaFailed, match="replica 3: out of memory") as caught:
        asyncio.run(run())
    assert caught.value.replica == 3


def test_a_silent_replica_is_an_error_after_the_bound() -> None:
    async def run() -> None:
        await fleet_of({0: FakeReplica(0, delay_s=5)}, generate_s=0.05).generate("g", requests(0))

    with pytest.raises(RolloutError, match="waited 0 s for replica 0 to generate"):
        asyncio.run(run())


def test_a_replaced_replica_serves_only_after_it_is_admitted() -> None:
    old = {0: FakeReplica(0, ReplicaFailed(0, "replica 0 is gone")), 1: FakeReplica(1)}
    new = FakeReplica(0)

    async def run() -> list[Any]:
        pool = fleet_of(old, new)
        await pool.generate("a", requests(0))
        await pool.restart([0])
        before = await pool.generate("b", requests(1))
        pool.admit_joining()
        after = await pool.generate("c", requests(2))
        return [before, after]

    before, after = asyncio.run(run())
    assert before[0].startswith("1:") and after[0].startswith("0:")


class ActorDiedError(Exception):
    """Has the name of Ray's exception."""


def test_errors_of_an_actor_call_are_told_apart() -> None:
    died = as_rollout_error(2, "generate", ActorDiedError("..."), "see log")
    assert isinstance(died, ReplicaFailed)
    assert str(died) == "replica 2 died while it was asked to generate; see log" and died.replica == 2
    other = as_rollout_error(1, "pause", ValueError("first\nsecond"), "see log")
    assert str(other) == "replica 1 failed to pause: ValueError: first; see log"


@pytest.mark.parametrize(
    ("cause", "message"),
    [
        (RequestFailed("replica 1 refused a request: too long"), "replica 1 refused a request: too long"),
        (ReplicaFailed(1, "replica 1 is dead"), "replica 1 is dead; see log"),
        (OSError("no space"), "replica 1 failed to generate: OSError: no space; see log"),
    ],
)
def test_the_text_of_an_error_is_the_replicas_own_and_not_the_traceback(cause: Exception, message: str) -> None:
    """What Ray raises is an instance of the cause's type too, but its text is the traceback of the remote call."""
    raised = RayTaskError("generate", "Traceback (most recent call last): ...", cause, pid=1, ip="host", actor_id="a")
    dual = raised.as_instanceof_cause()
    assert isinstance(dual, type(cause)) and str(dual) != str(cause)
    assert str(as_rollout_error(1, "generate", dual, "see log")) == message


def test_a_refused_request_costs_no_replica() -> None:
    """One bad request would otherwise be tried on, and end, every engine in turn."""
    replicas = {i: FakeReplica(i, RequestFailed(f"replica {i} refused a request: too long")) for i in range(3)}

    async def run() -> Fleet:
        fleet = fleet_of(replicas)
        with pytest.raises(RequestFailed, match="refused a request: too long"):
            await fleet.generate("a", requests(0))
        return fleet

    fleet = asyncio.run(run())
    assert fleet.serving == [0, 1, 2] and not fleet.lost


def test_a_replica_that_does_not_answer_is_lost_and_its_requests_are_sampled_elsewhere() -> None:
    async def run() -> tuple[list[Any], Fleet]:
        fleet = fleet_of({0: FakeReplica(0, delay_s=5), 1: FakeReplica(1)}, generate_s=0.05)
        return await fleet.generate("a", requests(0)), fleet

    answers, fleet = asyncio.run(run())
    assert answers == ["1:0.0", "1:0.1"] and fleet.serving == [1] and fleet.members == [0, 1]


def test_reset_replaces_what_cannot_serve() -> None:
    class Resettable(FakeReplica):
        def __init__(self, index: int, fail: Exception | None = None) -> None:
            super().__init__(index)
            self.broken = fail
            self.reset = Method(self._reset)

        async def _reset(self) -> None:
            if self.broken is not None:
                raise self.broken

    new = Resettable(1)

    async def run() -> list[Any]:
        fleet = fleet_of({0: Resettable(0), 1: Resettable(1, ReplicaFailed(1, "left in a sync"))}, new)
        await fleet.reset()
        assert fleet.serving == [0]
        fleet.admit_joining()
        assert fleet.serving == [0, 1]
        return [await fleet.generate("a", requests(0), home=1)]

    assert asyncio.run(run()) == [["1:0.0", "1:0.1"]] and new.served


def replicas_of_the_config_are_read(source: str) -> bool:
    """Whether the code has an expression that ends in `rollout.replicas`."""
    return any(
        isinstance(node, ast.Attribute) and node.attr == "replicas" and ast.unparse(node.value).endswith("rollout")
        for node in ast.walk(ast.parse(source))
    )


def test_only_planning_and_the_start_read_the_number_of_replicas_from_the_config() -> None:
    """Replicas join and leave: whoever needs their number while a run goes on asks the fleet."""
    package = ROOT / "megarl"
    found = {path.relative_to(package).as_posix() for path in package.rglob("*.py")
             if replicas_of_the_config_are_read(path.read_text())}  # fmt: skip
    assert found == {"config/plan.py", "config/pools.py", "rollout/controller.py", "cluster/supervisor.py"}
    assert replicas_of_the_config_are_read("for i in range(self.config.rollout.replicas): ...")
