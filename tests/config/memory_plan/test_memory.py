"""The plan's bytes against a trainer that is really built and updated, per family and layout."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.config.derived.pools import trainer_layout
from megarl.config.memory_plan import parameters
from megarl.config.memory_plan.memory import forward_bytes
from megarl.config.memory_plan.parameters import TrainerRank
from megarl.models.hf.read_config import load_info
from megarl.models.megatron.layout import Layout
from megarl.trainer.logprobs import linear_token_logprobs
from tests.support.measures.live_bytes import LiveBytes
from tests.support.models.tiny import make_tiny_model
from tests.support.ranks.training import memory
from tests.support.trainer.configs import config, tree

SELECTIVE: dict[str, Any] = {"recompute_granularity": "selective"}

# family, trainer.parallel, trainer.precision, further changes
Case = tuple[str, dict[str, Any], str, dict[str, Any]]
CASES: list[Case] = [
    ("qwen3", {}, "fp32", {}),
    ("llama", {"tensor": 2}, "bf16", {}),
    ("qwen2", {"tensor": 2, "sequence": True}, "bf16", {"trainer__optimizer__distributed": False}),
    ("tied", {"pipeline": 2}, "bf16", {}),
    ("qwen3", {"pipeline": 2, "virtual_pipeline": 2}, "bf16", {"megatron__ddp": {"overlap_grad_reduce": True}}),
    ("qwen3_moe", {"expert": 2}, "bf16", {}),
    ("qwen3_moe", {"tensor": 2, "sequence": True}, "fp32", {}),
    ("llama", {}, "bf16", {"megatron__ddp": {"grad_reduce_in_fp32": False}}),
    ("qwen3_moe", {"expert": 2}, "fp32", {"megatron__transformer": SELECTIVE}),
    ("mistral", {"tensor": 2}, "fp32", {}),
    ("mixtral", {"expert": 2}, "bf16", {}),
    ("qwen2_5_vl", {"tensor": 2, "sequence": True}, "bf16", {}),
    ("qwen3_vl", {"pipeline": 2}, "fp32", {"model__vision__train": "all"}),
    ("deepseek_v3", {"expert": 2}, "bf16", {}),
    ("deepseek_v3", {"tensor": 2, "sequence": True}, "fp32", {}),
    ("glm4_moe", {"tensor": 2, "sequence": True}, "bf16", {}),
    ("qwen3_5", {"tensor": 2, "sequence": True}, "fp32", {}),
    ("qwen3_5_moe", {"expert": 2}, "bf16", {}),
    ("llama", {}, "fp32", {"megatron__transformer": SELECTIVE | {"recompute_modules": ["mlp"]}}),
    ("llama", {}, "bf16", {"trainer__recompute": "selective"}),
    ("qwen2", {"tensor": 2}, "fp32", {"trainer__recompute": "full"}),
    ("qwen3", {"tensor": 2, "sequence": True}, "bf16", {"trainer__recompute": 2}),
    ("qwen3_moe", {}, "bf16", {"megatron__transformer": SELECTIVE | {"recompute_modules": ["moe"]}}),
    ("qwen3", {}, "bf16", {"megatron__transformer": SELECTIVE | {"recompute_modules": ["layernorm", "core_attn"]}}),
    ("qwen3", {"context": 2}, "fp32", {}),
    ("qwen3", {"context": 2}, "bf16", {}),
    ("llama", {"context": 2}, "bf16", {}),
    ("deepseek_v3", {"context": 2}, "bf16", {}),
    ("qwen3_moe", {"context": 2, "expert": 2}, "fp32", {"trainer__recompute": "selective"}),
]
WIDE: list[Case] = [
    ("llama", {"tensor": 2, "pipeline": 2}, "bf16", {}),
    ("qwen3_moe", {"expert": 2, "pipeline": 2}, "bf16", {}),
    ("qwen3_moe", {"tensor": 2, "sequence": True, "expert": 4, "expert_tensor": 1}, "bf16", {}),
    ("tied", {}, "bf16", {}),
    ("deepseek_v3", {"tensor": 2, "sequence": True, "expert": 2, "expert_tensor": 1}, "bf16", {}),
    ("deepseek_v3", {"tensor": 2, "sequence": True}, "fp32", {"megatron__transformer": SELECTIVE}),
    ("qwen3_moe", {"context": 2, "tensor": 2, "sequence": True, "expert": 4, "expert_tensor": 1}, "bf16", {}),
    ("llama", {"context": 4}, "fp32", {}),
    ("mistral", {"context": 4}, "fp32", {}),
    ("llama", {"context": 2, "pipeline": 2}, "bf16", {}),
]


def assert_plan_equals_measurement(world: Any, size: int, model: Path, case: Case) -> None:
    _, parallel, precision, more = case
    changes: dict[str, Any] = {
        "trainer__gpus": size,
        "trainer__parallel": parallel,
        "trainer__precision": precision,
        "trainer__micro_batch_tokens": memory.TOKENS,
        "sampling__max_tokens": 180,
        **more,
    }
    planned, info = config(model, **changes), load_info(model)
    layout = trainer_layout(planned.trainer.parallel, size)
    stages = layout.pipeline
    micro_batches = 1 if stages == 1 else 2 * stages
    ranks = world(size).run(
        "tests.support.ranks.training.memory:measure", tree=tree(model, **changes), micro_batches=micro_batches
    )
    for stage in range(stages):
        real = [rank for rank in ranks if rank["stage"] == stage]
        rank = TrainerRank.of(planned, info, layout, fused=False)
        state = rank.state_bytes(stage)
        for kind in ("weights", "gradients", "optimizer"):
            measured = max(rank[kind] for rank in real)
            assert getattr(state, kind) == pytest.approx(measured, rel=0.01), f"{kind} of stage {stage}"
        expected = rank.peak_bytes(stage) + rank.recompute_bytes(stage)
        measured = max(rank["activations"] for rank in real)
        assert expected == pytest.approx(measured, rel=0.15), f"activations of stage {stage}"


@pytest.mark.world
@pytest.mark.parametrize("case", CASES, ids=str)
def test_plan_equals_built_trainer(world: Any, models: dict[str, Path], case: Case) -> None:
    assert_plan_equals_measurement(world, 2, models[case[0]], case)


@pytest.mark.slow
@pytest.mark.world
@pytest.mark.parametrize("case", WIDE, ids=str)
def test_plan_equals_built_trainer_on_four_ranks(world: Any, models: dict[str, Path], case: Case) -> None:
    assert_plan_equals_measurement(world, 4, models[case[0]], case)


VOCABULARY, HIDDEN, ROWS, CHUNK = 8192, 64, 256, 64


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("entropy", ["measured", "weighed"])
def test_one_chunk_of_logits(tmp_path: Path, precision: str, entropy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """This is the head's largest memory, forward alone and with backward; the vocabulary outweighs all else here."""
    monkeypatch.setattr("megarl.trainer.logprobs.CACHED", CHUNK * VOCABULARY)  # a chunk at a time, as on a GPU
    monkeypatch.setattr(parameters, "LOGPROB_CHUNK_ROWS", CHUNK)
    model = make_tiny_model(tmp_path / "model", "qwen3", vocab_size=VOCABULARY, hidden_size=HIDDEN)
    planned = config(
        model,
        trainer__precision=precision,
        algorithm__entropy_coef=0.1 if entropy == "weighed" else 0.0,
    )
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    hidden = torch.randn(ROWS, HIDDEN, dtype=dtype, requires_grad=True)
    weight = torch.randn(VOCABULARY, HIDDEN, dtype=dtype, requires_grad=True)
    targets = torch.randint(VOCABULARY, (ROWS,))
    options: dict[str, Any] = dict(temperature=0.7, vocab_size=VOCABULARY, chunk=CHUNK)
    with torch.no_grad(), LiveBytes() as forward:
        linear_token_logprobs(hidden, weight, targets, **options)
    with LiveBytes() as update:
        logprobs, found = linear_token_logprobs(hidden, weight, targets, with_entropy=True, **options)
        (logprobs.sum() + (found.sum() if found is not None and entropy == "weighed" else 0.0)).backward()
    for live, whole in ((forward, False), (update, True)):
        expected = TrainerRank.of(planned, load_info(model), Layout(), fused=False).logits_bytes(update=whole)
        assert expected == pytest.approx(live.peak, rel=0.05), "update" if whole else "log-probs"


