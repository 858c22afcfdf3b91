"""Reads what commands without a trainer need of the checkpoint that `--model` names."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from megarl.common.errors import ConfigError

# Ctrl-C and SIGTERM of a command that has something to tear down: the first one ends its work, none the tear-down.

CTRL_C = (signal.SIGINT,)
ANY_STOP = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def interrupted_once(signals: Sequence[signal.Signals]) -> Iterator[None]:
    """Raise KeyboardInterrupt in the block at the first of `signals`, and ignore all that follow until its end.

    So the block can tear down what it has started, which must have a bound. Only the main thread may call it. Sets
    SIGINT also where a shell has it ignored, as in processes that it starts in the background.
    """
    before = {number: signal.getsignal(number) for number in signals}

    def interrupt(number: int, frame: FrameType | None) -> None:
        for each in signals:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    for each in signals:
        signal.signal(each, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)


def model_config_of(model: Path) -> dict[str, Any]:
    """Return the content of config.json; empty if it cannot be read (`check` reports what is wrong)."""
    import json

    try:
        raw = json.loads((model / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return raw if isinstance(raw, dict) else {}


def dtype_of(wanted: str, model_config: dict[str, Any]) -> str:
    """Return the engines' dtype. `auto` is that of the checkpoint: float32, or bfloat16 for any other."""
    if wanted != "auto":
        return wanted
    return "float32" if (model_config.get("dtype") or model_config.get("torch_dtype")) == "float32" else "bfloat16"


def refuse_megatron(model: Path) -> None:
    """Raise ConfigError for a Megatron checkpoint, and for what is no checkpoint."""
    from megarl.models.hf.model_files import megatron_step

    try:
        step = megatron_step(model)
    except ValueError as error:
        raise ConfigError([f"--model: {error}"]) from None
    if step is not None:
        raise ConfigError(
            [
                f"--model: {model} is a Megatron checkpoint, which engines cannot load; export it first: "
                f"tools/checkpoint/convert.py export --megatron {model} --hf DIR"
            ]
        )
