"""Records what trainer ranks and engines that share GPUs hold, all the time, and in which turn.

`-m tests.support.shared_gpus.shared_memory` is `examples/rl/train_rl.py`. The rank looks at its anonymous memory and at
the engine's every LOOK_S, and appends a line to SHARED_MEMORY_FILE at the end of each turn.
"""

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

from megarl.common.process.memory_tuning import anonymous_bytes
from megarl.run.loop import shared_gpus
from megarl.run.loop.shared_gpus import SharedGpus
from megarl.trainer.policy import Policy
from tests.support.pool.leftovers import MARK, survivors

LOOK_S = 0.05
BEFORE: list[int] = []  # bytes of this rank before it built the policy


def engines() -> list[int]:
    """The processes in which the engines of this run compute."""
    run_dir = Path(os.environ[MARK])
    return [process.pid for process in survivors(run_dir) if "EngineCor" in process.info["name"]]


class Watch:
    """Looks at this process, which is the only rank, and at the only engine."""

    def __init__(self) -> None:
        self.most = [0, 0, 0]  # of the rank, of the engine, of both at the same time
        (self.engine,) = engines()
        self.engine_before: int | None = None
        threading.Thread(target=self.run, daemon=True).start()

    def run(self) -> None:
        while True:
            self.look()
            time.sleep(LOOK_S)

    def look(self) -> tuple[int, int]:
        rank = anonymous_bytes() - BEFORE[0]
        engine = anonymous_bytes(self.engine) - (self.engine_before or 0)
        self.most = [max(*each) for each in zip(self.most, (rank, engine, rank + engine), strict=True)]
        return rank, engine

    def end(self, turn: str, host: int) -> None:
        """Write the most that was held in a turn, and what is held at its end."""
        rank, engine = self.look()
        line = {"turn": turn, "most": self.most, "end": [rank, engine], "host": host}
        with open(os.environ["SHARED_MEMORY_FILE"], "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self.most = [0, 0, 0]


def watch() -> None:
    """Note the turns of this process's `SharedGpus`."""
    made: list[Watch] = []
    put_to_sleep, publish, generate, build = (
        shared_gpus.put_to_sleep, SharedGpus.publish, SharedGpus.generate, Policy.__init__
    )  # fmt: skip

    def sleeping(replicas: Any, rpc_s: float, held: Any) -> Any:
        """Between the turns `generate` and `train`."""
        failed = put_to_sleep(replicas, rpc_s, held)
        if not made:
            made.append(Watch())
        each = made[0]
        if each.engine_before is None:
            each.engine_before = anonymous_bytes(each.engine) - held.most_asleep
            each.most = [0, 0, 0]
        else:
            each.end("generate", 0)
        return failed

    def publishing(self: SharedGpus) -> None:
        publish(self)
        if made:
            made[0].end("train", self._policy.memory.host_bytes)

    def generating(self: SharedGpus) -> None:
        generate(self)
        if made:
            made[0].end("publish", self._policy.memory.host_bytes)

    def building(self: Policy, *arguments: Any, **options: Any) -> None:
        BEFORE.append(anonymous_bytes())
        build(self, *arguments, **options)

    shared_gpus.put_to_sleep = sleeping  # type: ignore[assignment]
    SharedGpus.publish = publishing  # type: ignore[method-assign]
    SharedGpus.generate = generating  # type: ignore[method-assign]
    Policy.__init__ = building  # type: ignore[method-assign]


if __name__ == "__main__":
    from megarl.run.start.main import main

    watch()
    main()
