"""Tells the user of a torchrun whose stores are open to the network how to start the same run without that."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence

from megarl.cluster.nodes.rendezvous_mark import NAME, SERVED_BY_VARIABLE

SAFE_TORCHRUN = f"torchrun --rdzv-backend {NAME}"


def notice_of_open_stores(environment: Mapping[str, str], arguments: Sequence[str]) -> str | None:
    """Return the notice with the safe command, or None if torchrun's stores listen on one address and are signed.

    `environment`: that of a rank; `arguments`: its script and what follows it. None also for a rank that torchrun has
    restarted, because the notice was shown at its first start, and for one that torchrun has not started.
    """
    if "TORCHELASTIC_RUN_ID" not in environment or environment.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        return None
    if environment.get(SERVED_BY_VARIABLE) == str(os.getppid()):
        return None
    ranks = environment.get("LOCAL_WORLD_SIZE", environment.get("WORLD_SIZE", "1"))
    return (
        "this torchrun listens on all interfaces of the host, and with its own rendezvous whoever reaches the port can "
        "run code as you (SECURITY.md). The same run without that: "
        f"{SAFE_TORCHRUN} --nproc-per-node {ranks} {shlex.join(arguments)}"
    )
