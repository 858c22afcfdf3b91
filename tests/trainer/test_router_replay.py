"""Routers replay the experts that they are given, in forward, backward and recompute, under every layout.

The reference is plain transformers whose gates are forced to the same experts. Measured: as `test_layouts`.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from megarl.queue.routes import RoutesSpec
from megarl.trainer.batch import TrainSample, check_routes
from tests.support.losses.rl_problem import LAYERS, plain_gradients_of, plain_loss
from tests.support.models.tensors import merge, worst
from tests.support.models.tiny import make_tiny_model

pytestmark = pytest.mark.world

GRADIENT = 1e-5
FOUND = 1e-2  # a mistake moves a gradient by at least this
EXPERTS, TOPK = 4, 2
SP2 = {"tensor": 2, "sequence": True, "expert_tensor": 1}
PP2 = {"pipeline": 2}
CP2 = {"context": 2, "expert": 2}
RECOMPUTED = {"trainer__recompute": "full"}
Case = tuple[int, dict[str, Any], dict[str, Any]]
CASES: list[Case] = [
    (1, {}, {"packed": False}),
    (2, SP2, RECOMPUTED),
    (2, PP2, RECOMPUTED),
    (2, {"expert": 2}, {}),
    (2, CP2, RECOMPUTED),
]
EVERYWHERE: list[Case] = [
    (1, {}, RECOMPUTED),
    (2, SP2, {}),
    (2, PP2, {"packed": False}),
    (2, {"pipeline": 2, "virtual_pipeline": 2}, RECOMPUTED),
    (2, {"expert": 2}, RECOMPUTED | {"packed": False}),
    (2, {}, {}),
    (4, {"expert": 2, **SP2}, RECOMPUTED),
    (4, {**CP2, **SP2}, RECOMPUTED),
    (4, {**CP2, **PP2}, {"packed": False}),
    (4, {**SP2, **PP2}, RECOMPUTED),
    (4, {"expert": 2, "pipeline": 2, "virtual_pipeline": 2}, RECOMPUTED),
]


def ids(case: Case) -> str:
    ranks, layout, options = case
    return "-".join([str(ranks), *(f"{key}{value}" for key, value in layout.items()), *options])


def random_routes(samples: list[TrainSample], seed: int = 5) -> list[torch.Tensor]:
    """Experts that no weights would choose: [tokens, layers, K] of each sample."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(s.length, LAYERS, EXPERTS, generator=generator).topk(TOPK).indices for s in samples]


@pytest.fixture(scope="module")
def problem(
    model_dir: Callable[[str], Path], samples_of: Callable[[str], list[TrainSample]]
) -> tuple[Path, list[TrainSample]]:
    return model_dir("moe"), samples_of("moe")


@pytest.fixture(scope="module")
def replayed(world: Callable[[int], Any], problem: tuple[Path, list[TrainSample]]) -> Callable[..., dict[str, Any]]:
    """`replayed(ranks, layout, routes, **options)`: gradients and log-probs of all ranks."""
    directory, samples = problem

    def get(ranks: int, layout: dict[str, Any], routes: list[torch.Tensor], **options: Any) -> dict[str, Any]:
        arguments = {"model_dir": directory, "layout": layout, "samples": samples, "routes": routes, **options}
        results = world(ranks).run("tests.support.ranks.models.routes:replayed", timeout=240, **arguments)
        assert not any(result["left"] for result in results)
        logprobs = {index: value for result in results for index, value in result["logprobs"].items()}
        return {"gradients": merge([result["gradients"] for result in results]), "logprobs": logprobs}

    return get


@pytest.fixture(scope="module")
def plain(problem: tuple[Path, list[TrainSample]]) -> dict[str, torch.Tensor]:
    """Gradients of plain transformers whose gates give the experts of `random_routes`, by the rest of their code."""
    directory, samples = problem
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    routes, sample_number = random_routes(samples), 0

    def force(layer: int) -> Callable[..., Any]:
        def hook(module: torch.nn.Module, args: Any, output: Any) -> Any:
            logits, _, _ = output
            experts = routes[sample_number][:, layer]
            return logits, logits.float().gather(1, experts).softmax(-1), experts

        return hook

    for number, layer in enumerate(model.model.layers):
        layer.mlp.gate.register_forward_hook(force(number))
    tokens = sum(sample.trained_tokens for sample in samples)
    total = torch.zeros(())
    for sample_number, sample in enumerate(samples):
        if sample.trained_tokens:
            total = total + plain_loss(model, [sample]) * sample.trained_tokens
    return plain_gradients_of(model, total / tokens)


