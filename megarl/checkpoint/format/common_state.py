"""Keeps Megatron-Core from reading the common state of a checkpoint.

The common state is a pickle: the file `common.pt`, and from Megatron-Core 0.19 on an object among the shards if there
is no such file, which torch's own reader would open, and unpickle the index without restriction. Nothing that megarl
loads is in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, StateDict

from megarl.common.megatron_versions import imported_is


def load_shards(state: ShardedStateDict, directory: Path | str, strategy: object) -> StateDict:
    """Load what `state` describes with `strategy`, by Megatron-Core's `dist_checkpointing.load`. Collective.

    Raises Megatron-Core's CheckpointingException, and the errors of the strategy.
    """
    with _no_common_state() as arguments:
        loaded: StateDict = dist_checkpointing.load(state, str(directory), strategy, **arguments)
        return loaded


@contextmanager
def _no_common_state() -> Iterator[dict[str, Any]]:
    """Yield the arguments of `dist_checkpointing.load` with which it takes an empty common state.

    0.16 takes a strategy for it; later versions call a function.
    """
    if imported_is("<0.17"):
        yield {"common_strategy": _no_common_strategy()}
        return
    name = "load_common" if imported_is("<0.19") else "load_common_state_dict"
    with mock.patch.object(serialization, name, lambda directory: {}):
        yield {}


def _no_common_strategy() -> object:
    from megatron.core.dist_checkpointing.strategies.base import LoadCommonStrategy

    class NoCommonState(LoadCommonStrategy):
        def load_common(self, checkpoint_dir: str | Path) -> StateDict:
            return {}

        def load_sharded_objects(
            self, sharded_objects_state_dict: ShardedStateDict, checkpoint_dir: str | Path
        ) -> None:
            raise NotImplementedError  # the objects are among the shards, which the other strategy loads

        def check_backend_compatibility(self, loaded_version: object) -> None:
            pass  # its file is not read

        def check_version_compatibility(self, loaded_version: object) -> None:
            pass

    return NoCommonState()
