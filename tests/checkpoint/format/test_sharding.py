"""The scheme's keys are Megatron-Core's, and its checkpoints pass between layouts bit for bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.checkpoint.format.keys import stored_tensors
from megarl.models.hf.read_config import load_info
from megarl.models.megatron.shards import table
from tests.support.checkpoints.converter import convert
from tests.support.models.tensors import differing, read_hf
from tests.support.worlds.world import World

pytestmark = pytest.mark.world


FUSED_WITH_MLA = (
    ("self_attention.q_layernorm", "self_attention.linear_q_up_proj"),
    ("self_attention.kv_layernorm", "self_attention.linear_kv_up_proj"),
    ("pre_mlp_layernorm", "mlp.linear_fc1"),
)


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("llama", {"tensor": 2}),
        ("qwen2", {"pipeline": 2, "virtual_pipeline": 2}),
        ("qwen3", {"pipeline": 2}),
        ("qwen3_moe", {"expert": 2}),
        ("deepseek_v3", {"tensor": 2}),
    ],
)
def test_keys_and_places_are_megatrons_own(
    family: str, sizes: dict[str, Any], world: Callable[[int], World], model_dir: Callable[[str], Path]
) -> None:
    """Megatron-Core's local spec misnames the norm before a mixture of experts, and with latent attention leaves norms
    apart that Transformer Engine fuses; there Transformer Engine's names count."""
    info = load_info(model_dir(family))
    for ours, theirs in world(2).run(
        "tests.support.ranks.checkpoints.checkpoints:both_schemes", model_dir=str(model_dir(family)), **sizes
    ):
        for layer in range(info.num_layers):
            misnamed = theirs.pop(f"decoder.layers.{layer}.mlp.linear_fc1.layer_norm_weight", None)
            if misnamed is not None:
                dense = not info.is_moe_layer(layer)
                name = "mlp.linear_fc1.layer_norm_weight" if dense else "pre_mlp_layernorm.weight"
                theirs[f"decoder.layers.{layer}.{name}"] = misnamed
            for norm, linear in FUSED_WITH_MLA if info.mla else ():
                if f"decoder.layers.{layer}.{linear}.layer_norm_weight" in ours:
                    theirs[f"decoder.layers.{layer}.{linear}.layer_norm_weight"] = theirs.pop(
                        f"decoder.layers.{layer}.{norm}.weight"
                    )
        assert ours == theirs
    keys = [stored.key for parts in stored_tensors(table(info)).values() for stored in parts]
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize(
    ("family", "saved", "loaded"),
    [
        ("qwen3", {"tensor": 2}, {}),
        ("qwen2", {}, {"pipeline": 2}),
        ("llama", {"pipeline": 2, "virtual_pipeline": 2}, {"tensor": 2}),
        ("qwen3_moe", {}, {"expert": 2}),
        ("qwen3_moe", {"expert": 2}, {"tensor": 2, "sequence": True}),
    ],
)
def test_a_saved_model_loads_under_another_layout(
    family: str,
    saved: dict[str, Any],
    loaded: dict[str, Any],
    world: Callable[[int], World],
    model_dir: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    source, step = model_dir(family), tmp_path / "iter_0000001"
    world(2).run("tests.support.ranks.checkpoints.checkpoints:save", model_dir=str(source), step=str(step), **saved)
    world(2).run(
        "tests.support.ranks.checkpoints.checkpoints:load_and_export",
        checkpoint=str(step),
        model_dir=str(source),
        out=str(tmp_path / "hf"),
        **loaded,
    )
    assert differing(source, tmp_path / "hf") == []


def test_a_load_converts_the_dtype(
    world: Callable[[int], World], model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    source, step = model_dir("qwen3"), tmp_path / "iter_0000001"
    world(2).run("tests.support.ranks.checkpoints.checkpoints:save", model_dir=str(source), step=str(step), tensor=2)
    world(2).run(
        "tests.support.ranks.checkpoints.checkpoints:load_and_export",
        checkpoint=str(step),
        model_dir=str(source),
        out=str(tmp_path / "hf"),
        precision="bf16",
        dtype="bfloat16",
        pipeline=2,
    )
    before, after = read_hf(source), read_hf(tmp_path / "hf")
    assert all(torch.equal(before[name].bfloat16(), after[name]) for name in before | after)


def test_a_checkpoint_of_another_model_is_refused(
    world: Callable[[int], World], model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    step = tmp_path / "iter_0000001"
    world(2).run(
        "tests.support.ranks.checkpoints.checkpoints:save", model_dir=str(model_dir("llama")), step=str(step), tensor=2
    )
    with pytest.raises(AssertionError) as caught:
        world(2).run(
            "tests.support.ranks.checkpoints.checkpoints:load_and_export",
            checkpoint=str(step),
            model_dir=str(model_dir("qwen3")),
            out=str(tmp_path / "hf"),
            tensor=2,
        )
    assert "8 missing keys" in str(caught.value) and "self_attention.q_layernorm.weight" in str(caught.value)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_names_of_megatrons_local_spec_are_resolved(
    family: str, world: Callable[[int], World], model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    """Its norm before a mixture of experts, latent attention's own norms, its extra states: loaded by the trainer and
    by the converter."""
    source, step = model_dir(family), tmp_path / "iter_0000001"
    world(2).run(
        "tests.support.ranks.checkpoints.checkpoints:save_by_megatron", model_dir=str(source), step=str(step), expert=2
    )
    world(2).run(
        "tests.support.ranks.checkpoints.checkpoints:load_and_export",
        checkpoint=str(step),
        model_dir=str(source),
        out=str(tmp_path / "hf"),
    )
    assert differing(source, tmp_path / "hf") == []
    assert "0 differing" in convert("verify", source, step)
