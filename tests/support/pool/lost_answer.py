"""A call whose answer falls into a cut of the network; run on the first of two hosts that make a Ray cluster.

Usage: python -m tests.support.pool.lost_answer RUNS_S HEAD_ADDRESS OWN_ADDRESS: calls a method that runs for RUNS_S
on the other host; says "called", and "answered after S s".
"""

import asyncio
import sys
import time
from collections.abc import Mapping
from typing import Any

import ray

from megarl.cluster.client.connection import call_once


@ray.remote(resources={"other": 1}, num_cpus=0)
class Slow:
    def __init__(self) -> None:
        self.answers: dict[str, asyncio.Future[str]] = {}

    async def answer(self, key: str, method: str, args: tuple[float], kwargs: Mapping[str, Any]) -> str:
        if key not in self.answers:
            self.answers[key] = asyncio.ensure_future(asyncio.sleep(args[0], "answered"))
        return await self.answers[key]


def main() -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            ray.init(address=sys.argv[2], _node_ip_address=sys.argv[3], log_to_driver=False)
            break
        except ConnectionError:  # this host's raylet is starting
            if time.monotonic() > deadline:
                raise
            time.sleep(1)
    actor: Any = Slow.remote()  # type: ignore[attr-defined]  # a remote class
    assert call_once(actor, "sleep", (0.1,), {}, timeout_s=100, reach_s=60, check=lambda: None) == "answered"
    print("called", flush=True)
    begun = time.monotonic()
    answer = call_once(actor, "sleep", (float(sys.argv[1]),), {}, timeout_s=400, reach_s=60, check=lambda: None)
    print(f"{answer} after {time.monotonic() - begun:.1f} s", flush=True)


if __name__ == "__main__":
    main()
