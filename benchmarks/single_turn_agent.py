#!/usr/bin/env python3
"""Single turns by an agent loop against single turns without one: the same load, in turn, in the same run.

    python benchmarks/single_turn_agent.py [--json FILE] [--quick] [--rounds N]

Parts and stand-ins are those of control_plane.py. The replicas offer more trajectories per second than the control
plane can carry, so that its own speed is what is measured. `plain` is `agent.loop: single_turn`; `agent` is a loop of
one turn and no tools (`OneTurn` below) that is found by its import path, as a user's. A round measures both, each in a
pool of its own, and every second round in the other order. Rows:

- rate: finished trajectories per second, agent / plain, median of the rounds' ratios;
- cost: CPU time of the control plane per trajectory, agent / plain, median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # imported after the environment is set
    from megarl.queue.trajectory import Trajectory
    from megarl.rollout.agents.agent_loop import AgentContext

ROOT = Path(__file__).resolve().parents[1]
for folder in (ROOT, ROOT / "benchmarks"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from control_plane import Measured, measure, start_ray  # noqa: E402
from report import Ratio, add_options, finish  # noqa: E402

RATE = 0.95  # the least share of the plain rate: repeated measurements of one kind differ by less
PLAIN, AGENT = "plain", "agent"
AGENTS: dict[str, dict[str, Any]] = {
    PLAIN: {"loop": "single_turn"},
    AGENT: {"loop": "benchmarks.single_turn_agent:OneTurn"},
}


class OneTurn:
    """An agent loop that lets the model answer once."""

    async def run(self, ctx: AgentContext) -> Trajectory:
        """Return the trajectory of one response, made as that of a dialogue."""
        from megarl.rollout.agents.finish import finish as finished

        return await finished(ctx, [await ctx.generate(ctx.prompt.ids)], [])


def order_of(round_number: int) -> tuple[str, str]:
    """Return the kinds in the order of a round, so that neither is always the first one."""
    return (PLAIN, AGENT) if round_number % 2 == 0 else (AGENT, PLAIN)


def rows_of(rounds: Sequence[dict[str, Measured]], machine: str) -> list[Ratio]:
    """Return the rows of the report. `rounds`: the measurements of each round by kind."""
    rates = [each[AGENT].rate / each[PLAIN].rate for each in rounds]
    costs = [each[AGENT].cost / each[PLAIN].cost for each in rounds]
    seen: dict[str, Any] = {
        f"finished per second, {kind}": [round(each[kind].rate) for each in rounds] for kind in AGENTS
    }
    spent = {f"ms per trajectory, {kind}": [round(each[kind].cost, 3) for each in rounds] for kind in AGENTS}
    return [
        Ratio("rate, agent / plain", statistics.median(rates), RATE, True, seen | {"machine": machine}),
        Ratio("cost, agent / plain", statistics.median(costs), details=spent),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--in-flight", type=int, default=2000, help="trajectories")
    parser.add_argument("--trajectories", type=int, default=20_000, help="finished ones of each measurement")
    parser.add_argument("--rate", type=float, default=5000.0, help="trajectories per second that the replicas offer")
    parser.add_argument("--groups", type=int, default=25, help="groups per step")
    parser.add_argument("--reward-workers", type=int, default=1)
    options = parser.parse_args()
    options.profile = None
    if options.quick:
        options.rounds, options.in_flight, options.trajectories, options.groups = 1, 128, 400, 4
        options.rate = 400.0
    paths = (str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", ""))
    os.environ |= {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    from megarl.quickstart.build import build_assets
    from megarl.quickstart.warm_start import WarmStart

    with tempfile.TemporaryDirectory(prefix="single-turn-agent-") as name:
        directory = Path(name)
        build_assets(directory / "assets", size=WarmStart(steps=1))  # only tokenizer and data matter
        head = start_ray(directory / "ray")
        try:
            rounds = [
                {
                    kind: measure(
                        options, directory, options.in_flight, options.trajectories, AGENTS[kind], f"{kind}-{number}"
                    )
                    for kind in order_of(number)
                }
                for number in range(options.rounds)
            ]
        finally:
            import ray

            ray.shutdown()
            head.stop()
    return finish(rows_of(rounds, f"{len(os.sched_getaffinity(0))} cores"), options)


if __name__ == "__main__":
    sys.exit(main())
