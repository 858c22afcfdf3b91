"""The report of a publication: what it took, and what had to be replaced for it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class SyncReport:
    """The facts of one published version, equal on every trainer rank; times in seconds, sizes in bytes."""

    version: int
    seconds: float
    bytes: int
    buckets: int
    digest_seconds: float  # of the slowest sender plus those of the slowest receiver, which partly overlap
    pause_seconds: (
        float  # from the first call of `pause` (a replica stops before it answers) until the last one has resumed
    )
    phases: dict[str, float] = field(default_factory=dict)  # seconds by the called method; "stage": before all calls
    restarted: tuple[str, ...] = ()  # replicas that failed, and were replaced or left out before the sync succeeded
