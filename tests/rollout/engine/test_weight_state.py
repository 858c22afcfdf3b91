"""The state of an engine's weights against a model that holds two tensors, over all short histories of syncs."""

import itertools

from megarl.rollout.engine.engine_requests import WeightState

MIXED, MIDDLE = "two versions", "middle of a weight sync"


class TwoTensors:
    """An engine with two weights, which a session loads one after the other. `tensors`: the version of each."""

    def __init__(self) -> None:
        self.state = WeightState(has_weights=False)
        self.tensors, self.latest = [0, 0], 0
        self.session: list[int] | None = None  # the weights that the session has loaded
        self.joining = False

    def possible(self) -> list[str]:
        """The calls that a leader may make next."""
        if self.joining:
            return ["joined", "join"]
        if self.session is None:
            return ["join", "begin"]
        return ["abandon", *(["finish"] if self.session else []), *(["load"] if len(self.session) < 2 else [])]

    def do(self, what: str) -> None:
        state = self.state
        if what in ("join", "joined"):
            getattr(state, what)()
            self.joining = what == "join"
        elif what == "begin":
            state.begin()
            self.session = []
            self.latest += 1
        elif what == "load":
            assert self.session is not None
            state.receive()
            self.tensors[len(self.session)] = self.latest
            self.session.append(self.latest)
        elif what == "abandon":
            state.abandoned()
            self.session = None
        else:
            self.tensors = [self.latest] * 2  # the leader has compared the digests of all buckets
            state.finished()
            self.session = None


def histories(length: int) -> list[TwoTensors]:
    """Every engine after `length` calls."""
    reached: list[tuple[str, ...]] = [()]
    engines = []
    for step in range(length + 1):
        engines = [replayed(history) for history in reached]
        if step < length:
            reached = [
                (*history, what) for history, engine in zip(reached, engines, strict=True) for what in engine.possible()
            ]
    return engines


def replayed(history: tuple[str, ...]) -> TwoTensors:
    engine = TwoTensors()
    for what in history:
        engine.do(what)
    return engine


def test_an_engine_with_weights_of_two_versions_never_generates() -> None:
    """`obstacle` allows it only between sessions, and only if both tensors are of one version."""
    seen = set()
    for engine in itertools.chain.from_iterable(histories(length) for length in range(8)):
        one_version = len(set(engine.tensors)) == 1
        idle = engine.session is None and not engine.joining
        if engine.state.obstacle is None:
            assert idle and one_version, engine.tensors
        seen.add((idle, one_version, engine.state.obstacle))
    assert any(idle and not one_version and MIXED in str(why) for idle, one_version, why in seen)
    assert any(not idle and one_version and MIDDLE in str(why) for idle, one_version, why in seen)
    assert (True, True, None) in seen


def test_a_complete_sync_after_an_interrupted_one_makes_the_engine_usable_again() -> None:
    for interrupted in (["begin", "load", "abandon"], ["begin", "load", "load", "abandon"]):
        engine = replayed(tuple(interrupted))
        assert MIXED in str(engine.state.obstacle) and not engine.state.has_weights
        for what in ("begin", "load", "load", "finish"):
            engine.do(what)
        assert engine.state.obstacle is None and engine.state.has_weights
