"""What it costs of a step to replay the experts that an engine chose (`trainer.router_replay: r3`), on one core.

    python -m benchmarks.router_replay [--json FILE] [--quick]

A real engine and a real trainer of one thread each, on a CPU in fp32, and a mixture of experts with 4 of 32 in each of
6 layers. A step is generation, the way of the responses to the trainer (as Ray, the journal and the queue write and
read them), the pass for the old log-probs and one update. It runs with experts and without in turn, `--rounds` times;
the median of the CPU time of all processes counts, so that other work on the machine disturbs less. Rows:

- step: with experts / without, and the same of its three parts;
- payload: the bytes that a row of the queue grows by, per token, layer and expert.
"""

from __future__ import annotations

import argparse
import pickle
import random
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from benchmarks.lib.live_engine import LiveReplica
from benchmarks.lib.random_model import make_model
from benchmarks.lib.report import Ratio, finish, new_parser
from benchmarks.smoke.models import built_policy, free_address, join, make_config
from megarl.models.hf.read_config import load_info
from megarl.queue.row_format import decode, encode
from megarl.queue.trajectory import Trajectory
from megarl.rewards.types import RewardResult
from megarl.rollout.agents.trajectory_builder import trajectory
from megarl.rollout.engine.continuation import ResponseCollector
from megarl.rollout.engine.engine_load import EngineMonitor
from megarl.rollout.engine.engine_requests import EngineRequests
from megarl.rollout.engine.messages import GenerateRequest, SamplingSpec
from megarl.rollout.resume.journal_records import decode_group, encode_group

if TYPE_CHECKING:
    from megarl.trainer.policy import Policy

STEP_BOUND, PAYLOAD_BOUND = 1.05, 1.05
REPORT_S, WAIT_S = 1.0, 600.0
MODEL: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 128, "num_hidden_layers": 6, "head_dim": 32,
    "num_attention_heads": 8, "num_key_value_heads": 4, "num_experts": 32, "num_experts_per_tok": 4, "vocab_size": 512,
    "max_position_embeddings": 512,
}  # fmt: skip
PARTS = ("generation", "transport", "training")


@dataclass
class Side:
    """An engine that returns experts, or one that does not; its seconds of CPU time by part of a step, and bytes."""

    live: LiveReplica
    requests: EngineRequests
    routed: bool
    seconds: dict[str, list[float]]
    row_bytes: int = 0

    @classmethod
    def start(cls, model: Path, options: argparse.Namespace, routed: bool) -> Side:
        live = LiveReplica(
            model, experts=routed, enable_prefix_caching=True, max_num_seqs=options.samples,
            max_num_batched_tokens=8192, enable_chunked_prefill=False,
        )  # fmt: skip
        layers = load_info(model).moe_layers if routed else None
        requests = EngineRequests(live._engine, 0, EngineMonitor(), WAIT_S, routed=layers)
        return cls(live, requests, routed, {part: [] for part in PARTS})

    def stop(self) -> None:
        del self.requests  # it holds the engine, whose end needs vLLM's modules
        self.live.shutdown()


def cpu_seconds() -> float:
    """Return the CPU time of this process and those below it, in which engines run."""
    times = [each.cpu_times() for each in (psutil.Process(), *psutil.Process().children(recursive=True))]
    return sum(each.user + each.system for each in times)


async def answers(side: Side, prompts: Sequence[list[int]], number: int, tokens: int) -> list[Trajectory]:
    """Return the trajectories of the responses to `prompts`, which come in parts, as Ray passes them on."""
    sampling = SamplingSpec(tokens, 1.0, (), ignore_eos=True)
    asked = [
        GenerateRequest(f"{number}-{index}", ids, sampling, seed=index, routes_from=0)
        for index, ids in enumerate(prompts)
    ]
    so_far = ResponseCollector(asked)
    side.requests.start(so_far.send(0))
    while so_far.unfinished:
        so_far.add(await side.requests.report(so_far.reported, REPORT_S))
    return [
        trajectory(0, index, ids, result, RewardResult(float(index % 2)))
        for index, (ids, result) in enumerate(zip(prompts, so_far.results(), strict=True))
    ]


