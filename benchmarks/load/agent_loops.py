"""The agents that workers can run at once: thousands of tool agents, with stand-ins for engines and trainer.

    python -m benchmarks.load.agent_loops [--json FILE] [--quick]

Real: the controller, the agent workers with the tool agent, its chat template and its tokenizer, the reward processes
with the `math` reward, the queue, Ray, and the way of every token between the processes. Stand-ins: replicas that
answer after the time of their tokens, a tool that takes 50 ms, in the processes of the loops (`in_worker`), and the
trainer of control_plane.py. A trajectory has two turns of 128 to 250 tokens with a call of the tool between them;
groups have 16 samples.

The trainer's stand-in takes `--trained` trajectories per second at most, as one that trains would. Else the groups,
which begin together, would come in waves for minutes. Admission allows `ALLOWED` times the number of trajectories in
flight that is asked for, because it counts finished groups too, which wait for their turn to be trained. Rows:

- rate: finished trajectories per second, with most in flight / 500;
- in flight: trajectories in flight, median over the steps / the number asked for, the smaller of the two ratios;
- cost: CPU time of controller, workers, rewards, queue and Ray's own processes per trajectory, most / fewest in flight;
- longest turn: of the event loops of controller and workers, with most in flight / 100 ms. A timer that is due every
  10 ms was late by that time, so it counts too that other processes had the cores; how long that was is shown alongside
  it, and the most that a loop has computed in any turn;
- longest turn while all begin: the same before, from the start of the pool until what has begun together is trained.

It takes about five minutes, with --quick one.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.lib.report import Ratio, finish, new_parser
from benchmarks.load.control_plane import (
    REPLICAS,
    SAMPLES_PER_GROUP,
    Measured,
    Meter,
    load_rows,
    measure_each,
    running_pool,
    steps_ahead,
)
from benchmarks.load.stand_ins import (
    LONGEST_TURN,
    LongestTurn,
    Response,
    TakenBatch,
    TurnReplica,
    WatchedController,
    longest_turns,
)
from megarl.config.schema import Config

RATE = 500.0  # trajectories per second
TURN_MS = 100.0
ALLOWED = 1.4  # see above
MAX_TOKENS = 768  # both turns, and the tool's answer


@dataclass(frozen=True)
class MeasuredAgents:
    """One measurement, and the longest turns of the event loops in it, and before it, by process."""

    load: Measured
    turns: dict[str, LongestTurn]
    first_turns: dict[str, LongestTurn]


def config_of(options: argparse.Namespace, directory: Path, in_flight: int) -> dict[str, Any]:
    """Return the config of a run that keeps at least `in_flight` trajectories in flight."""
    return {
        "run": {"dir": str(directory / f"run-{in_flight}"), "steps": 10**9},
        "model": {"path": str(directory / "assets" / "model")},
        "agent": {"loop": "tool_agent", "max_turns": 2},
        "tools": [{"kind": "benchmarks.load.stand_ins:Slow", "in_worker": True}],
        "batch": {"groups": options.groups, "samples_per_group": SAMPLES_PER_GROUP},
        "sampling": {"max_tokens": MAX_TOKENS},
        "data": {"path": str(directory / "assets" / "train.jsonl")},
        "reward": {"function": "math", "workers": options.reward_workers},
        # A report of each open call is a call too: none is due before a turn has ended.
        "rollout": {
            "replicas": REPLICAS, "max_model_len": 2 * MAX_TOKENS, "agent_workers": options.workers,
            "report_interval_s": 60.0,
        },
        "admission": {"mode": "async", "sync_interval": 1, "max_staleness": allowed_steps(options, in_flight) - 1},
    }  # fmt: skip


def allowed_steps(options: argparse.Namespace, in_flight: int) -> int:
    """Return the steps whose trajectories admission allows at once."""
    return steps_ahead(options, round(ALLOWED * in_flight))


def responses(directory: Path) -> list[Response]:
    """Return responses of the first turn, which call the tool, and as many of the second one, with a final answer."""
    from megarl.chat.tokenize import load_tokenizer, stop_token_ids

    model = directory / "assets" / "model"
    tokenizer = load_tokenizer(model)
    stop = stop_token_ids(model, tokenizer)[0]
    [thought] = tokenizer(["Let me compute that. "], add_special_tokens=False)["input_ids"]
    found: list[Response] = []
    for texts in (
        [f'<tool_call>{{"name": "slow", "arguments": {{"number": {number}}}}}</tool_call>' for number in range(64)],
        [f"\\boxed{{{number}}}" for number in range(64)],
    ):
        for end in tokenizer(texts, add_special_tokens=False)["input_ids"]:
            found.append(Response(thought * (MAX_TOKENS // len(thought)), [*end, stop]))
    return found


def measure(options: argparse.Namespace, directory: Path, in_flight: int, trajectories: int) -> MeasuredAgents:
    """Run one pool until `trajectories` have finished after the warm-up."""
    config = Config.model_validate(config_of(options, directory, in_flight))
    # A sample takes the time of two turns, each nearly that of the longest: its group waits for the first ones.
    seconds_per_token = in_flight / options.rate / (2 * LONGEST_TURN)
    seconds_per_batch = options.groups * SAMPLES_PER_GROUP / options.trained
    # Until what has begun together, as much as admission allows, is trained.
    warm_up = (allowed_steps(options, in_flight) + 2) * options.groups * SAMPLES_PER_GROUP
    meter = Meter(warm_up, trajectories)
    began, times = time.monotonic(), list[float]()

    def see(step: TakenBatch) -> None:
        meter.see(step)
        if step.finished >= warm_up:
            times.append(step.seconds)

    with running_pool(
        config, f"agents-{in_flight}", seconds_per_token, responses(directory), seconds_per_batch,
        TurnReplica, WatchedController,
    ) as trainer:  # fmt: skip
        trainer.run(warm_up + trajectories, see)
        load = meter.result(in_flight)
    print(f"{in_flight} in flight: {load.rate:.0f} finished per second, {load.cost:.2f} ms of CPU time each")
    loops = ["controller", *(f"worker-{index}" for index in range(options.workers))]
    begun, ended = times[0], times[-1]
    return MeasuredAgents(
        load,
        longest_turns(config.run_dir, begun, ended, loops),
        longest_turns(config.run_dir, began, begun, loops),
    )


def rows_of(results: Sequence[MeasuredAgents]) -> list[Ratio]:
    """Return the rows of the report; `results` in ascending order of the number in flight."""
    turns, first_turns = results[-1].turns, results[-1].first_turns
    details, first_details = ({name: _text(each) for name, each in of.items()} for of in (turns, first_turns))
    name, first_name = f"longest turn / {TURN_MS:.0f} ms", f"longest turn while all begin / {TURN_MS:.0f} ms"
    return [
        *load_rows([each.load for each in results], RATE),
        Ratio(name, _longest_ms(turns) / TURN_MS, 1.0, details=details),
        Ratio(first_name, _longest_ms(first_turns) / TURN_MS, details=first_details),
    ]


def _longest_ms(turns: dict[str, LongestTurn]) -> float:
    return max(1000 * each.wall_s for each in turns.values())


def _text(turn: LongestTurn) -> str:
    wall_ms, ready_ms, cpu_ms = (1000 * value for value in (turn.wall_s, turn.ready_s, turn.cpu_s))
    return f"{wall_ms:.0f} ms, {ready_ms:.0f} ms of it waiting for a core; any turn's cpu at most {cpu_ms:.0f} ms"


def main() -> int:
    parser = new_parser(__doc__)
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1000, 10_000], help="trajectories, ascending")
    parser.add_argument("--trajectories", type=int, default=40_000, help="finished ones measured with most in flight")
    parser.add_argument("--fewer", type=int, default=15_000, help="finished ones measured with fewer in flight")
    parser.add_argument("--rate", type=float, default=560.0, help="trajectories per second that the replicas offer")
    parser.add_argument("--trained", type=float, default=700.0, help="trajectories per second that the trainer takes")
    parser.add_argument("--groups", type=int, default=25, help="groups per step")
    parser.add_argument("--workers", type=int, default=2, help="agent workers")
    parser.add_argument("--reward-workers", type=int, default=1)
    options = parser.parse_args()
    if options.quick:
        options.in_flight, options.trajectories, options.fewer, options.rate = [64, 128], 320, 160, 200.0
        options.trained = 200.0
        options.groups = 2
    from examples.quickstart.build import build_assets
    from examples.quickstart.products_task import ProductsTask
    from examples.quickstart.warm_start import WarmStart

    # Only tokenizer, template and data matter.
    assets = partial(build_assets, size=WarmStart(steps=1), task=ProductsTask())
    return finish(rows_of(measure_each(options, assets, measure)), options)


if __name__ == "__main__":
    sys.exit(main())
