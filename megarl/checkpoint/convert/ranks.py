"""The ranks of `torchrun convert.py ...`: how they share the units, and where they wait for each other.

They communicate through torchrun's key-value store, without a process group. After each stage every rank knows the
outcome of all, so one failure ends all of them with its message.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar, cast

from megarl.common.errors import ConversionError
from megarl.common.values import JsonValue

if TYPE_CHECKING:
    from torch.distributed import Store

STAGE_TIMEOUT = timedelta(hours=12)
T = TypeVar("T")


class PeerError(ConversionError):
    """Another rank failed; the message contains that rank's message."""


class Ranks:
    """This process is rank `rank` of `size`; without torchrun, 0 of 1."""

    def __init__(self) -> None:
        self.rank, self.size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self._store: Store | None = None
        self._stage = 0
        # All attempts of `--max-restarts` use the same store, so each one needs different keys.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._prefix = f"convert/{os.environ.get('TORCHELASTIC_RUN_ID', '')}/{attempt}"
        if self.size > 1:
            from torch.distributed.rendezvous import rendezvous

            self._store, self.rank, self.size = next(rendezvous("env://", timeout=timedelta(minutes=10)))

    def share(self, numbers: Sequence[int]) -> list[int]:
        """Return this rank's units."""
        return [number for number in numbers if number % self.size == self.rank]

    def stage(self, name: str, work: Callable[[], T]) -> T:
        """Do `work`, then wait for all ranks. Raises what `work` raised, or PeerError naming a failed rank."""
        return self._run(name, work)[0]

    def first(self, name: str, work: Callable[[], T]) -> T:
        """Do `work` on rank 0 alone, then wait for all ranks; return its result, a JSON value, on every rank."""
        answer: T = self._run(name, work if self.rank == 0 else lambda: None, share=True)[1]
        return answer

    def _run(self, name: str, work: Callable[[], T], *, share: bool = False) -> tuple[T, JsonValue]:
        """Return what `work` returned here and, with `share`, on rank 0 (a JSON value)."""
        failure: Exception | None = None
        result: T | None = None
        try:
            result = work()
        except Exception as error:
            failure = error
        self._stage += 1
        firsts: JsonValue = result
        if self._store is not None:
            firsts = self._meet(self._store, name, failure, result if share else None)
        if failure is not None:
            raise failure
        return cast("T", result), firsts

    def _meet(self, store: Store, name: str, failure: Exception | None, result: object) -> JsonValue:
        """Exchange the outcomes of a stage; return rank 0's result, a JSON value."""
        keys = [f"{self._prefix}/{self._stage}/{rank}" for rank in range(self.size)]
        store.set(keys[self.rank], json.dumps([str(failure) if failure is not None else None, result]))
        firsts = None
        for rank, key in enumerate(keys):
            try:
                store.wait([key], STAGE_TIMEOUT)
            except Exception as error:
                raise ConversionError(
                    f"rank {self.rank} waited for rank {rank} at the end of stage {name!r} in vain: {error}"
                ) from error
            problem, theirs = json.loads(store.get(key))
            if problem is not None and failure is None:
                raise PeerError(f"rank {rank} failed: {problem}")
            firsts = theirs if rank == 0 else firsts
        return firsts
