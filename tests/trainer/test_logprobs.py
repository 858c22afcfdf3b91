"""Chunked vocabulary-parallel log-probs against a plain log_softmax over the whole vocabulary."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megarl.trainer import logprobs
from megarl.trainer.logprobs import linear_token_logprobs
from tests.support.measures.live_bytes import LiveBytes
from tests.support.ranks.training.logprobs import HIDDEN, ROWS, VOCAB, problem

TEMPERATURES = (1.0, 0.6)


def expected(temperature: float) -> dict[str, torch.Tensor]:
    """fp64, the whole vocabulary in one piece."""
    p = problem()
    hidden, weight = p["hidden"].requires_grad_(), p["weight"].requires_grad_()
    log_p = torch.log_softmax(hidden @ weight.t() / temperature, dim=-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    taken = log_p.gather(1, p["targets"][:, None]).squeeze(1)
    ((taken * p["grad_logprobs"]).sum() + (entropy * p["grad_entropy"]).sum()).backward()
    return {"logprobs": taken, "entropy": entropy, "hidden": hidden.grad, "weight": weight.grad}


@pytest.mark.world
@pytest.mark.parametrize(("size", "padding"), [(1, 0), (1, 3), (2, 1), (2, 63), (4, 3)])
def test_all_splits_equal_the_whole_softmax(world: Callable[[int], Any], size: int, padding: int) -> None:
    for temperature in TEMPERATURES:
        reference = expected(temperature)
        for chunk in (1, 5, 100):
            ranks = world(size).run(
                "tests.support.ranks.training.logprobs:shares", temperature=temperature, chunk=chunk, padding=padding
            )
            for name in ("logprobs", "entropy", "hidden"):
                for result in ranks:
                    torch.testing.assert_close(result[name].double(), reference[name], rtol=2e-5, atol=2e-5)
            weight = torch.cat([result["weight"] for result in ranks])
            torch.testing.assert_close(weight[:VOCAB].double(), reference["weight"], rtol=2e-5, atol=2e-5)
            assert not weight[VOCAB:].any(), "padding received gradient"


def run_single(**changes: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    p = problem(torch.float32)
    arguments: dict[str, Any] = dict(temperature=1.0, vocab_size=VOCAB, chunk=8, with_entropy=True)
    return linear_token_logprobs(p["hidden"], p["weight"], p["targets"], **(arguments | changes))


def gradients(temperature: float | torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Log-probs, entropies and the gradient by the hidden states, with chunks that mix temperatures."""
    p = problem(torch.float32)
    hidden = p["hidden"].requires_grad_()
    options: dict[str, Any] = dict(temperature=temperature, vocab_size=VOCAB, chunk=5, with_entropy=True)
    got, entropy = linear_token_logprobs(hidden, p["weight"], p["targets"], **options)
    assert entropy is not None
    ((got * p["grad_logprobs"]).sum() + (entropy * p["grad_entropy"]).sum()).backward()
    assert hidden.grad is not None
    return got.detach(), entropy.detach(), hidden.grad


def test_each_row_may_have_a_temperature_of_its_own() -> None:
    own = torch.tensor(TEMPERATURES).repeat(ROWS)[:ROWS]
    mixed = gradients(own)
    for temperature in TEMPERATURES:
        rows = own == temperature
        for value, alone in zip(mixed, gradients(temperature), strict=True):
            torch.testing.assert_close(value[rows], alone[rows], rtol=1e-6, atol=1e-6)
            assert (value[~rows] - alone[~rows]).abs().max() > 1e-3


def test_without_entropy_nothing_else_changes() -> None:
    with_entropy, entropy = run_single()
    without, none = run_single(with_entropy=False)
    assert none is None and entropy is not None
    assert torch.equal(with_entropy, without)


@pytest.mark.parametrize("cached", [1, 3 * VOCAB, 1 << 17])
def test_parts_of_a_chunk_on_a_cpu_change_no_number(monkeypatch: pytest.MonkeyPatch, cached: int) -> None:
    whole = run_single()
    monkeypatch.setattr(logprobs, "CACHED", cached)
    parts = run_single()
    assert all(torch.equal(one, other) for one, other in zip(whole, parts, strict=True) if one is not None)


def test_the_entropy_needs_no_other_chunk_on_a_cpu() -> None:
    """Its exponentials are made for a part of the chunk that stays in the processor's cache."""
    hidden, weight, targets = torch.randn(64, 4), torch.randn(8 * logprobs.CACHED // 64, 4), torch.zeros(64).long()
    peaks = []
    for with_entropy in (False, True):
        with torch.no_grad(), LiveBytes() as live:
            linear_token_logprobs(
                hidden, weight, targets, temperature=0.7, vocab_size=len(weight), chunk=64, with_entropy=with_entropy
            )
        peaks.append(live.peak)
    assert peaks[0] > 8 * logprobs.CACHED * 4 and peaks[1] < peaks[0] + 1.1 * logprobs.CACHED * 4


def test_bf16_hidden_states_give_fp32_logprobs_and_bf16_gradients() -> None:
    p = problem(torch.bfloat16)
    hidden, weight = p["hidden"].requires_grad_(), p["weight"].requires_grad_()
    got, _ = linear_token_logprobs(hidden, weight, p["targets"], temperature=1.0, vocab_size=VOCAB, chunk=4)
    assert got.dtype == torch.float32
    # Bit for bit the fp32 softmax of the bf16 logits: nothing after the projection is in bf16.
    logits = (hidden.detach() @ weight.detach().t()).float()
    torch.testing.assert_close(got, torch.log_softmax(logits, -1).gather(1, p["targets"][:, None])[:, 0])
    got.backward(p["grad_logprobs"].float())
    assert hidden.grad is not None and hidden.grad.dtype == weight.grad.dtype == torch.bfloat16


def test_extreme_logits_stay_finite() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0], [-1e4, -1e4, -1e4]], requires_grad=True)
    got, entropy = linear_token_logprobs(
        logits, torch.eye(3), torch.tensor([1, 2]), temperature=1.0, vocab_size=3, chunk=1, with_entropy=True
    )
    assert entropy is not None
    torch.testing.assert_close(got, torch.tensor([-2e4, -torch.log(torch.tensor(3.0))]))
    (got.sum() + entropy.sum()).backward()
    assert logits.grad is not None and logits.grad.isfinite().all()


def test_only_one_chunk_of_logits_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward make no fp32 copy beyond [chunk, vocabulary]."""
    largest = 0
    original = logprobs._scale

    def watched(*args: Any) -> torch.Tensor:
        nonlocal largest
        scaled = original(*args)
        largest = max(largest, scaled.numel())
        return scaled

    monkeypatch.setattr(logprobs, "_scale", watched)
    p = problem(torch.float32)
    hidden = p["hidden"].requires_grad_()
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t.numel()), t)[1], lambda t: t):
        got, entropy = linear_token_logprobs(
            hidden, p["weight"], p["targets"], temperature=1.0, vocab_size=VOCAB, chunk=4, with_entropy=True
        )
        assert entropy is not None
        (got.sum() + entropy.sum()).backward()
    assert largest == 4 * VOCAB
    assert max(saved) <= max(ROWS * HIDDEN, VOCAB * HIDDEN)
