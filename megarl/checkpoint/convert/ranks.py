"""Ranks of `torchrun convert.py ...`: who does which units, and where all wait for each other.

They meet in torchrun's own key-value store; no process group is needed. Each stage ends with every rank's outcome known
to all, so that the failure of one ends all of them with its message.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

from megarl.common.errors import ConversionError

STAGE_TIMEOUT = timedelta(hours=12)
T = TypeVar("T")


class PeerError(ConversionError):
    """Another rank failed; it says why itself."""


class Ranks:
    """`rank` of `size`; without torchrun, 0 of 1."""

    def __init__(self) -> None:
        self.rank, self.size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self._store: Any = None
        self._stage = 0
        # torchrun's store outlives the attempts of `--max-restarts`.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._prefix = f"convert/{os.environ.get('TORCHELASTIC_RUN_ID', '')}/{attempt}"
        if self.size > 1:
            from torch.distributed.rendezvous import rendezvous

            self._store, self.rank, self.size = next(rendezvous("env://", timeout=timedelta(minutes=10)))

    def share(self, numbers: Sequence[int]) -> list[int]:
        """This rank's part of the units."""
        return [number for number in numbers if number % self.size == self.rank]

    def stage(self, name: str, work: Callable[[], T]) -> T:
        """Do `work`, wait for all ranks. Raises what `work` raised, or PeerError naming the rank that failed."""
        return self._run(name, work)[0]

    def first(self, name: str, work: Callable[[], T]) -> T:
        """A stage of rank 0 alone; its answer, which must be JSON, is every rank's."""
        answer: T = self._run(name, work if self.rank == 0 else _nothing, share=True)[1]
        return answer

    def _run(self, name: str, work: Callable[[], Any], *, share: bool = False) -> tuple[Any, Any]:
        """What `work` returned here, and, with `share`, on rank 0."""
        failure: Exception | None = None
        result: Any = None
        try:
            result = work()
        except Exception as error:
            failure = error
        self._stage += 1
        firsts = result
        if self._store is not None:
            firsts = self._meet(name, failure, result if share else None)
        if failure is not None:
            raise failure
        return result, firsts

    def _meet(self, name: str, failure: Exception | None, result: Any) -> Any:
        keys = [f"{self._prefix}/{self._stage}/{rank}" for rank in range(self.size)]
        self._store.set(keys[self.rank], json.dumps([str(failure) if failure is not None else None, result]))
        firsts = None
        for rank, key in enumerate(keys):
            try:
                self._store.wait([key], STAGE_TIMEOUT)
            except Exception as error:
                raise ConversionError(
                    f"rank {self.rank} waited for rank {rank} at the end of stage {name!r} in vain: {error}"
                ) from error
            problem, theirs = json.loads(self._store.get(key))
            if problem is not None and failure is None:
                raise PeerError(f"rank {rank} failed: {problem}")
            firsts = theirs if rank == 0 else firsts
        return firsts


def _nothing() -> None:
    return None
