r"""Math answers: math-verify on the last \boxed{} of the response, else on its final answer.

math-verify's own time-outs use SIGALRM, which raises outside a main thread; they are off here, because the
pool kills a process whose sample takes too long.
"""

from __future__ import annotations

import logging
import re
from functools import lru_cache
from typing import Any

from megarl.rewards.types import RewardInput, RewardResult

_BRACES = re.compile(r"\\?(?P<box>\\(?:boxed|fbox)\s*\{)|\\.|(?P<open>\{)|(?P<close>\})", re.DOTALL)
_TAIL_CHARACTERS = 3000  # a final answer without a box stands at the end; math-verify is slow on long text


def math(sample: RewardInput, require_box: bool = False) -> RewardResult:
    r"""1 if the response's final answer is mathematically equal to the reference, else 0.

    Components: `correct`, `parsed` (some answer was found), `boxed` (in a \boxed{}). With `require_box`, a
    response without a box has no answer. Raises ValueError if the reference itself cannot be read.
    """
    from math_verify import verify

    reference = parse_reference(sample.answer)
    if not reference:
        raise ValueError(f"the reference answer {sample.answer[-60:]!r} cannot be read by math-verify")
    content = last_boxed(sample.response)
    if content is not None:
        found = _parse(rf"\boxed{{{content}}}")
    else:
        found = [] if require_box else _parse(sample.response[-_TAIL_CHARACTERS:])
    correct = float(bool(found) and verify(list(reference), found, timeout_seconds=None))
    return RewardResult(
        correct, {"correct": correct, "parsed": float(bool(found)), "boxed": float(content is not None)}
    )


def _warm_up() -> None:
    """Import math-verify and build its grammars: seconds, once per process."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time-outs are off
    for answer in ("7", r"\frac{1}{2}", "1.5"):
        math(RewardInput(prompt="", response=rf"The answer is \boxed{{{answer}}}.", answer=answer))
    math(RewardInput(prompt="", response="The answer is 8.", answer="7"))


math.warm_up = _warm_up  # type: ignore[attr-defined]


@lru_cache(maxsize=4096)
def parse_reference(answer: str) -> tuple[Any, ...]:
    r"""math-verify's reading of a reference: its last \boxed{}, else what follows `####`, else all of it."""
    content = last_boxed(answer)
    if content is None:
        content = answer.rpartition("####")[2].strip().strip("$")
    return tuple(_parse(rf"\boxed{{{content}}}")) if content else ()


def last_boxed(text: str) -> str | None:
    r"""Content of the last-starting \boxed{...} or \fbox{...} whose braces close; None if there is none."""
    open_braces: list[tuple[bool, int]] = []
    found: tuple[int, int] | None = None
    for token in _BRACES.finditer(text):
        if token["open"] or token["box"]:
            open_braces.append((bool(token["box"]), token.end()))
        elif token["close"] and open_braces:
            is_box, start = open_braces.pop()
            if is_box and (found is None or start > found[0]):
                found = (start, token.start())
    return text[found[0] : found[1]].strip() if found else None


def _parse(text: str) -> list[Any]:
    from math_verify import parse

    found: list[Any] = parse(text, parsing_timeout=None)
    return found
