"""Loads a checkpoint that somebody else has made, and fails as torch plans to load or save one."""

import torch
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.utils import _DistWrapper

from megarl.checkpoint.format.load_weights import load_weights
from megarl.checkpoint.format.mapped_reader import MappedLoadStrategy, load_shards
from megarl.checkpoint.save.training_state import model_sharded_state_dict
from tests.support.ranks.checkpoints.checkpoints import build
from tests.support.ranks.models.layouts import make_layout, use_layout


def load(path: str, model_dir: str) -> list[str]:
    """Load the weights into a model as training does at its start, and as a resume does, which checks no keys before.

    Returns the messages of the errors, "" for none.
    """
    layout, messages = make_layout(), []
    with use_layout(layout):
        info, chunks = build(model_dir, layout)
        for resumes in (False, True):
            try:
                if resumes:
                    state = model_sharded_state_dict(chunks, info)
                    load_shards(state, f"{path}/release", MappedLoadStrategy())
                else:
                    load_weights(chunks, info, path)
                messages.append("")
            except ValueError as error:
                messages.append(str(error))
    return messages


def fail_to_plan() -> list[str]:
    """Let the last rank fail in each of torch's steps of planning; return this rank's messages."""
    rank, last = torch.distributed.get_rank(), torch.distributed.get_world_size() - 1
    wrapper = _DistWrapper(None, True, 0)

    def plan() -> int:
        if rank == last:
            raise ValueError(f"rank {rank} cannot plan")
        return rank

    messages = []
    for step in (
        lambda: wrapper.reduce_scatter("plan", plan, list),
        lambda: wrapper.all_reduce("plan", plan, sum),
        lambda: wrapper.all_gather("plan", plan),
    ):
        try:
            step()
        except CheckpointException as error:
            messages.append(str(error))
    return messages
