"""One step with a correction, and what its updates saw of it on one rank."""

from pathlib import Path
from typing import Any

from megarl.queue.streams import OLD_LOGPROBS, PROXIMAL_ALPHA
from megarl.queue.trajectory import Trajectory
from megarl.trainer.batch import TrainSample
from tests.support.ranks.training.policy import policy_under
from tests.support.ranks.training.step import take_step


def corrected_step(model_dir: Path, rows: list[Trajectory], version: int = 0, **changes: Any) -> dict[str, Any]:
    """What `take_step` returns, and the number of log-prob passes.

    `updates`: of each sample of each update (its loss mask, its alpha or None, whether it has old log-probs).
    """
    with policy_under(model_dir, {}, **changes) as policy:
        updates: list[dict[str, tuple[list[bool], list[float] | None, bool]]] = []
        passes: list[int] = []
        compute_logprobs = policy.compute_logprobs

        def watched_pass(*args: Any, **options: Any) -> Any:
            passes.append(1)
            return compute_logprobs(*args, **options)

        policy.compute_logprobs = watched_pass
        see = lambda samples: updates.append({sample.key: _seen(sample) for sample in samples})  # noqa: E731
        return take_step(policy, rows, see, version) | {"updates": updates, "passes": len(passes)}


def _seen(sample: TrainSample) -> tuple[list[bool], list[float] | None, bool]:
    alpha_R = sample.streams.get(PROXIMAL_ALPHA)
    assert sample.loss_mask_R is not None
    return (
        sample.loss_mask_R.tolist(),
        None if alpha_R is None else alpha_R.tolist(),
        OLD_LOGPROBS in sample.streams,
    )
