"""The cost of the entropy (`telemetry.entropy_every`) in the log-prob head of trainer rank 0, on a CPU."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import torch
from observability_base import StepSize

from megarl.trainer.logprobs import linear_token_logprobs

CHUNK = 1024  # trainer.logprob_chunk_tokens, its default
MOST_TOKENS = 4096  # that are measured; more cost in proportion


def of_entropy(size: StepSize, steps: int, _: Path) -> tuple[float, dict[str, Any]]:
    """The log-probs of the tokens of a step with their entropies, less those without, in turn."""
    tokens = size.trajectories * size.turns * size.tokens
    rows = min(tokens, MOST_TOKENS)
    hidden_RH, weight_VH = torch.randn(rows, size.hidden), torch.randn(size.vocabulary, size.hidden)
    targets_R = torch.randint(size.vocabulary, (rows,))

    def seconds(with_entropy: bool) -> float:
        begin = time.process_time()
        with torch.no_grad():
            linear_token_logprobs(
                hidden_RH, weight_VH, targets_R, temperature=1.0, vocab_size=size.vocabulary, chunk=CHUNK,
                with_entropy=with_entropy,
            )  # fmt: skip
        return time.process_time() - begin

    seconds(True)
    more = statistics.median(seconds(True) - seconds(False) for _ in range(steps))
    return max(0.0, more) * tokens / rows, {"tokens": tokens, "vocabulary": size.vocabulary, "hidden": size.hidden}
