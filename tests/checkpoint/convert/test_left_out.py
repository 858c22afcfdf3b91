"""Layers that are in the files and not in the model: never converted, never silently."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

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
