"""The options of a weight sync, as the config gives them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch

from megarl.common.values import MIB
from megarl.config.schema import TimeoutsConfig, WeightSyncConfig

# The report of a publication: what it took, and what had to be replaced for it.


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


_SYNC, _TIMEOUTS = WeightSyncConfig(), TimeoutsConfig()


@dataclass(frozen=True)
class SyncSettings:
    """The options of a sync; `_s` in seconds, `_bytes` in bytes. The defaults are those of the config."""

    bucket_bytes: int = int(_SYNC.bucket_mb * MIB)
    transport: str = _SYNC.transport
    recompute_kv: bool = _SYNC.recompute_kv
    sync_s: float = _TIMEOUTS.weight_sync_s
    rpc_s: float = _TIMEOUTS.rpc_s
    restart_s: float = _TIMEOUTS.engine_start_s
    restarts: int = _SYNC.restarts
    asleep: bool = False  # the engines sleep when a sync begins (`rollout.share_gpus`)
    # The directory of the run, whose secret the trainer ranks have in common. A single rank needs none.
    run_dir: Path | None = None

    @classmethod
    def of(
        cls, sync: WeightSyncConfig, timeouts: TimeoutsConfig, run_dir: Path, *, asleep: bool = False
    ) -> SyncSettings:
        """Read the options from sections of a config."""
        return cls(
            bucket_bytes=int(sync.bucket_mb * MIB),
            transport=sync.transport,
            recompute_kv=sync.recompute_kv,
            sync_s=timeouts.weight_sync_s,
            rpc_s=timeouts.rpc_s,
            restart_s=timeouts.engine_start_s,
            restarts=sync.restarts,
            asleep=asleep,
            run_dir=run_dir,
        )

    @property
    def backend(self) -> str:
        """The key of `megarl.weights.group.backends.BACKENDS`."""
        cuda, transport = torch.cuda.is_available(), self.transport
        if transport == "relay" or (transport == "auto" and self.asleep):
            return "relay_cuda" if cuda else "relay"
        if transport != "auto":
            return transport
        return "nccl" if cuda else "gloo"

    @property
    def relays(self) -> bool:
        """Whether trainer ranks pass the weights on to the engines of their own devices."""
        return self.backend.startswith("relay")
