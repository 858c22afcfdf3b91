"""Signs of life of the trainer ranks: signed texts in the store of their process group, which rank 0 serves."""

from __future__ import annotations

import logging
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from megarl.common.clocks import RateLimit
from megarl.common.errors import NotAuthentic
from megarl.common.process.processes import ProcessId
from megarl.common.trust.signed_store import sign, verify

if TYPE_CHECKING:
    from torch.distributed import TCPStore

logger = logging.getLogger(__name__)

# Names of what is told to all ranks: those that may be silent, the longest first, and the one that ends the run.
SUSPECTS, SILENT = "suspects", "silent rank"
COMPLAIN_S = 30.0  # between two log lines about the same trouble
ENDED = "ended"  # the stamp of a rank that needs nobody any more


def alive(rank: int) -> str:
    """Return the name of a rank's stamp."""
    return f"alive/{rank}"


def busy(rank: int) -> str:
    """Return the name under which others on the same host vouch for a rank: its main thread computes."""
    return f"busy/{rank}"


@dataclass(frozen=True)
class Stamp:
    """The facts that a rank tells of itself. `beat` increases by 1 with each stamp; `step`: None at its start."""

    host: str
    pid: int
    start_time: int
    beat: int
    step: int | None

    def encode(self) -> str:
        """Return the stamp as JSON."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def decode(cls, text: str) -> Stamp:
        """Return the stamp that `encode` gave as `text`."""
        return msgspec.json.decode(text, type=cls)

    @property
    def process(self) -> ProcessId:
        """The identity of the rank's process on its host."""
        return ProcessId(self.pid, self.start_time)


@dataclass(frozen=True)
class SilentRank:
    """A rank that was silent for `seconds`, and its last stamp."""

    rank: int
    seconds: float
    last: Stamp

    def describe(self) -> str:
        """Return the reason why the run ends."""
        when = "while it was starting" if self.last.step is None else f"after step {self.last.step}"
        return (
            f"trainer rank {self.rank} on {self.last.host} has been silent for {self.seconds:.0f} s {when}: its "
            f"process ({self.last.pid}) is stopped or hangs, or its host does. The bound is timeouts.node_s"
        )


def encode(ranks: Sequence[SilentRank]) -> str:
    """Return silent ranks as JSON."""
    return msgspec.json.encode(ranks).decode()


def decode(text: str) -> list[SilentRank]:
    """Return the ranks that `encode` gave as `text`; [] for ""."""
    return msgspec.json.decode(text, type=list[SilentRank]) if text else []


class SignBoard:
    """One rank's connection to the store. A value that no rank of this run has signed counts as none."""

    def __init__(self, store: TCPStore, key: bytes) -> None:
        self._store, self._key = store, key
        self._complaints = RateLimit(COMPLAIN_S)

    def open(self, world: int) -> None:
        """Set every name, on rank 0, so that nobody waits for one."""
        for name in (SUSPECTS, SILENT, *(make(rank) for rank in range(world) for make in (alive, busy))):
            self._store.set(name, "")

    def post(self, name: str, text: str) -> None:
        """Set the text of a name."""
        self._store.set(name, sign(self._key, name, text))

    def read(self, names: Sequence[str]) -> dict[str, str]:
        """Return the texts of names, "" where there is none, in one request."""
        values = self._store.multi_get(list(names))
        return {name: self._text(name, value) for name, value in zip(names, values, strict=True)}

    def _text(self, name: str, value: bytes) -> str:
        if not value:
            return ""
        try:
            return verify(self._key, name, value)
        except NotAuthentic as error:
            if self._complaints.allows():
                logger.warning("%s", error)
            return ""


def own_stamp(beat: int, step: int | None) -> Stamp:
    """Return a stamp of this process."""
    process = ProcessId.own()
    return Stamp(platform.node(), process.pid, process.start_time, beat, step)
