"""Loads a checkpoint that somebody else has made."""

from __future__ import annotations

from megatron.core import dist_checkpointing

from megarl.checkpoint.format.load_weights import load_weights
from megarl.checkpoint.format.mapped_reader import MappedLoadStrategy, NoCommonState
from megarl.checkpoint.format.sharding import model_sharded_state_dict
from tests.support.ranks.checkpoints import build
from tests.support.ranks.layouts import make_layout, use_layout


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
                    dist_checkpointing.load(state, f"{path}/release", MappedLoadStrategy(), NoCommonState())
                else:
                    load_weights(chunks, info, path)
                messages.append("")
            except ValueError as error:
                messages.append(str(error))
    return messages
