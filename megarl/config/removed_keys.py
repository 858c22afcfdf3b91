"""Keys that configs of earlier versions could have: each is refused with what to do instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Tree = dict[str, Any]  # a config's plain values
Advice = str | Callable[[Tree], str]  # a function computes what to write from the values of the config

# By dotted key, without the places in lists. A removed section is one row: the keys below it are not looked at.
REMOVED: dict[str, Advice] = {
    "trainer.compile_logprobs": "remove it: GPUs compile the log-prob head, and run it uncompiled where that fails",
    "trainer.fused_weight_gradients": "remove it: Transformer Engine's modules always fuse weight gradients",
}


def advice_on(key: str, tree: Tree) -> str | None:
    """Return what to do instead of setting `key`, a dotted key without places in lists; None if it never was one."""
    advice = REMOVED.get(key)
    return advice(tree) if callable(advice) else advice
