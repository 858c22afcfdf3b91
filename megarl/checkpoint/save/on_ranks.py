"""Runs a function on one rank or on each, and gives all of them the outcome: a failure leaves no rank waiting.

Every function here is collective over the ranks of `group`; `rank` is the own one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

from torch.distributed import ProcessGroup

from megarl.common.trust.object_collectives import TEXT, Codec, all_gather, broadcast, codec_of, sendable

logger = logging.getLogger(__name__)
T = TypeVar("T")

_RESULT: Codec[tuple[bytes | None, str]] = codec_of(tuple[bytes | None, str])


def on_every_rank(function: Callable[[], T], rank: int, group: ProcessGroup) -> tuple[T | None, str]:
    """Run `function` on every rank. Return (its result, "") on each, or (None, errors) if it failed on one."""
    result: T | None = None
    problem = ""
    try:
        result = function()
    except Exception as error:
        logger.exception("rank %d", rank)
        problem = sendable(f"rank {rank}: {error or repr(error)}")
    problems = [each for each in all_gather(problem, TEXT, group) if each]
    return (None, "; ".join(problems)) if problems else (result, "")


def on_first_rank(function: Callable[[], T], codec: Codec[Any], rank: int, group: ProcessGroup) -> tuple[T | None, str]:
    """Run `function` on rank 0. Return (its result, "") or (None, error) on every rank: none is left waiting."""
    result, problem = None, ""
    if rank == 0:
        try:
            result = codec.encode(function())
        except Exception as error:
            logger.exception("rank 0")
            problem = sendable(str(error) or repr(error))
    content, problem = broadcast((result, problem), _RESULT, 0, group)
    return None if content is None else codec.decode(content), problem
