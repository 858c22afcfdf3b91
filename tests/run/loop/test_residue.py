"""What each side of shared GPUs keeps when it has let go, as the monitor's rules see it."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.common.trust.object_collectives import Codec
from megarl.common.values import GIB
from megarl.config.memory_plan.memory import Memory
from megarl.config.memory_plan.shared_gpus import SharedMemory
from megarl.run.loop import shared_gpus
from megarl.run.loop.shared_gpus import Residue, SharedGpus
from megarl.trainer.parking import EVERYTHING, NOTHING, Part
from megarl.weights.send.sleep import HeldMemory


def residue(*kept_gib: float, side: str = "engine", planned: float = 4.0) -> Residue:
    made = Residue({"engine": int(planned * GIB), "trainer": int(5 * GIB)})
    for each in kept_gib:
        made.note(side, int(each * GIB))
    return made


def test_nothing_is_known_before_the_first_hand_over_and_without_a_plan() -> None:
    assert residue().values == {}
    without = Residue({})
    without.note("engine", GIB)
    assert without.values == {}


def test_what_is_kept_is_compared_with_the_plan_on_either_side() -> None:
    assert residue(3.0).values == {"residue": 0.75}
    assert residue(6.0, side="trainer").values["residue"] == pytest.approx(1.2)
    both = residue(3.0)
    both.note("trainer", 6 * GIB)
    assert both.values["residue"] == pytest.approx(1.2)


def test_growth_counts_from_the_most_of_the_first_three_hand_overs() -> None:
    """Communicators and workspaces are made at their first use."""
    assert "residue_growth" not in residue(1.0, 2.0, 3.0).values
    assert residue(1.0, 3.0, 2.0, 3.0).values["residue_growth"] == 0.0
    assert residue(1.0, 3.0, 2.0, 3.5, 5.0).values["residue_growth"] == pytest.approx(0.5)
    assert residue(1.0, 3.0, 2.0, 5.0, 3.0).values["residue_growth"] == 0.0


def test_each_hand_over_measures_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[tuple[str, float]] = []
    lost, awaited = list[str](), list[Any]()

    def put_to_sleep(replicas: object, rpc_s: float, held: HeldMemory) -> list[str]:
        held.note("replica 0", 3 * GIB, "asleep")
        held.note("replica 1", 2 * GIB, "asleep")
        return lost

    def wake_caches(replicas: object, rpc_s: float, held: HeldMemory) -> list[str]:
        for each in ("replica 0", "replica 1"):
            held.note(each, 70 * GIB, "awake")
        return []

    monkeypatch.setattr(shared_gpus, "put_to_sleep", put_to_sleep)
    monkeypatch.setattr(shared_gpus, "wake_caches", wake_caches)
    memory = SimpleNamespace(
        hold=lambda parts: 0, device_bytes=GIB, await_room=lambda *bound: awaited.append(bound), resident=NOTHING
    )

    def gather(mine: Any, codec: Codec[Any]) -> list[Any]:
        other = mine if isinstance(mine, str) else replace(mine, held=4 * GIB)
        return [mine, codec.decode(codec.encode(other))]

    waits = list[tuple[Any, ...]]()
    peers = SimpleNamespace(
        world=2,
        await_all=lambda *waited: waits.append(waited),
        on_first_rank=lambda function, codec: codec.decode(codec.encode(function())),
        gather=gather,
    )
    recorder: Any = SimpleNamespace(
        phase=lambda name: nullcontext(),
        say=lambda text: None,
        metrics=SimpleNamespace(record=lambda *each: recorded.append(each)),
    )
    planned = SharedMemory(Memory((), None), 0, parked=2 * GIB, asleep=6 * GIB)
    engines: Any = SimpleNamespace(replicas=list)
    policy: Any = SimpleNamespace(memory=memory)
    gpus = SharedGpus(policy, peers, recorder, lambda: engines, planned, shared=True, rpc_s=60.0)  # type: ignore[arg-type]
    gpus.publish()
    gpus.generate()
    bound = (60.0, "timeouts.rpc_s", ["1.00 GiB", "1.00 GiB"])
    assert waits == [("let go of the GPUs (publish)", *bound), ("let go of the GPUs (handing back)", *bound)]
    assert gpus.residue.values == {"residue": 2.0}, "a rank keeps 4 GiB of 2"
    gpus.train()
    assert recorded == [("perf/trainer_residue_gib", 4.0), ("perf/engine_residue_gib", 3.0)]
    assert awaited == []
    gpus.publish()
    gpus.generate()
    lost.append("replica 1")
    gpus.train()
    assert awaited == [(60.0, ["replica 1"])], "its processes may still be ending, with their memory"
    held = list[frozenset[Part]]()
    memory.hold = lambda parts: held.append(parts) or 0
    with pytest.raises(RuntimeError, match="an engine is late"), gpus.aside():
        raise RuntimeError("an engine is late")
    assert held == [NOTHING], "it may still be starting"
    with gpus.aside():
        pass
    assert held[1:] == [NOTHING, EVERYTHING]
