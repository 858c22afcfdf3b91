"""A trainer rank that breaks a rule of on-policy training: `broken_run.py temperature|sync --config CONFIG`.

`temperature`: the trainer's log-probs are those of temperature 1, whatever the engines sample at. `sync`: version 1 is
announced everywhere, but the engines keep the weights of version 0.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megarl import platforms
from megarl.config.schema import Config
from megarl.run.start.main import main

if TYPE_CHECKING:  # imported after `platforms.activate`
    from megarl.trainer.policy import Policy
    from megarl.weights.plan.settings import SyncReport
    from megarl.weights.send.sender import WeightSender

SKIPPED = 1


def ignore_the_temperature() -> None:
    from megarl.trainer.policy import Policy

    make = Policy.__init__

    def make_at_1(self: Policy, config: Config, *arguments: Any, **options: Any) -> None:
        sampling = config.sampling.model_copy(update={"temperature": 1.0})
        make(self, config.model_copy(update={"sampling": sampling}), *arguments, **options)

    Policy.__init__ = make_at_1  # type: ignore[method-assign]


def skip_a_sync() -> None:
    from megarl.weights.send.sender import WeightSender

    publish, reports = WeightSender.publish, list["SyncReport"]()

    def publish_but_one(self: WeightSender, version: int, keep: Collection[str] = ()) -> SyncReport:
        if version != SKIPPED:
            reports.append(publish(self, version, keep))
            return reports[-1]
        if self._engines is not None:  # on rank 0
            for replica in self._engines.handles.replicas():
                replica.call("set_weight_version", str(version), timeout_s=60)
        return replace(reports[-1], version=version)

    WeightSender.publish = publish_but_one  # type: ignore[method-assign]


BREAKS = {"temperature": ignore_the_temperature, "sync": skip_a_sync}


if __name__ == "__main__":
    chosen, activate = BREAKS[sys.argv.pop(1)], platforms.activate

    def activate_and_break(*arguments: Any, **options: Any) -> platforms.Platform:
        platform = activate(*arguments, **options)
        chosen()
        return platform

    platforms.activate = activate_and_break
    main()
