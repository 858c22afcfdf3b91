"""The records of an agent loop that a run which resumes continues from: its frozen state, and its calls of tools. Pure.

A call has a number within its sample. Its intent is recorded before it is made and its answer after, so that a loop
that is resumed makes no call twice that must not be repeated.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from megarl.common.values import changed

INTERRUPTED = "the call was interrupted, and it is unknown whether it has had an effect; it was not repeated"


@dataclass(frozen=True)
class CallRecord:
    """A call of a tool. `digest`: of the tool's name and the arguments; `text`: its answer, None while it is open.

    `seconds`: the time that it took.
    """

    digest: str
    text: str | None = None
    error: bool = False
    seconds: float = 0.0


@dataclass(frozen=True)
class FrozenLoop:
    """The records of one sample's loop.

    `state`: what the loop has frozen last, a JSON text; "" if it has frozen nothing. `requests` and `begun_calls`: how
    many the loop had made then. `version` grows with every change. `calls`: by number.
    """

    state: str = ""
    requests: int = 0
    begun_calls: int = 0
    version: int = 0
    calls: Mapping[int, CallRecord] = field(default_factory=dict)

    def freeze(self, state: str, requests: int, begun_calls: int) -> FrozenLoop:
        """Return the records with another state."""
        return changed(self, state=state, requests=requests, begun_calls=begun_calls, version=self.version + 1)

    def record(self, number: int, call: CallRecord) -> FrozenLoop:
        """Return the records with the intent or the answer of a call."""
        return changed(self, calls={**self.calls, number: call}, version=self.version + 1)

    def known(self, number: int, digest: str) -> CallRecord | None:
        """Return the call of that number, if it is the same one; None if it was never begun."""
        found = self.calls.get(number)
        return found if found is not None and found.digest == digest else None

    def encoded(self) -> bytes:
        """Return the records as a JSON text."""
        return msgspec.json.encode(self)  # of every loop at every change: `json` takes ten times as long

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> FrozenLoop:
        """Return the records with a content. Raises KeyError or TypeError for another one."""
        calls = {int(number): CallRecord(**call) for number, call in content["calls"].items()}
        return cls(**{**content, "calls": calls})


def call_digest(tool: str, arguments: Mapping[str, Any]) -> str:
    """Return a digest of a call, whatever the order of its arguments."""
    text = json.dumps([tool, arguments], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
