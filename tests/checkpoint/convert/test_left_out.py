"""Layers that are in the files and not in the model: never converted, never silently."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megarl.models.hf.read_config import load_info
from tests.support.checkpoints.converter import convert, run
from tests.support.models.tensors import differing

NOTE = "left out: 2 tensors of the multi-token prediction layer model.layers.4.*, which is not trained"


@pytest.fixture
def predicting(model_dir: Callable[[str], Path], tmp_path: Path) -> Path:
    """A DeepSeek model whose files hold a layer that predicts a second token."""
    source = tmp_path / "predicting"
    shutil.copytree(model_dir("deepseek_v3"), source)
    tensors = load_file(source / "model.safetensors")
    tensors |= {"model.layers.4.eh_proj.weight": torch.ones(2, 2), "model.layers.4.enorm.weight": torch.ones(2)}
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (source / "config.json").write_text(json.dumps(config))
    return source


def test_every_command_says_what_is_left_out(
    predicting: Path, model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    plain = model_dir("deepseek_v3")
    for more in (["--dry-run"], []):
        out = convert("import", "--hf", predicting, "--out", tmp_path / "m", *more)
        assert out.count(NOTE) == 1
    assert f"left out {NOTE.removeprefix('left out: ')}" in " ".join(convert("inspect", predicting).split())
    for a, b in ((predicting, tmp_path / "m"), (plain, predicting)):
        out = convert("verify", a, b)
        assert "0 missing, 0 unexpected" in out and out.endswith(f"{predicting}: {NOTE}\n")
    convert("export", "--megatron", tmp_path / "m", "--hf", tmp_path / "back")
    assert differing(plain, tmp_path / "back") == []


def test_without_such_a_layer_nothing_is_said(model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    plain = model_dir("deepseek_v3")
    said = convert("import", "--hf", plain, "--out", tmp_path / "m", "--dry-run")
    assert "left out" not in said + convert("inspect", plain) + convert("verify", plain, plain)


def test_a_layer_that_the_config_does_not_announce_is_refused(predicting: Path, tmp_path: Path) -> None:
    config = json.loads((predicting / "config.json").read_text()) | {"num_nextn_predict_layers": 0}
    (predicting / "config.json").write_text(json.dumps(config))
    code, _, err = run("import", "--hf", predicting, "--out", tmp_path / "m")
    assert code == 1 and "model.layers.4.eh_proj.weight" in err


def _published(text: Path, directory: Path) -> Path:
    """Qwen3.5 as published: the text model inside one that sees, an MTP layer, experts in one tensor."""
    shutil.copytree(text, directory)
    config = json.loads((text / "config.json").read_text())
    sees = config["architectures"][0].replace("ForCausalLM", "ForConditionalGeneration")
    outer = {"architectures": [sees], "text_config": config, "vision_config": {"depth": 1}, "image_token_id": 1}
    (directory / "config.json").write_text(json.dumps(outer))
    tensors = load_file(text / "model.safetensors")
    for layer in range(config["num_hidden_layers"]):
        experts = f"model.layers.{layer}.mlp.experts"
        parts = [
            [tensors.pop(f"{experts}.{expert}.{name}_proj.weight") for name in ("gate", "up", "down")]
            for expert in range(config.get("num_experts", 0))
        ]
        if parts:
            tensors[f"{experts}.gate_up_proj"] = torch.stack([torch.cat(part[:2]) for part in parts])
            tensors[f"{experts}.down_proj"] = torch.stack([part[2] for part in parts])
    renamed = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    extra = {"mtp.fc.weight": torch.ones(2, 2), "model.visual.pos_embed.weight": torch.ones(2)}
    save_file(renamed | extra, directory / "model.safetensors", {"format": "pt"})
    return directory


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_the_text_model_of_published_files(family: str, model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    text = model_dir(family)
    files = _published(text, tmp_path / "published")
    note = "left out: 2 tensors of mtp.*, model.visual.*, which are not trained"
    out = convert("import", "--hf", files, "--out", tmp_path / "m")
    assert out.count(note) == 1
    assert note in convert("verify", files, tmp_path / "m")
    convert("export", "--megatron", tmp_path / "m", "--hf", tmp_path / "back")
    assert differing(text, tmp_path / "back") == []
    assert load_info(tmp_path / "back") == load_info(text) == load_info(files)
    written = json.loads((tmp_path / "back" / "config.json").read_text())
    assert written["architectures"] == json.loads((text / "config.json").read_text())["architectures"]
    assert "vision_config" not in written
    AutoModelForCausalLM.from_pretrained(tmp_path / "back")