def transported(rows: list[Trajectory], side: Side) -> list[Trajectory]:
    """Return the rows as a trainer reads them: from an engine's actor, through the journal, and out of the queue."""
    rows = pickle.loads(pickle.dumps(rows, protocol=5))
    rows = decode_group(encode_group(rows, ""))
    data, tags = encode(rows)
    side.row_bytes = data["trajectory"].values().numel()
    return decode(data, tags)


def train(policy: Policy, rows: Sequence[Trajectory]) -> None:
    """Make one step's pass and update."""
    from megarl.trainer.batch import TrainSample

    samples = [TrainSample.of(row) for row in rows]
    policy.set_routes(samples, {row.key: row.routes for row in rows})
    for number, (sample, logprobs_R) in enumerate(zip(samples, policy.compute_logprobs(samples), strict=True)):
        sample.streams["old_logprobs"] = logprobs_R
        sample.set_advantage(1.0 - 2.0 * (number % 2))
    policy.update(samples)


def step(side: Side, policy: Policy, prompts: Sequence[list[int]], number: int, tokens: int) -> None:
    """Run a step of one side, and keep its times unless it is the first."""
    routed = policy.routed
    policy.routed = routed if side.routed else None
    marks = [cpu_seconds()]
    rows = side.live.run(answers(side, prompts, number, tokens), WAIT_S)
    marks.append(cpu_seconds())
    rows = transported(rows, side)
    marks.append(cpu_seconds())
    train(policy, rows)
    marks.append(cpu_seconds())
    policy.routed = routed
    for part, (begin, end) in zip(PARTS, pairwise(marks), strict=True):
        if number:
            side.seconds[part].append(round(end - begin, 2))


def rows_of(seconds: Mapping[bool, Mapping[str, Sequence[float]]], payload: float) -> list[Ratio]:
    """Return the rows. `seconds`: of each part in each round, with experts and without; `payload`: see the module."""
    replayed, plain = ({part: statistics.median(seconds[side][part]) for part in PARTS} for side in (True, False))
    whole = sum(plain.values())
    rows = [Ratio("step", sum(replayed.values()) / whole, STEP_BOUND)]
    for part in PARTS:
        details: dict[str, Any] = {"of the step": round((replayed[part] - plain[part]) / whole, 4)}
        details |= {name: list(seconds[side][part]) for side, name in ((True, "with"), (False, "without"))}
        rows.append(Ratio(part, replayed[part] / plain[part], details=details))
    return [*rows, Ratio("payload", payload, PAYLOAD_BOUND)]


def measure(options: argparse.Namespace, model: Path) -> list[Ratio]:
    """Run the steps of both sides; return the rows."""
    rng, tokens = random.Random(0), options.samples * (options.prompt + options.response - 1)
    config = make_config(
        model, trainer={"precision": "fp32", "router_replay": "r3", "micro_batch_tokens": 2048},
        algorithm={"old_logprobs": "trainer"},
    )  # fmt: skip
    plain, replayed = sides = [Side.start(model, options, routed) for routed in (False, True)]
    try:
        join(free_address(), 0, 1)  # after the engines, which would take its platform for a GPU's
        with built_policy(config) as policy:
            for number in range(options.rounds + 1):
                prompts = [[rng.randrange(1, 500) for _ in range(options.prompt)] for _ in range(options.samples)]
                for side in sides:
                    step(side, policy, prompts, number, options.response)
            assert policy.routed is not None
            spec = policy.routed.spec
    finally:
        for side in sides:
            side.stop()
    payload = (replayed.row_bytes - plain.row_bytes) / (tokens * spec.layers * spec.topk)
    return rows_of({side.routed: side.seconds for side in sides}, payload)


def main() -> int:
    """Measure, print the table, and return 1 if a bound is missed."""
    parser = new_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=32, help="responses of a step")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of each prompt")
    parser.add_argument("--response", type=int, default=128, help="tokens of each response")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.samples, options.response = 1, 4, 8
    with tempfile.TemporaryDirectory(prefix="router-replay-") as name:
        make_model(Path(name), moe=True, **MODEL)
        return finish(measure(options, Path(name)), options)


if __name__ == "__main__":
    sys.exit(main())
