"""Log-probs of a vocabulary that the ranks share."""

from typing import Any

import torch

from megarl.trainer.logprobs import linear_token_logprobs

ROWS, HIDDEN, VOCAB = 23, 16, 61


def problem(dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)  # noqa: E731
    return {
        "hidden": draw(ROWS, HIDDEN),
        "weight": draw(VOCAB, HIDDEN),
        "targets": torch.cat([torch.tensor([0, VOCAB - 1]), torch.randint(VOCAB, (ROWS - 2,), generator=generator)]),
        "grad_logprobs": draw(ROWS),
        "grad_entropy": draw(ROWS),
    }


def shares(temperature: float, chunk: int, padding: int) -> dict[str, torch.Tensor]:
    """This rank's results, with `padding` extra vocabulary rows in all."""
    group = torch.distributed.group.WORLD
    rank, size = group.rank(), group.size()
    p = problem(torch.float32)
    # Were a padded column to enter a softmax, these large weights would show.
    weight = torch.cat([p["weight"], torch.full((padding, HIDDEN), 9.0)]).chunk(size)[rank].clone().requires_grad_()
    hidden = p["hidden"].requires_grad_()
    options: dict[str, Any] = dict(
        temperature=temperature, vocab_size=VOCAB, chunk=chunk, group=group, with_entropy=True
    )
    got, entropy = linear_token_logprobs(hidden, weight, p["targets"], **options)
    ((got * p["grad_logprobs"]).sum() + (entropy * p["grad_entropy"]).sum()).backward()
    summed = hidden.grad.clone()
    torch.distributed.all_reduce(summed, group=group)
    return {"logprobs": got.detach(), "entropy": entropy.detach(), "hidden": summed, "weight": weight.grad}
