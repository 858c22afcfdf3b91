"""A publication without partial rollouts: running responses end first, others wait, and each has one version."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tests.support.pool.ray_token  # noqa: F401  # isort: skip  # before Ray is imported


from megarl.common.errors import ReplicaFailed, RolloutError
from megarl.config.schema import TimeoutsConfig
from megarl.rollout.engine.continuation import RequestContext
from megarl.rollout.engine.messages import GenerateRequest, GenerateResult
from megarl.rollout.fleet.engine_pool import EnginePool
from tests.support.engines.versioned_engines import VersionedEngine, of_length, settle

Results = list[GenerateResult]


class Pool:
    """A fleet of versioned engines; engines that are lost come back at the next publication."""

    def __init__(self, engines: int = 2, *, weight_sync_s: float = 60.0, generate_s: float = 60.0) -> None:
        self.engines = {index: VersionedEngine(index) for index in range(engines)}
        timeouts = TimeoutsConfig(generate_s=generate_s, rpc_s=60.0, weight_sync_s=weight_sync_s)

        async def restart(index: int, old: VersionedEngine) -> VersionedEngine:
            self.engines[index] = VersionedEngine(index)
            return self.engines[index]

        replicas: dict[int, object] = dict(self.engines)
        self.fleet = EnginePool(
            replicas,  # type: ignore[arg-type]
            timeouts,
            restart,  # type: ignore[arg-type]
            report_interval_s=5.0,
            sync_restarts=0,
        )
        self.version = 0

    def call(self, group: str, *lengths: int, background: bool = False) -> asyncio.Task[Results]:
        """Ask for responses of these lengths."""
        requests: list[GenerateRequest] = [of_length(f"{group}.{i}", each) for i, each in enumerate(lengths)]
        return asyncio.ensure_future(self.fleet.generate(RequestContext(group), requests, background=background))

    async def turns(self, count: int = 1) -> None:
        for _ in range(count):
            for engine in list(self.engines.values()):
                await engine.give_turns()

    async def lose(self, index: int) -> None:
        self.engines[index].dead = True
        await self.engines[index].give_turns()
        self.fleet.table.lose(index, ReplicaFailed(index, f"replica {index} is dead"))
        await settle()

    async def set_weights(self) -> None:
        """Give the next version to all engines."""
        await self.fleet.begin_sync()
        await self.fleet.restart(list(self.fleet.lost))
        self.version += 1
        for engine in self.engines.values():
            engine.version = self.version
        self.fleet.admit_joining()
        await settle()

    async def publish(self) -> None:
        """Publish without partial rollouts."""
        draining = asyncio.ensure_future(self.fleet.drain(60.0))
        await settle()
        while not draining.done():
            await self.turns()
        await draining
        await self.set_weights()


def versions_of(results: Results) -> list[set[int]]:
    return [{span.version for span in result.versions} for result in results]


async def test_running_responses_end_with_their_version_and_others_begin_with_the_next() -> None:
    pool = Pool(1)
    early = pool.call("early", 2, 4)
    await pool.turns(1)
    draining = asyncio.ensure_future(pool.fleet.drain(60.0))
    await settle()
    late = pool.call("late", 1)
    await pool.turns(2)
    assert not draining.done() and not early.done(), "one of its responses has a token left"
    await pool.turns(1)
    assert draining.done() and early.done() and not late.done()
    await pool.turns(3)
    assert not pool.engines[0].left.get("late.0"), "a request that came meanwhile was sent to an engine"
    await pool.set_weights()
    await pool.turns(1)
    assert versions_of(await early) == [{0}, {0}] and versions_of(await late) == [{1}]


@pytest.mark.parametrize("begun", [True, False])
async def test_a_response_of_a_lost_replica_ends_elsewhere_only_if_it_has_begun(begun: bool) -> None:
    pool = Pool(2)
    response = pool.call("a", 3)  # on replica 0
    await pool.turns(int(begun))
    draining = asyncio.ensure_future(pool.fleet.drain(60.0))
    await settle()
    await pool.lose(0)
    assert draining.done() is not begun
    await pool.turns(3)
    assert draining.done() and response.done() is begun
    await pool.set_weights()
    await pool.turns(3)
    [result] = await response
    assert versions_of([result]) == [{0} if begun else {1}] and result.lost_replicas == 1
    assert result.replica == 1 or not begun


async def test_what_is_waited_for_too_long_is_named_and_nothing_stays_closed() -> None:
    pool = Pool(2)
    slow = [pool.call("a", 3, 3), pool.call("b", 3)]
    await pool.turns(1)
    with pytest.raises(
        RolloutError,
        match=r"waited 0 s \(timeouts.generate_s\) for 3 running requests to end .*: replica 0: 2, replica 1: 1$",
    ):
        await pool.fleet.drain(0.05)
    late = pool.call("late", 1)
    await pool.turns(3)
    assert late.done() and all(each.done() for each in slow)


async def test_a_begun_response_that_waits_for_a_replacement_is_waited_for() -> None:
    """It would otherwise go on with other weights."""
    pool = Pool(1)
    response = pool.call("a", 3)
    await pool.turns(1)
    old = pool.engines[0]
    await pool.fleet.restart([0])  # the new one serves after the publication
    await old.give_turns()
    with pytest.raises(RolloutError, match=r"for 1 running requests to end .*: no replica: 1$"):
        await pool.fleet.drain(0.05)
    response.cancel()


async def test_a_new_trainer_finds_it_open() -> None:
    """`EnginePool.reset` is part of its `begin`; the one before died between drain and publication."""
    pool = Pool(1)
    await pool.fleet.drain(1.0)
    await pool.fleet.drain(1.0)  # a second call finds nothing to do
    late = pool.call("late", 1)
    group = asyncio.ensure_future(pool.fleet.may_begin())
    await pool.turns(2)
    assert not late.done() and not group.done()
    pool.engines[0].reset = pool.engines[0].generate.__class__(settle)  # type: ignore[attr-defined]
    await pool.fleet.reset()
    await pool.turns(1)
    assert late.done() and group.done()


async def test_nobody_is_held_back_forever() -> None:
    """The publication does not come, and nobody resets the fleet."""
    pool = Pool(1, generate_s=0.03, weight_sync_s=0.03)
    await pool.fleet.drain(1.0)
    with pytest.raises(RolloutError, match=r"1 requests waited 0 s for a publication to end .*partial_rollout"):
        await pool.call("late", 1)
    with pytest.raises(RolloutError, match="a prompt group waited 0 s for a publication to end"):
        await pool.fleet.may_begin()


async def test_the_time_for_which_requests_are_held_back_does_not_count() -> None:
    pool = Pool(1)
    await pool.fleet.drain(1.0)
    placed = asyncio.ensure_future(
        pool.fleet._router.place(RequestContext("a", home=0), 1, 0, background=False, timeout_s=0.05)
    )
    await asyncio.sleep(0.1)
    assert not placed.done()
    await pool.set_weights()
    assert await placed is not None


async def test_an_evaluation_ends_before_a_publication() -> None:
    pool = Pool(2)
    evaluated = pool.call("problem", 3, background=True)
    await pool.turns(1)
    draining = asyncio.ensure_future(pool.fleet.drain(60.0))
    await settle()
    assert not draining.done()
    more = pool.call("another", 1, background=True)
    await pool.turns(2)
    assert draining.done() and evaluated.done() and not more.done()
    await pool.set_weights()
    await pool.turns(1)
    assert versions_of(await evaluated) == [{0}] and versions_of(await more) == [{1}]


ACTIONS = st.one_of(
    st.tuples(st.just("call"), st.lists(st.integers(1, 6), min_size=1, max_size=3)),
    st.tuples(st.just("turns"), st.integers(1, 3)),
    st.tuples(st.just("publish"), st.none()),
    st.tuples(st.just("lose"), st.integers(0, 1)),
)


@settings(deadline=None, max_examples=150)
@given(st.lists(ACTIONS, max_size=14))
def test_every_response_is_of_one_version(actions: list[tuple[str, object]]) -> None:
    """Whatever comes when, and whichever replica is lost; one is always left."""

    async def scenario() -> None:
        pool, calls = Pool(2), []
        for kind, value in actions:
            if kind == "call":
                calls.append(pool.call(f"group {len(calls)}", *value))  # type: ignore[misc]
                await settle()
            elif kind == "turns":
                await pool.turns(value)  # type: ignore[arg-type]
            elif kind == "publish":
                await pool.publish()
            elif not pool.fleet.lost:
                await pool.lose(value)  # type: ignore[arg-type]
        await pool.publish()
        await pool.turns(8)
        for call in calls:
            assert call.done(), "a response does not end"
            assert all(len(versions) == 1 for versions in versions_of(call.result()))

    asyncio.run(asyncio.wait_for(scenario(), 30))
