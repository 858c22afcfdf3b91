"""Loads a checkpoint that somebody else has made."""

from __future__ import annotations

from megarl.checkpoint.format.load_weights import load_weights
from tests.support.ranks.checkpoints import build
from tests.support.ranks.layouts import make_layout, use_layout


def load(path: str) -> str:
    """Load the weights into a model; return the message of the error, "" if there is none."""
    layout = make_layout()
    with use_layout(layout):
        info, chunks = build(path, layout)
        try:
            load_weights(chunks, info, path)
        except ValueError as error:
            return str(error)
    return ""
