"""Steps of one rank of a test world with teachers that it holds, or with demonstrations."""

from pathlib import Path
from typing import Any

import torch

from megarl.queue.trajectory import Trajectory
from megarl.trainer.batch import TrainSample
from tests.support.ranks.training.policy import policy_under
from tests.support.ranks.training.step import take_step


def stepped(model_dir: Path, layout: dict[str, Any], rows: list[Trajectory], **changes: Any) -> dict[str, Any]:
    """What `take_step` returns, the streams of this rank's samples in the update, and the passes of each teacher."""
    with policy_under(model_dir, layout, **changes) as policy:
        streams: dict[str, dict[str, torch.Tensor]] = {}

        def see(samples: list[TrainSample]) -> None:
            streams.update({sample.key: dict(sample.streams) for sample in samples})

        passes = {name: len(each.chunks) for name, each in policy.teachers.items()}
        return take_step(policy, rows, see) | {"streams": streams, "passes": passes}
