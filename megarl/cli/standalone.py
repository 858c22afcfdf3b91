"""Shared by commands without a trainer: options that set keys, the claim of the directory, signals, the checkpoint."""

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from megarl.common.errors import ConfigError


def say(text: str) -> None:
    """Write a message to the user."""
    sys.stderr.write(f"megarl: {text}\n")


def run_dir_of(options: argparse.Namespace, command: str) -> Path:
    """Return the directory that `--run-dir` names, or a new one below `runs`."""
    return options.run_dir or Path("runs") / f"{command}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"


def overrides_of(options: argparse.Namespace, keys: Mapping[str, str]) -> list[str]:
    """Return `section.key=value` for each option that was given. `keys`: the options, as `--name`, by their keys."""
    values = {key: getattr(options, flag[2:].replace("-", "_")) for key, flag in keys.items()}
    return [f"{key}={json.dumps(value)}" for key, value in values.items() if value is not None]


@contextmanager
def holding(run_dir: Path, node_s: float, command: str) -> Iterator[None]:
    """Hold the run directory in the block. If another run takes it, this process and its pool end.

    `node_s`: seconds of silence after which a holder counts as lost. Raises ConfigError if another run holds it.
    """
    from megarl.common.process.processes import ProcessId
    from megarl.common.rundir.run_lock import Holder, claim

    def end_at_once(other: Holder) -> None:
        say(f"{run_dir} was taken by {other.describe()}, so this {command} ends")
        os._exit(1)

    held = claim(run_dir, Holder.here(command, ProcessId.own()), node_s, say)
    held.renew_in_background(end_at_once)
    try:
        yield
    finally:
        held.release()


CTRL_C = (signal.SIGINT,)
ANY_STOP = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def interrupted_once(signals: Sequence[signal.Signals]) -> Iterator[Callable[[], None]]:
    """Raise KeyboardInterrupt in the block at the first of `signals`, and ignore all later ones until its end.

    So no signal interrupts the tear-down in the block, which must have a bound. Yields a function that ignores the
    first signal too. Only the main thread may call it. Handles SIGINT even where a shell ignores it, as it does for
    background processes.
    """
    before = {number: signal.getsignal(number) for number in signals}

    def ignore() -> None:
        for each in signals:
            signal.signal(each, signal.SIG_IGN)

    def interrupt(number: int, frame: FrameType | None) -> None:
        ignore()
        raise KeyboardInterrupt

    for each in signals:
        signal.signal(each, interrupt)
    try:
        yield ignore
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)


def model_config_of(model: Path) -> dict[str, Any]:
    """Return the content of config.json; empty if it cannot be read (`check` reports what is wrong)."""
    try:
        raw = json.loads((model / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return raw if isinstance(raw, dict) else {}


def precision_of(dtype: str, model_config: dict[str, Any]) -> str:
    """Return `trainer.precision` for an engine's `--dtype`. `auto` is that of the checkpoint: fp32, else bf16."""
    if dtype == "auto":
        dtype = model_config.get("dtype") or model_config.get("torch_dtype") or ""
    return "fp32" if dtype == "float32" else "bf16"


def refuse_unreadable(model: Path) -> None:
    """Raise ConfigError for a Megatron checkpoint, for quantized weights, or if `model` is not a checkpoint."""
    from megarl.models.hf.model_files import megatron_step, not_for_engines

    try:
        reason = not_for_engines(model)
        source = "DIR" if megatron_step(model) is None else str(model)
    except ValueError as error:
        raise ConfigError([f"--model: {error}"]) from None
    if reason:
        first = f"import --hf {model} --out DIR, then " if source == "DIR" else ""
        raise ConfigError(
            [
                f"--model: {model} {reason}, which engines cannot load; export it first: "
                f"tools/checkpoint/convert.py {first}export --megatron {source} --hf {'OUT' if first else 'DIR'}"
            ]
        )
