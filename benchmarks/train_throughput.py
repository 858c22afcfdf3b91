"""Forward + log-probs + backward on sequences of different lengths, compared with transformers on the padded batch.

    python -m benchmarks.train_throughput [--json FILE] [--device cpu|cuda] [--rounds N]

Both sides have the same weights, sequences, number of threads and token budget per micro-batch (megarl packs real
tokens into it, transformers padded rows). Before the measurement their log-probs are checked to be equal. megarl runs
its real update path up to the optimizer, with clipped loss, entropy metric and DDP gradient buffers. transformers uses
the cheapest possible loss: the sum of the log-probs. Numbers are medians of alternating runs; a token is useful if it
is not padding. It takes about a minute.

Shape suffixes: S sequences of a micro-batch, L tokens of a padded sequence, R of a padded response, V vocabulary.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.lib.report import Ratio, finish, new_parser

if TYPE_CHECKING:
    from megarl.trainer.batch import TrainSample

os.environ.setdefault("OMP_NUM_THREADS", "1")


PROMPT = 8


@dataclass(frozen=True)
class Scenario:
    """Lengths of whole sequences in tokens, and the lower bound of the ratio."""

    name: str
    lengths: list[int]
    bound: float


def scenarios(sequences: int, longest: int) -> list[Scenario]:
    """Return a scenario of evenly spread lengths, which is half padding as a batch, and one of equal lengths."""
    shortest = 2 * PROMPT
    step = (longest - shortest) / (sequences - 1)
    spread = [round(shortest + step * number) for number in range(sequences)]
    # The mean of evenly spread lengths is a little above one half: shorten all but the longest.
    surplus = sum(spread) - sequences * longest // 2
    for number in range(sequences - 1):
        spread[number] -= min(spread[number] - PROMPT - 1, round(surplus / (sequences - 1)))
    return [Scenario("half_padding", spread, 1.5), Scenario("no_padding", [longest] * sequences, 0.9)]


def make_model(directory: Path, args: argparse.Namespace) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        intermediate_size=3 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 32,
        num_key_value_heads=args.hidden // 64,
        head_dim=32,
        max_position_embeddings=4 * args.longest,
        tie_word_embeddings=False,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)


class Padded:
    """transformers, with micro-batches of as many padded rows as fit the token budget."""

    def __init__(self, directory: Path, args: argparse.Namespace, device: torch.device) -> None:
        from transformers import AutoModelForCausalLM

        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="sdpa")
        self.model.to(device).train()
        self.budget, self.device = args.micro_batch_tokens, device

    def run(self, samples: list[TrainSample]) -> list[torch.Tensor]:
        """Compute the gradients of the sum of all log-probs; return the log-probs of each sample, float32."""
        results: list[torch.Tensor] = []
        longest = max(sample.length for sample in samples)
        rows = max(1, self.budget // longest)
        self.model.zero_grad()
        for start in range(0, len(samples), rows):
            part = samples[start : start + rows]
            ids_SL = torch.zeros((len(part), longest), dtype=torch.int64)
            mask_SL = torch.zeros((len(part), longest), dtype=torch.int64)
            for row, sample in enumerate(part):
                ids_SL[row, : sample.length] = torch.tensor(sample.prompt_ids + sample.response_ids)
                mask_SL[row, : sample.length] = 1
            ids_SL, mask_SL = ids_SL.to(self.device), mask_SL.to(self.device)
            output = self.model(input_ids=ids_SL, attention_mask=mask_SL, use_cache=False)
            logits_SRV = output.logits[:, PROMPT - 1 : -1]
            logprobs_SRV = torch.log_softmax(logits_SRV.float(), dim=-1)
            logprobs_SR = logprobs_SRV.gather(2, ids_SL[:, PROMPT:, None]).squeeze(2)
            (logprobs_SR * mask_SL[:, PROMPT:]).sum().backward()
            results += [row[: s.length - PROMPT].detach().cpu() for row, s in zip(logprobs_SR, part, strict=True)]
        return results


class Packed:
    """megarl's policy on one rank."""

    def __init__(self, directory: Path, args: argparse.Namespace, device: torch.device) -> None:
        from megarl.config.schema import Config
        from megarl.models.hf.read_config import load_info
        from megarl.models.megatron.layout import Layout
        from megarl.trainer import parallel
        from megarl.trainer.policy import Policy

        parallel.initialize(Layout(), seed=0, timeout_s=60)
        config = Config.model_validate(
            {
                "run": {"steps": 1},
                "model": {"path": directory},
                "trainer": {
                    "precision": "fp32" if device.type == "cpu" else "bf16",
                    "micro_batch_tokens": args.micro_batch_tokens,
                    "logprob_chunk_tokens": args.chunk,
                },
                "batch": {"groups": 1, "samples_per_group": 2},
                "sampling": {"max_tokens": args.longest},
                "data": {"path": "unused"},
            }
        )
        self.policy = Policy(config, Layout(), load_info(directory))

    def logprobs(self, samples: list[TrainSample]) -> list[torch.Tensor]:
        """Return the log-probs of each sample."""
        return self.policy.compute_logprobs(samples)

    def run(self, samples: list[TrainSample]) -> None:
        """Run `Policy.update` without the optimizer."""
        self.policy.compute_gradients(samples)


