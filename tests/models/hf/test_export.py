"""Export is bit-identical to the files that were loaded, through every layout, and owned by exactly one rank each."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from megarl.models.hf.export import copy_side_files, exported_config
from tests.support.models.family_models import MOE
from tests.support.models.tensors import read_hf, same_bits
from tests.support.worlds.world import World

pytestmark = pytest.mark.world

EXPORTED = ("deepseek_v3", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")
LAYOUTS: list[tuple[int, dict[str, Any], tuple[str, ...]]] = [
    (2, {}, ("qwen3",)),
    (2, {"tensor": 2}, ("llama", "qwen3", "mistral", "deepseek_v3")),
    (2, {"pipeline": 2, "virtual_pipeline": 2}, ("qwen2",)),
    (2, {"expert": 2}, ("qwen3_moe", "mixtral", "moonlight")),
    (4, {"tensor": 4, "sequence": True}, ("qwen2", "qwen3")),  # more ranks than key/value heads
    (4, {"tensor": 2, "pipeline": 2}, ("qwen2", "llama")),
    (4, {"tensor": 2, "sequence": True, "expert": 2}, ("qwen3_moe", "mixtral", "deepseek_v3")),
    (4, {"tensor": 2, "sequence": True, "expert": 2, "expert_tensor": 1}, ("qwen3_moe",)),
    (4, {"pipeline": 2, "expert": 2}, ("qwen3_moe",)),
]


def _cases() -> list[Any]:
    cases = []
    for ranks, sizes, fast in LAYOUTS:
        for family in MOE if "expert" in sizes else EXPORTED:
            name = "-".join([family, *(f"{key}{value}" for key, value in sizes.items())])
            marks = [] if family in fast else [pytest.mark.slow]
            cases.append(pytest.param(family, ranks, sizes, id=name, marks=marks))
    return cases


@pytest.mark.parametrize(("family", "ranks", "sizes"), _cases())
def test_round_trip_is_bit_identical(
    family: str,
    ranks: int,
    sizes: dict[str, Any],
    world: Callable[[int], World],
    model_dir: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    if family in MOE and sizes.get("tensor", 1) > 1:
        sizes = {**sizes, "sequence": True}
    out = tmp_path / "hf"
    results = world(ranks).run(
        "tests.support.ranks.models.models:export",
        model_dir=str(model_dir(family)),
        out=str(out),
        shard_bytes=100_000,
        **sizes,
    )
    manifest = results[0][0]
    assert all(other == manifest for other, _ in results)
    for rank, (_, owned) in enumerate(results):
        assert owned == [tensor.name for tensor in manifest if tensor.owner == rank]

    before, after = read_hf(model_dir(family)), read_hf(out)
    assert set(before) == set(after) == {tensor.name for tensor in manifest}
    assert [name for name in before if not same_bits(before[name], after[name])] == []
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(after)
    assert not list(tmp_path.glob(".*"))  # nothing partial stays


def test_buffers_stay_fp32_and_extra_layers_stay_out(
    world: Callable[[int], World], model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    """The expert bias decides between nearly equal experts: a bf16 export and a bf16 trainer keep all its bits."""
    source = tmp_path / "source"
    shutil.copytree(model_dir("deepseek_v3"), source)
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.4.eh_proj.weight"] = torch.ones(2, 2)
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))

    options = {"dtype": "bfloat16", "precision": "bf16", "tensor": 2, "sequence": True}
    world(2).run("tests.support.ranks.models.models:export", model_dir=str(source), out=str(tmp_path / "hf"), **options)
    before, after = read_hf(source), read_hf(tmp_path / "hf")
    assert set(before) - set(after) == {"model.layers.4.eh_proj.weight"}
    biases = [name for name in after if name.endswith("e_score_correction_bias")]
    assert len(biases) == 3 and all(same_bits(before[name], after[name]) for name in biases)
    assert {after[name].dtype for name in set(after) - set(biases)} == {torch.bfloat16}
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["num_nextn_predict_layers"] == 0


def test_layer_order_and_tie(world: Callable[[int], World], model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    results = world(2).run(
        "tests.support.ranks.models.models:export",
        model_dir=str(model_dir("qwen2")),
        out=str(tmp_path / "hf"),
        pipeline=2,
    )
    names = [tensor.name for tensor in results[0][0]]
    assert names[0] == "model.embed_tokens.weight" and names[-1] == "model.norm.weight"
    assert "lm_head.weight" not in names
    layers = [int(name.split(".")[2]) for name in names if ".layers." in name]
    assert layers == sorted(layers)
    assert {tensor.owner for tensor in results[0][0]} == {0, 1}


def test_the_export_is_a_model(world: Callable[[int], World], model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    """Plain `transformers` loads a bf16 export of fp32 weights, with its config and tokenizer."""
    out, source = tmp_path / "hf", model_dir("qwen3")
    world(2).run(
        "tests.support.ranks.models.models:export", model_dir=str(source), out=str(out), dtype="bfloat16", tensor=2
    )
    assert [file.name for file in out.glob("*.safetensors")] == ["model.safetensors"]
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    before, after = read_hf(source), read_hf(out)
    assert all(same_bits(before[name].bfloat16(), after[name]) for name in before)
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.dtype == torch.bfloat16
    assert AutoTokenizer.from_pretrained(out).chat_template is not None
    assert model.generation_config.eos_token_id


def test_all_files_but_weights_are_copied(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    names = ("additional_chat_templates/tool_use.jinja", "vocab.json", "original/weights.pth", ".cache/x", "a/b.onnx")
    for name in names:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(name)
    (source / "config.json").write_text("{}")
    target.mkdir()
    copy_side_files(source, target, torch.float32)
    copied = sorted(str(path.relative_to(target)) for path in target.rglob("*") if path.is_file())
    assert copied == ["additional_chat_templates/tool_use.jinja", "config.json", "vocab.json"]


@pytest.mark.parametrize("keys", [("dtype",), ("torch_dtype",), ("dtype", "torch_dtype"), ()])
def test_config_names_the_dtype_of_the_exported_weights(keys: tuple[str, ...]) -> None:
    """Also where one of the two keys that readers know is null, or says what the source's weights were."""
    for before in ("bfloat16", None):
        config = exported_config(dict.fromkeys(keys, before), torch.float32)
        assert config == dict.fromkeys(keys or ("dtype",), "float32")


def test_an_existing_directory_is_not_overwritten(
    world: Callable[[int], World], model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    out = tmp_path / "hf"
    out.mkdir()
    (out / "precious").write_text("")
    with pytest.raises(AssertionError, match="exists already"):
        world(2).run(
            "tests.support.ranks.models.models:export", model_dir=str(model_dir("qwen3")), out=str(out), tensor=2
        )
    assert [file.name for file in out.iterdir()] == ["precious"]
