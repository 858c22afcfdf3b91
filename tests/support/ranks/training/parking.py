"""The work of one rank whose state is parked between updates, as where an engine uses the same GPU."""

from pathlib import Path
from typing import Any
from unittest import mock

import torch
from megatron.core.models.common.embeddings import RotaryEmbedding

from megarl.trainer import parking
from megarl.trainer.batch import TrainSample
from megarl.trainer.parking import EVERYTHING, NOTHING, WEIGHTS
from megarl.trainer.policy import Policy
from tests.support.ranks.training.policy import exported, own_share, policy_under

UPDATES = 3


def updates(
    model_dir: Path, layout: dict[str, Any], samples: list[TrainSample], park: bool, lose: str = "", **changes: Any
) -> dict[str, Any]:
    """Updates on the same mini-batch, with the state parked between two of them or not; what is left of it.

    `lose`: one block of this part is lost in the first parking.
    """
    with policy_under(model_dir, layout, **changes) as policy:
        _, mine = own_share(samples)
        facts: dict[str, Any] = {"metrics": [], "bytes": []}
        for number in range(UPDATES):
            facts["metrics"].append(policy.update(mine))
            if park:
                facts["bytes"].append(_take_turns(policy, lose if number == 0 else ""))
        reference = policy.compute_logprobs(mine, reference=True) if policy.reference is not None else []
        return facts | {"weights": exported(policy), "reference": reference}


def _take_turns(policy: Policy, lose: str) -> dict[str, Any]:
    """Hold what each phase of a step with shared GPUs needs; every part is back afterwards."""
    memory, before = policy.memory, exported(policy)
    live = _live_bytes(policy)
    out = memory.hold(WEIGHTS)
    during = exported(policy)
    assert all(torch.equal(before[name], during[name]) for name in before)
    out += memory.hold(NOTHING)
    assert _live_bytes(policy) == RotaryEmbedding.forward.cache_info().currsize == 0
    refused = ""
    try:
        policy.compute_logprobs([])
    except RuntimeError as error:
        refused = str(error)
    _lose(policy, lose)
    back = memory.hold(EVERYTHING)
    assert memory.hold(EVERYTHING) == 0
    gradients = [buffer.grad_data for chunk in policy.module_chunks for buffer in chunk.buffers]
    return {
        "out": out, "back": back, "live": live, "again": _live_bytes(policy), "host": memory.host_bytes,
        "refused": refused, "zero": not any(bool(each.any()) for each in gradients),
    }  # fmt: skip


def _live_bytes(policy: Policy) -> int:
    return sum(storage.nbytes() for _, storage in policy.memory._storages(EVERYTHING))


def _lose(policy: Policy, part: str) -> None:
    parked = [each for each in policy.memory._parked if each.part == part]
    if parked and parked[-1].content_B is not None:
        parked[-1].content_B.zero_()


def dirty_gradients(model_dir: Path, layout: dict[str, Any], samples: list[TrainSample]) -> list[bool]:
    """Whether gradients are zero after a parking whose memory comes back full of other values."""
    content = parking._content

    def dirty_content(storage: Any) -> torch.Tensor:
        return content(storage).fill_(255)

    with policy_under(model_dir, layout) as policy:
        policy.update(own_share(samples)[1])
        policy.memory.hold(NOTHING)
        with mock.patch.object(parking, "_content", dirty_content):
            policy.memory.hold({"gradients"})
        return [not bool(each.grad_data.any()) for chunk in policy.module_chunks for each in chunk.buffers]
