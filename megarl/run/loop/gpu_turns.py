"""Decides whether trainer or engines may use the GPUs that they share. Pure.

The states of a run follow each other in one circle:

    generate -> handing over -> train -> publish -> handing back -> generate

A state ends only when all memory that the next one needs has been released. In `publish` both sides hold the weights
and nothing else: the trainer's are sent to the engines.
"""

from collections.abc import Iterable
from enum import StrEnum

from megarl.trainer.parking import EVERYTHING, NOTHING, WEIGHTS, Part


class Turn(StrEnum):
    """What the GPUs are used for."""

    GENERATE = "generate"
    HANDING_OVER = "handing over"
    TRAIN = "train"
    PUBLISH = "publish"
    HANDING_BACK = "handing back"


class GpuTurns:
    """The state of the shared GPUs. They begin with the trainer: engines start asleep.

    `waits_for`: those who have not yet released what the state needs.
    """

    def __init__(self) -> None:
        self.turn = Turn.TRAIN
        self.waits_for: frozenset[str] = frozenset()

    @property
    def trainer_holds(self) -> frozenset[Part]:
        """The parts of its state for which the trainer may use memory."""
        return {Turn.TRAIN: EVERYTHING, Turn.PUBLISH: WEIGHTS}.get(self.turn, NOTHING)

    @property
    def engines_hold(self) -> frozenset[str]:
        """The parts (vLLM's tags) for which engines may take memory."""
        if self.turn is Turn.GENERATE:
            return frozenset({"weights", "kv_cache"})
        publishes = self.turn is Turn.PUBLISH and not self.waits_for
        return frozenset({"weights"}) if publishes or self.turn is Turn.HANDING_BACK else frozenset()

    def hand_over(self, engines: Iterable[str]) -> None:
        """Begin to give the GPUs to the trainer; `engines` must release them."""
        self._move(Turn.GENERATE, Turn.HANDING_OVER, engines)

    def publish(self, ranks: Iterable[str]) -> None:
        """Begin to publish the weights; `ranks` must release everything else."""
        self._move(Turn.TRAIN, Turn.PUBLISH, ranks)

    def hand_back(self, ranks: Iterable[str]) -> None:
        """Begin to give the GPUs to the engines, which have all weights; `ranks` must release theirs."""
        self._move(Turn.PUBLISH, Turn.HANDING_BACK, ranks)

    def let_go(self, who: Iterable[str]) -> None:
        """Record that these have released everything that the state does not allow."""
        self.waits_for -= frozenset(who)
        if not self.waits_for:
            self.turn = {Turn.HANDING_OVER: Turn.TRAIN, Turn.HANDING_BACK: Turn.GENERATE}.get(self.turn, self.turn)

    def _move(self, before: Turn, after: Turn, holders: Iterable[str]) -> None:
        if self.turn is not before or self.waits_for:
            waits = f", and wait for {', '.join(sorted(self.waits_for))}" if self.waits_for else ""
            raise RuntimeError(f"the GPUs cannot go from {before} to {after}: they are in {self.turn}{waits}")
        self.turn, self.waits_for = after, frozenset(holders)
        self.let_go(())
