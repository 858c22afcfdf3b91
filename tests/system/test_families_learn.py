"""Small models of newer families learn the quickstart's task while they generate ahead."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)

from examples.quickstart import build
from megarl.queue.dump import read_batch
from tests.support.checkout import ROOT
from tests.support.runs.run import start

pytestmark = [pytest.mark.engine, pytest.mark.slow]

GAIN = 0.25
STEPS = 20
# A dense layer, and one with eight experts.
GLM: dict[str, Any] = {
    "num_hidden_layers": 2, "moe_intermediate_size": 128, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "first_k_dense_replace": 1, "use_qk_norm": True, "attention_bias": True, "num_mtp_layers": 0,
}  # fmt: skip
QWEN: dict[str, Any] = {
    "layer_types": ["linear_attention", "linear_attention", "full_attention"], "num_hidden_layers": 3,
    "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "tie_word_embeddings": True,
}  # fmt: skip
FAMILIES = {
    "glm4_moe": (Glm4MoeConfig, Glm4MoeForCausalLM, GLM, "{expert: 2}"),
    "qwen3_5": (Qwen3_5TextConfig, Qwen3_5ForCausalLM, QWEN, "{tensor: 2}"),
}


def model_of(family: str, tokenizer: PreTrainedTokenizerFast, seed: int) -> PreTrainedModel:
    """A random model of the quickstart's width, in the place of its Qwen3."""
    torch.manual_seed(seed)
    config_class, model_class, sizes, _ = FAMILIES[family]
    config = config_class(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
        **sizes,
    )
    model = model_class(config).float()
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


@pytest.mark.parametrize("family", list(FAMILIES))
def test_it_learns_with_publications_in_mid_response(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, run_dir = tmp_path / "assets", tmp_path / "run"
    monkeypatch.setattr(build, "build_model", lambda tokenizer, seed: model_of(family, tokenizer, seed))
    assert build.build_assets(made)
    process = start(
        ROOT / "examples/rl/configs/quickstart_cpu.yaml",
        f"run.dir={run_dir}",
        f"run.steps={STEPS}",
        f"model.path={made / 'model'}",
        "model.shape=null",
        f"data.path={made / 'train.jsonl'}",
        f'evaluation.sets=[{{"name": "additions", "path": "{made / "heldout.jsonl"}"}}]',
        f"trainer.parallel={FAMILIES[family][3]}",
        "admission={mode: async, sync_interval: 1, max_staleness: 2}",
        "telemetry.dump_batches=true",
    )
    output, _ = process.communicate(timeout=1800)
    assert process.returncode == 0, output[-4000:]
    summary = json.loads((run_dir / "summary.json").read_text())
    before, after = summary["eval_before"], summary["eval_after"]
    for mode in ("greedy", "sampled"):
        assert after[mode] - before[mode] >= GAIN, (mode, before, after)
    rows = [row for step in range(STEPS) for row in read_batch(run_dir / "batches", step).trajectories]
    assert any(len({span.version for span in row.versions}) > 1 for row in rows), "no publication in mid-response"
