"""The supervisor's side of the gateway, with a gateway that is no actor: it is watched, replaced, and never raises."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

import tests.support.pool.ray_token  # noqa: F401  # isort: skip  # before Ray is imported
import ray

from megarl.cluster.pool import gateway_keeper
from megarl.cluster.pool.gateway_keeper import BEAT_S, GatewayKeeper
from megarl.gateway.actor import GatewaySpec

BOUND_S = 30.0


@dataclass(frozen=True)
class Reference:
    """An answer of the gateway: what it is, an error, or None if it has not come."""

    answer: Any


class Call:
    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def remote(self) -> Reference:
        return Reference(self.answer)


@dataclass
class Stage:
    """Time, and the gateways that are made one after the other; each is the answers of its start and its heartbeat."""

    gateways: list[tuple[Any, Any]]
    now: float = 1000.0
    ports: list[int] = field(default_factory=list)
    killed: int = 0
    reported: list[str] = field(default_factory=list)

    def create(self, spec: GatewaySpec, *, own_head: bool) -> Any:
        self.ports.append(spec.port)
        start, beat = self.gateways.pop(0)
        return SimpleNamespace(start=Call(start), heartbeat=Call(beat))

    def wait(self, references: list[Reference], timeout: float) -> tuple[list[Reference], list[Reference]]:
        assert timeout == 0
        done = [each for each in references if each.answer is not None]
        return done, [each for each in references if each.answer is None]

    def get(self, reference: Reference, timeout: float) -> Any:
        if isinstance(reference.answer, Exception):
            raise reference.answer
        if reference.answer is None:
            raise TimeoutError
        return reference.answer

    def kill(self, gateway: Any) -> None:
        self.killed += 1


def keeper_on(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> GatewayKeeper:
    monkeypatch.setattr(gateway_keeper, "create_gateway", stage.create)
    monkeypatch.setattr(gateway_keeper.time, "monotonic", lambda: stage.now)
    for name in ("wait", "get", "kill"):
        monkeypatch.setattr(ray, name, getattr(stage, name))
    spec: Any = GatewaySpec(pool=None, controller="controller")  # type: ignore[arg-type]
    keeper = GatewayKeeper(spec, own_head=True, bound_s=BOUND_S, start_s=BOUND_S, say=stage.reported.append)
    keeper.opened(keeper.open().answer)  # type: ignore[attr-defined]
    return keeper


def look(keeper: GatewayKeeper, stage: Stage, times: int = 1, every_s: float = 0.5) -> None:
    for _ in range(times):
        stage.now += every_s
        keeper.look()


UP = {"url": "http://h:77", "port": 77}
ALIVE = "alive"


def test_a_living_gateway_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage([(UP, ALIVE)])
    look(keeper_on(stage, monkeypatch), stage, 100)
    assert (stage.killed, stage.reported, stage.ports) == (0, [], [0])


def test_a_dead_gateway_is_replaced_at_its_port(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage([(UP, RuntimeError("killed")), (UP, ALIVE)])
    keeper = keeper_on(stage, monkeypatch)
    look(keeper, stage, 20)
    assert stage.ports == [0, 77] and stage.killed == 1
    assert (
        "has died (killed)" in stage.reported[0]
        and "open again at http://h:77" in stage.reported[1]
        and len(stage.reported) == 2
    )


def test_a_gateway_that_does_not_answer_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage([(UP, None), (UP, ALIVE)])
    keeper = keeper_on(stage, monkeypatch)
    look(keeper, stage, int(BOUND_S / 0.5))
    assert stage.reported == []
    look(keeper, stage, 10)
    assert "has not answered for 30 s" in stage.reported[0] and stage.ports == [0, 77]


def test_a_gateway_that_cannot_be_opened_is_tried_ever_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = OSError("the port is taken")
    stage = Stage([(UP, RuntimeError("killed")), *[(taken, ALIVE)] * 6, (UP, ALIVE)])
    keeper = keeper_on(stage, monkeypatch)
    look(keeper, stage, 60)
    assert 2 < len(stage.ports) < 8 and "could not be opened (the port is taken)" in stage.reported[1]
    look(keeper, stage, 600)
    assert len(stage.ports) == 8 and "open again" in stage.reported[-1]
    assert BEAT_S < BOUND_S