FORWARD: list[tuple[str, str, dict[str, Any]]] = [
    ("qwen3", "fp32", {}),
    ("llama", "bf16", {"intermediate_size": 512}),  # as in large models, the MLP needs more than attention
    ("qwen3_moe", "bf16", {}),
    ("mixtral", "fp32", {"intermediate_size": 192}),
    ("deepseek_v3", "bf16", {}),
    ("qwen3_5", "fp32", {}),
]


@pytest.mark.world
@pytest.mark.parametrize(("family", "precision", "sizes"), FORWARD)
def test_the_forward_pass_of_one_layer(
    world: Any, tmp_path: Path, family: str, precision: str, sizes: dict[str, int]
) -> None:
    """A log-prob pass whose logits weigh nothing: what lives at one time is one layer's, as far as an estimate goes."""
    model = make_tiny_model(tmp_path / "model", family, num_hidden_layers=4, **sizes)
    changes: dict[str, Any] = {
        "trainer__precision": precision,
        "trainer__micro_batch_tokens": memory.TOKENS,
        "sampling__max_tokens": 180,
    }
    [measured] = world(1).run("tests.support.ranks.training.memory:forward_peak", tree=tree(model, **changes))
    expected = forward_bytes(TrainerRank.of(config(model, **changes), load_info(model), Layout(), fused=False))
    assert 0.8 <= expected / measured <= 1.4, (expected, measured)
