"""Kills a process at named points of a save or a conversion, by functions that stand around those of megarl.

`KILL_AT=shard,manifest` kills the process that first reaches each of these points. Every kill leaves a file with the
point's name in the directory KILL_MARKS: it shows that the point was reached, and lets a restarted rank pass it.

`-m tests.support.checkpoints.kill_points` is `examples/rl/train_rl.py` with these points.
"""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from megarl.checkpoint.convert import megatron_to_hf
from megarl.checkpoint.convert.hf_to_megatron import HFToMegatron
from megarl.checkpoint.convert.target import Output
from megarl.checkpoint.format.manifest import Manifest
from megarl.checkpoint.save.directory import CheckpointDirectory
from megarl.checkpoint.save.writer import BackgroundWrite

# In this order: between two shards, before torch's .metadata, before the manifest, before the rename that completes a
# checkpoint or an output, in the middle of a deletion by retention.
POINTS = ("shard", "metadata", "manifest", "rename", "retention")


def reached(point: str) -> None:
    """Kill this process (SIGKILL) if KILL_AT names `point` and no process has been killed there yet."""
    if not point or point not in os.environ.get("KILL_AT", "").split(","):
        return
    try:
        (Path(os.environ["KILL_MARKS"]) / point).touch(exist_ok=False)
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def kill_points() -> Iterator[None]:
    """Have the points in this process, and in those that it forks, until the end of the block."""
    with ExitStack() as stack:
        for owner, name, before, after in (
            (BackgroundWrite, "_write_file", "", "shard"),
            (BackgroundWrite, "finish", "metadata", ""),
            (CheckpointDirectory, "complete", "rename", ""),
            (Manifest, "write", "manifest", ""),
            (Output, "finish_unit", "", "shard"),
            (HFToMegatron, "finish", "metadata", ""),
            (megatron_to_hf, "copy_side_files", "metadata", "manifest"),
            (Output, "commit", "rename", ""),
        ):
            stack.enter_context(mock.patch.object(owner, name, _between(getattr(owner, name), before, after)))
        stack.enter_context(mock.patch.object(os, "replace", _replace))
        yield


def _between(function: Callable[..., Any], before: str, after: str) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        reached(before)
        result = function(*arguments, **options)
        reached(after)
        return result

    return call


_os_replace = os.replace


def _replace(source: Any, target: Any, **options: Any) -> None:
    _os_replace(source, target, **options)
    if str(target).endswith(".deleted"):  # a checkpoint, whose files are removed next
        reached("retention")


if __name__ == "__main__":
    from megarl.run.start.main import main

    with kill_points():
        main()
