"""The gated delta rule on packed sequences, against that of transformers run sequence by sequence, on one core.

    python -m benchmarks.delta_rule [--json FILE] [--quick]

Forward and backward pass of one layer with a quarter of the heads of Qwen3.5-9B, in fp32: 4 key heads and 8 value heads
of 128 channels, 2,048 tokens. Both sides run in turn, `--rounds` times, in one process with one thread; the median of
its CPU times counts, so that other work on the machine disturbs less. Rows: for each packing, transformers' time over
that of megarl.
"""

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise

import torch
from torch.nn import functional

from benchmarks.lib.report import Ratio, finish, new_parser
from megarl.models.megatron.delta_rule import gated_delta_rule

KEY_HEADS, VALUE_HEADS, CHANNELS = 4, 8, 128
# Lengths and the bound of each packing; None: reported alone.
PACKINGS: dict[str, tuple[list[int], float | None]] = {
    "8 x 256": ([256] * 8, 1.0),
    "1 x 2048": ([2048], 1.8),
    "ragged": ([37, 700, 5, 900, 406], None),
}
Tensors = Sequence[torch.Tensor]


def ours(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, bounds: list[int]
) -> None:
    """Run megarl's rule over all sequences, forward and backward."""
    out, _ = gated_delta_rule(q, k, v, g, beta, bounds)
    out.sum().backward()


def theirs(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, bounds: list[int]
) -> None:
    """Run transformers' rule over one sequence after the other."""
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

    for start, stop in pairwise(bounds):
        wide = (x[None, start:stop].repeat_interleave(VALUE_HEADS // KEY_HEADS, 2) for x in (q, k))
        own = (x[None, start:stop] for x in (v, g, beta))
        out, _ = torch_chunk_gated_delta_rule(*wide, *own, use_qk_l2norm_in_kernel=True)
        out.sum().backward()


def measure(lengths: list[int], rounds: int) -> dict[str, list[float]]:
    """Return the CPU seconds of each round of both sides, after one that does not count."""
    generator = torch.Generator().manual_seed(0)
    tokens, bounds = sum(lengths), [0, *accumulate(lengths)]
    sizes = ((KEY_HEADS, CHANNELS), (KEY_HEADS, CHANNELS), (VALUE_HEADS, CHANNELS), (VALUE_HEADS,), (VALUE_HEADS,))
    q, k, v, a, b = (torch.randn(tokens, *size, generator=generator) for size in sizes)
    inputs = [x.requires_grad_() for x in (q, k, v, -functional.softplus(a), b.sigmoid())]
    sides: dict[str, Callable[..., None]] = {"ours": ours, "theirs": theirs}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name, side in sides.items():
            start = time.process_time()
            side(*inputs, bounds)
            if number:
                seconds[name].append(time.process_time() - start)
    return seconds


def rows_of(seconds: Mapping[str, Mapping[str, Sequence[float]]]) -> list[Ratio]:
    """Return a row for each packing of `PACKINGS`."""
    rows = []
    for name, (_, bound) in PACKINGS.items():
        medians = {side: statistics.median(values) for side, values in seconds[name].items()}
        ratio, details = medians["theirs"] / medians["ours"], {side: list(each) for side, each in seconds[name].items()}
        rows.append(Ratio(f"delta rule, {name}", ratio, bound, at_least=True, details={"seconds": details}))
    return rows


def main() -> int:
    """Measure, print the table, and return 1 if a bound is missed."""
    parser = new_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {}
    for name, (lengths, _) in PACKINGS.items():
        found[name] = measure([-(-each // 32) for each in lengths] if options.quick else lengths, options.rounds)
    return finish(rows_of(found), options)


if __name__ == "__main__":
    sys.exit(main())