def check(replayed: Callable[..., Any], problem: Any, plain: dict[str, torch.Tensor], case: Case) -> None:
    ranks, layout, options = case
    got = replayed(ranks, layout, random_routes(problem[1]), **options)
    assert worst(got["gradients"], plain) <= GRADIENT


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_gradients_are_those_of_the_given_experts(
    replayed: Callable[..., Any], problem: Any, plain: dict[str, torch.Tensor], case: Case
) -> None:
    check(replayed, problem, plain, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", EVERYWHERE, ids=ids)
def test_gradients_are_those_of_the_given_experts_everywhere(
    replayed: Callable[..., Any], problem: Any, plain: dict[str, torch.Tensor], case: Case
) -> None:
    check(replayed, problem, plain, case)


MISTAKES: dict[str, Callable[[list[torch.Tensor]], list[torch.Tensor]]] = {
    "rows shifted by one": lambda routes: [each.roll(1, 0) for each in routes],
    "layers in another order": lambda routes: [each.flip(1) for each in routes],
    "another request's rows": lambda routes: [
        torch.cat([other, each])[: len(each)] for each, other in zip(routes, routes[1:] + routes[:1], strict=True)
    ],
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(
    replayed: Callable[..., Any], problem: Any, plain: dict[str, torch.Tensor], mistake: str
) -> None:
    got = replayed(1, {}, MISTAKES[mistake](random_routes(problem[1])))
    assert worst(got["gradients"], plain) > FOUND


def test_stale_experts_in_the_backward_pass_are_found(replayed: Callable[..., Any], problem: Any) -> None:
    """With several micro-batches in flight the last forward pass was another one's, here of the same length."""
    samples = [replace(problem[1][3], key=f"0:{number}") for number in range(4)]
    even = {"samples": samples, "packed": False, **RECOMPUTED}
    right, wrong = (replayed(2, PP2, random_routes(samples), stale=stale, **even) for stale in (False, True))
    assert worst(wrong["gradients"], right["gradients"]) > FOUND


@pytest.fixture(scope="module")
def recorded(
    world: Callable[[int], Any], model_dir: Callable[[str], Path], samples_of: Callable[[str], list[TrainSample]]
) -> Callable[..., dict[str, Any]]:
    """`recorded(ranks, model, layout, **options)`: experts of the old pass, and gradients with other routers."""

    def get(ranks: int, model: str, layout: dict[str, Any], **options: Any) -> dict[str, Any]:
        arguments = {"model_dir": model_dir(model), "layout": layout, "samples": samples_of(model), **options}
        results = world(ranks).run("tests.support.ranks.models.routes:recorded", timeout=240, **arguments)
        assert not any(result["left"] for result in results)
        experts = {key: value.long().sort(-1).values for each in results for key, value in each["experts"].items()}
        return {"gradients": merge([result["gradients"] for result in results]), "experts": experts}

    return get


@pytest.mark.parametrize(
    "case",
    [
        (2, "moe", SP2, {}),
        (2, "latent", PP2, {}),
        (2, "moe", CP2, {"wide": True}),
        pytest.param((2, "moe", {"expert": 2}, {}), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_updates_replay_the_experts_of_the_old_logprob_pass(recorded: Callable[..., Any], case: Any) -> None:
    """In between the routers' weights have changed, so that they would choose others. References record nothing."""
    ranks, model, layout, options = case
    got, one = recorded(ranks, model, layout, **options), recorded(1, model, {})
    assert got["experts"].keys() == one["experts"].keys()
    assert all(torch.equal(value, one["experts"][key]) for key, value in got["experts"].items())
    assert worst(got["gradients"], one["gradients"]) <= GRADIENT
    assert worst(recorded(1, model, {}, replay=False)["gradients"], one["gradients"]) > FOUND


@pytest.mark.slow
def test_memory_is_flat_over_200_steps(world: Callable[[int], Any], tmp_path: Path) -> None:
    """64 bytes per token, 100 kB per step. What Megatron keeps for a backward pass would be 8 times that, each pass."""
    model = make_tiny_model(
        tmp_path / "model", "qwen3_moe", num_hidden_layers=4, num_experts=32, num_experts_per_tok=16
    )
    arguments = {"model_dir": model, "steps": 200, "warm": 40, "tokens": 1600}
    ((given, grown),) = world(1).run("tests.support.ranks.models.routes:memory_grown", timeout=600, **arguments)
    print(f"{given / 2**20:.1f} MiB of experts after step 40, and memory has grown by {grown / 2**20:.1f}")
    assert given > 15 * 2**20
    assert grown < given / 3


def sample(routes: torch.Tensor | None) -> TrainSample:
    return TrainSample("0:0", [1, 2], [3], routes_TLK=routes)


GOOD = torch.tensor([[[0, 3], [1, 2]]] * 3, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("routes", "message"),
    [
        (None, "no experts to replay"),
        (GOOD[:2], r"the shape \[2, 2, 2\], not \[3, 2, 2\]"),
        (GOOD[:, :1], r"shape \[3, 1, 2\]"),
        (GOOD[:, :, :1], r"shape \[3, 2, 1\]"),
        (torch.where(GOOD == 3, 0, GOOD), "an expert twice"),
        (torch.where(GOOD == 3, 4, GOOD), "expert 4 of 4"),
        (torch.where(GOOD == 3, -1, GOOD.to(torch.int16)), "expert -1 of 4"),
    ],
)
def test_experts_that_cannot_be_replayed_are_refused(routes: torch.Tensor | None, message: str) -> None:
    spec = RoutesSpec(layers=2, topk=2, experts=4)
    check_routes([sample(GOOD)], spec)
    with pytest.raises(ValueError, match=message) as caught:
        check_routes([sample(GOOD), replace(sample(routes), key="7:1")], spec)
    assert "7:1" in str(caught.value)
