"""The results of the log-prob head, compiled and not. As a program it compares both; arguments: dtype, with_entropy.

The program is a process of its own because torch.compile does nothing in one where the CPU platform is active or
TORCHDYNAMO_DISABLE was set, as it is by the engines of other tests.
"""

import sys
from typing import Any

import torch

from megarl.trainer import compiled_head
from megarl.trainer.logprobs import linear_token_logprobs
from tests.support.ranks.training.logprobs import VOCAB, problem


def results(compiled: bool, dtype: torch.dtype, count: int, **changes: Any) -> list[torch.Tensor | None]:
    """Log-probs, entropies and both gradients of `count` rows; five columns of the vocabulary are padding."""
    p = problem(dtype)
    hidden, weight = p["hidden"][:count].clone().requires_grad_(), p["weight"].clone().requires_grad_()
    options: dict[str, Any] = dict(temperature=0.7, vocab_size=VOCAB - 5, chunk=8, with_entropy=True) | changes
    targets = p["targets"][:count] % (VOCAB - 5)
    got, entropy = linear_token_logprobs(hidden, weight, targets, compiled=compiled, **options)
    loss = (got * p["grad_logprobs"][:count]).sum()
    if entropy is not None:
        loss = loss + (entropy * p["grad_entropy"][:count]).sum()
    loss.backward()
    return [got.detach(), None if entropy is None else entropy.detach(), hidden.grad, weight.grad]


def compare_with_eager(dtype: torch.dtype, with_entropy: bool) -> None:
    """Raise AssertionError if a result differs, or if a number of rows after the first compiles anything again."""
    graphs: list[int] = []
    for count in (17, 23, 8, 21, 4):
        eager = results(False, dtype, count, with_entropy=with_entropy)
        compiled = results(True, dtype, count, with_entropy=with_entropy)
        for expected, got in zip(eager, compiled, strict=True):
            torch.testing.assert_close(got, expected)
        assert compiled_head._State.usable, "it ran uncompiled"
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[0] > 0, "torch.compile did nothing"
    assert graphs == [graphs[0]] * len(graphs), f"compiled again: {graphs} graphs after each number of rows"


if __name__ == "__main__":
    compare_with_eager(getattr(torch, sys.argv[1]), sys.argv[2] == "True")
