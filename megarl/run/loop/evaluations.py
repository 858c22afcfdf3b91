"""The trainer's side of evaluations: it waits for their reports, or continues training and collects them later.

At most one runs alongside training. The trainer waits for it before the next one and before the end of the run. A
checkpoint records an unfinished one, and a resumed run begins it again with the checkpoint's weights. So no evaluation
of the committed history is lost or counted twice.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

from megarl.config.derived.staleness import evaluates_alongside_training
from megarl.config.schema import Config
from megarl.rollout.orchestrator.evaluator import FinishedEvaluation
from megarl.rollout.orchestrator.step_batches import PublicationNeeded
from megarl.run.loop.rollout_client import RolloutClient
from megarl.run.record.recorder import Recorder


class Evaluations:
    """Starts evaluations and records their reports, as a `Stateful` part. Collective unless a method says otherwise."""

    key = "evaluations"

    def __init__(self, config: Config, pool: RolloutClient, recorder: Recorder, stopped: Callable[[], bool]) -> None:
        """`stopped`: says on rank 0 whether the run was asked to stop; an awaited evaluation then ends."""
        self._config, self._pool, self._recorder, self._stopped = config, pool, recorder, stopped
        self._alongside_training = evaluates_alongside_training(config)
        self._running: dict[str, tuple[int, int]] = {}  # label -> steps done, version; on rank 0
        self._began: dict[str, float] = {}  # label -> when it began alongside training
        # A stop request has ended an evaluation: the run stops even if the request is withdrawn. The same on every
        # rank.
        self.ended_by_stop = False

    def evaluate(self, steps_done: int, version: int, label: str) -> bool | PublicationNeeded:
        """Evaluate the weights of `version`, which were just published, on all sets.

        Responses go to RUN_DIR/eval_{label}.jsonl. It always waits before the first step and after the last, so the
        evaluations that judge a run have exactly one version. Returns False if a stop request has ended it; a resumed
        run repeats it. Returns PublicationNeeded, and records nothing, if no replica is left.
        """
        if not self._config.evaluation.sets:
            return True
        if (needed := self.finish(steps_done)) is not None:
            return needed
        if self._alongside_training and 0 < steps_done < self._config.run.steps:
            self._running[label] = (steps_done, version)
            self._began[label] = time.monotonic()
            self._pool.start_evaluation(version, label)
            return True
        began = time.monotonic()
        with self._recorder.phase("eval", f"evaluating ({label})"):
            reports = self._pool.evaluate(version, label, self._stopped)
        if isinstance(reports, PublicationNeeded):
            return reports
        if reports is None:
            self.ended_by_stop = True
            self._recorder.say(f"the evaluation ({label}) was ended by a stop request")
            if 0 < steps_done < self._config.run.steps:  # the loop itself repeats the first and the last one
                self._running[label] = (steps_done, version)
            return False
        self._recorder.evaluation(steps_done, version, label, reports, began=began)
        return True

    def resume(self, version: int) -> PublicationNeeded | None:
        """Restart the evaluations that were unfinished at the checkpoint, with the weights of `version`.

        Return as `evaluate`; call it again after the publication.
        """
        while self._running:
            label, (steps_done, began_at) = self._running.popitem()
            others, self._running = self._running, {}
            needed = self.evaluate(steps_done, version, label)
            if isinstance(needed, PublicationNeeded):
                self._running = {**others, label: (steps_done, began_at)}
                return needed
            if not needed:  # a stop request has ended it: the next resume makes all of them
                self._running |= others
                return None
            if self._running:  # it runs alongside training, and only one does
                return None
            self._running = others
        return None

    def collect(self, steps_done: int) -> None:
        """Record the evaluation that has ended since the last call, if there is one. Not collective: only rank 0 acts.

        `steps_done`: the step under which its metrics are written; `eval/step` is that of its weights.
        """
        if self._running:
            self._record(self._pool.take_evaluations(), steps_done)

    def finish(self, steps_done: int) -> PublicationNeeded | None:
        """Wait for the evaluation that runs alongside training, if there is one, and record it as `collect` does.

        Returns PublicationNeeded if no replica is left; publish and call again.
        """
        if not self._alongside_training:
            return None
        with self._recorder.phase("eval"):
            finished = self._pool.finish_evaluations()
            if isinstance(finished, PublicationNeeded):
                return finished
            self._record(finished, steps_done)
        self._running.clear()
        return None

    def _record(self, finished: Sequence[FinishedEvaluation], steps_done: int) -> None:
        for each in finished:
            began_at, version = self._running.pop(each.label)
            if each.version is not None:  # later than requested if a new controller has restarted it
                version = each.version
            began = self._began.pop(each.label, None)
            self._recorder.evaluation(began_at, version, each.label, each.reports, written_at=steps_done, began=began)

    def state_dict(self) -> dict[str, Any]:
        """Return which evaluations have not ended. On rank 0."""
        return {label: list(began) for label, began in self._running.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep the labels for `resume`."""
        self._running = {label: (int(steps_done), int(version)) for label, (steps_done, version) in state.items()}
