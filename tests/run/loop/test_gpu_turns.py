"""The turns of shared GPUs, with every order of answers: no memory is ever used by both sides."""

import copy
from collections.abc import Iterator

import pytest

from megarl.run.loop.gpu_turns import GpuTurns, Turn
from megarl.trainer.parking import EVERYTHING, NOTHING, WEIGHTS, Part

ENGINES, RANKS = ("engine 0", "engine 1"), ("rank 0", "rank 1")
AWAKE = frozenset({"weights", "kv_cache"})


class Gpus:
    """Two engines and two ranks that take whatever the state allows them, and let go one after the other."""

    def __init__(self) -> None:
        self.turns = GpuTurns()
        self.engines = {name: frozenset[str]() for name in ENGINES}
        self.ranks: dict[str, frozenset[Part]] = dict.fromkeys(RANKS, EVERYTHING)

    def actions(self) -> list[tuple[str, str]]:
        turns = self.turns
        if turns.waits_for:
            return [("let go", name) for name in sorted(turns.waits_for)]
        moves = {Turn.GENERATE: "hand_over", Turn.TRAIN: "publish", Turn.PUBLISH: "hand_back"}
        took = [("take", name) for name, held in self.ranks.items() if held != turns.trainer_holds]
        took += [("wake", name) for name, held in self.engines.items() if held < turns.engines_hold]
        return [*took, ("move", moves[turns.turn])]

    def do(self, kind: str, what: str) -> None:
        turns = self.turns
        if kind == "move":
            getattr(turns, what)(ENGINES if what == "hand_over" else RANKS)
        elif kind == "let go":
            if what in self.ranks:
                self.ranks[what] &= turns.trainer_holds
            else:
                self.engines[what] = frozenset()
            turns.let_go([what])
        elif kind == "take":
            self.ranks[what] = turns.trainer_holds
        else:
            self.engines[what] |= turns.engines_hold

    def check(self) -> None:
        parts = frozenset().union(*self.ranks.values())
        awake = frozenset().union(*self.engines.values())
        assert not (parts - WEIGHTS and awake), "the optimizer's memory is in use next to an engine's"
        assert not (parts and "kv_cache" in awake), "the trainer's weights are next to a KV cache"

    @property
    def key(self) -> object:
        turns = self.turns
        return turns.turn, turns.waits_for, tuple(self.engines.values()), tuple(self.ranks.values())


def states() -> Iterator[Gpus]:
    seen, waiting = set(), [Gpus()]
    while waiting:
        gpus = waiting.pop()
        if gpus.key in seen:
            continue
        seen.add(gpus.key)
        yield gpus
        for kind, what in gpus.actions():
            after = copy.deepcopy(gpus)
            after.do(kind, what)
            waiting.append(after)


def test_no_state_that_can_be_reached_has_two_owners_and_each_turn_is_reached() -> None:
    turns = set()
    for gpus in states():
        gpus.check()
        assert gpus.actions(), "nothing can go on"
        turns.add(gpus.turns.turn)
    assert turns == set(Turn)


@pytest.mark.parametrize(("holds", "turn"), [(WEIGHTS, Turn.HANDING_BACK), (EVERYTHING, Turn.PUBLISH)])
def test_the_check_sees_a_trainer_that_is_allowed_too_much(
    monkeypatch: pytest.MonkeyPatch, holds: frozenset[Part], turn: Turn
) -> None:
    allowed = GpuTurns.trainer_holds.fget
    assert allowed is not None
    monkeypatch.setattr(GpuTurns, "trainer_holds", property(lambda self: holds if self.turn is turn else allowed(self)))
    with pytest.raises(AssertionError, match="next to"):
        for gpus in states():
            gpus.check()


def test_the_check_sees_engines_that_wake_before_all_ranks_have_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    nobody = property(lambda self: frozenset(), lambda self, value: None)
    monkeypatch.setattr(GpuTurns, "waits_for", nobody, raising=False)
    with pytest.raises(AssertionError, match="next to"):
        for gpus in states():
            gpus.check()


def test_a_turn_out_of_order_and_one_that_still_waits_are_refused() -> None:
    turns = GpuTurns()
    with pytest.raises(RuntimeError, match="cannot go from generate to handing over: they are in train"):
        turns.hand_over(ENGINES)
    turns.publish(RANKS)
    turns.let_go(["rank 0"])
    with pytest.raises(RuntimeError, match="they are in publish, and wait for rank 1"):
        turns.hand_back(RANKS)
    assert turns.engines_hold == frozenset() and turns.trainer_holds == WEIGHTS
    turns.let_go(["rank 1"])
    turns.hand_back([])
    assert turns.turn is Turn.GENERATE and turns.trainer_holds == NOTHING and turns.engines_hold == AWAKE