def make_samples(lengths: list[int], vocab: int) -> list[TrainSample]:
    from megarl.trainer.batch import TrainSample

    generator = torch.Generator().manual_seed(1)
    samples = []
    for number, length in enumerate(lengths):
        ids = torch.randint(1, vocab, (length,), generator=generator).tolist()
        samples.append(TrainSample(f"0:{number}", ids[:PROMPT], ids[PROMPT:]))
        samples[-1].set_advantage(1.0 - number % 3)
    return samples


def timed(function: Callable[[], object], device: torch.device, clock: str) -> float:
    """Return the seconds of one call, by wall or processor time."""
    now = time.process_time if clock == "cpu" else time.perf_counter
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = now()
    function()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return now() - start


def measure(
    scenario: Scenario, packed: Packed, padded: Padded, args: argparse.Namespace, device: torch.device
) -> Ratio:
    """Compare and time both sides in one scenario; return the row of the report."""
    samples = make_samples(scenario.lengths, args.vocab)
    own, plain = packed.logprobs(samples), padded.run(samples)
    for sample, logprobs in zip(samples, own, strict=True):
        sample.streams["old_logprobs"] = logprobs
    worst = float(torch.stack([(a - b).abs().max() for a, b in zip(own, plain, strict=True)]).max())
    limit = 1e-4 if device.type == "cpu" else 0.3
    if not worst <= limit:  # NaN too
        raise SystemExit(f"{scenario.name}: the two sides differ by {worst} in a log-prob, more than {limit}")
    packed.run(samples)
    ours, theirs = [], []
    for _ in range(args.rounds):
        ours.append(timed(lambda: packed.run(samples), device, args.clock))
        theirs.append(timed(lambda: padded.run(samples), device, args.clock))
    details = {
        "rounds": args.rounds,
        "clock": args.clock,
        "threads": torch.get_num_threads(),
        "device": str(device),
        "max_abs_logprob_difference": worst,
    }
    return row_of(scenario, ours, theirs, details)


def row_of(scenario: Scenario, ours: list[float], theirs: list[float], details: dict[str, Any]) -> Ratio:
    """Return the row of a scenario from the seconds of megarl's and transformers' rounds."""
    useful = sum(scenario.lengths)
    mine, other = useful / statistics.median(ours), useful / statistics.median(theirs)
    details |= {
        "megarl_useful_tokens_per_s": round(mine, 1),
        "transformers_useful_tokens_per_s": round(other, 1),
        "useful_tokens": useful,
        "padded_tokens": len(scenario.lengths) * max(scenario.lengths),
        "spread_megarl": round((max(ours) - min(ours)) / statistics.median(ours), 3),
        "spread_transformers": round((max(theirs) - min(theirs)) / statistics.median(theirs), 3),
    }
    return Ratio(f"train_throughput.{scenario.name}", mine / other, scenario.bound, True, details)


def arguments() -> argparse.Namespace:
    parser = new_parser(__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of both sides")
    parser.add_argument(
        "--clock", choices=["wall", "cpu"], default="wall", help="cpu: processor time, for a machine that is not idle"
    )
    parser.add_argument("--rounds", type=int, default=5, help="alternating runs per side")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--longest", type=int, default=256, help="tokens of the longest sequence")
    parser.add_argument("--micro-batch-tokens", type=int, default=1024, help="token budget of both sides")
    parser.add_argument("--chunk", type=int, default=256, help="trainer.logprob_chunk_tokens")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.hidden, options.layers, options.sequences, options.longest = 1, 64, 1, 4, 64
    return options


def main() -> int:
    args = arguments()
    from megarl import platforms

    platform = platforms.activate()
    if platform.device.type != args.device:
        raise SystemExit(f"--device {args.device}: megarl runs on {platform.device} here, give that device")
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        torch.distributed.init_process_group(
            platform.backend, store=torch.distributed.HashStore(), rank=0, world_size=1
        )
        make_model(directory / "model", args)
        packed = Packed(directory / "model", args, platform.device)
        padded = Padded(directory / "model", args, platform.device)
        cases = scenarios(args.sequences, args.longest)
        rows = [measure(scenario, packed, padded, args, platform.device) for scenario in cases]
        torch.distributed.destroy_process_group()
    return finish(rows, args)


if __name__ == "__main__":
    sys.exit(main())
