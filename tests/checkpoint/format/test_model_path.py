"""`model.path` may be a converted directory: config, plan, tokenizer, engine arguments and the policy take it."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from megarl.chat.tokenize import generation_config_eos, load_tokenizer
from megarl.cli import main
from megarl.config.loading.load import load_config
from megarl.models.hf.model_files import hf_files, megatron_step
from megarl.models.hf.read_config import load_info
from megarl.rollout.engine.engine_args import engine_args
from tests.support.checkpoints.converter import convert
from tests.support.runs.run import tiny_config
from tests.support.worlds.world import World


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A config file whose model is a converted checkpoint, and the config."""
    root = tmp_path_factory.mktemp("run")
    config = tiny_config(root)
    convert("import", "--hf", root / "model", "--out", root / "megatron")
    config["model"]["path"] = str(root / "megatron")
    (root / "config.yaml").write_text(yaml.safe_dump(config))
    return root / "config.yaml", config


def test_everything_but_the_weights_is_found(converted: tuple[Path, dict[str, Any]]) -> None:
    path, config = converted
    root = Path(config["model"]["path"])
    for each in (root, root / "release"):
        assert megatron_step(each) == root / "release" and hf_files(each) == root / "release/hf"
        assert load_info(each) == load_info(path.parent / "model")
        assert load_tokenizer(each).chat_template == load_tokenizer(path.parent / "model").chat_template
        assert generation_config_eos(each) == generation_config_eos(path.parent / "model") != set()
    arguments = engine_args(load_config(path, []), cuda=False, max_model_len=64)
    assert arguments["model"] == str(root / "release/hf") and arguments["load_format"] == "dummy"
    overrides = ["rollout.load_weights=true"]
    wanted = engine_args(load_config(path, overrides), cuda=False, max_model_len=64)
    assert wanted["load_format"] == "dummy", "vLLM cannot read a Megatron checkpoint"
    plain = load_config(path, [f"model.path={path.parent / 'model'}", *overrides])
    assert "load_format" not in engine_args(plain, cuda=False, max_model_len=64)


def test_plan(converted: tuple[Path, dict[str, Any]], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path, config = converted
    assert main.main(["plan", "--config", str(path)]) == 0
    broken = tmp_path / "broken"
    shutil.copytree(config["model"]["path"], broken)
    (broken / "release/.metadata").unlink()
    assert main.main(["plan", "--config", str(path), f"model.path={broken}"]) == 2
    assert "model.path: " in (err := capsys.readouterr().err) and "not a complete checkpoint" in err
    shutil.rmtree(broken / "release")
    assert main.main(["plan", "--config", str(path), f"model.path={broken}"]) == 2
    assert "says release, but" in capsys.readouterr().err


def test_engines_alone_cannot_load_it(
    converted: tuple[Path, dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    _, config = converted
    arguments = ["eval", "--model", config["model"]["path"], "--data", config["data"]["path"], "--reward", "math"]
    assert main.main(arguments) == 2
    assert "convert.py export --megatron" in capsys.readouterr().err


@pytest.mark.world
@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("qwen3", {}),
        ("llama", {"tensor": 2, "sequence": True}),
        ("qwen2", {"pipeline": 2}),
        ("qwen3_moe", {"expert": 2}),
    ],
    ids=["tp1", "tp2", "pp2", "ep2"],
)
def test_the_policy_starts_from_it(
    family: str, layout: dict[str, Any], model_dir: Callable[[str], Path], world: Callable[[int], World], tmp_path: Path
) -> None:
    """Policy and reference are the same, bit for bit, as those from the Hugging Face directory."""
    convert("import", "--hf", model_dir(family), "--out", tmp_path / "m")
    digests = [
        world(2).run("tests.support.ranks.checkpoints.checkpoints:policy_digest", model_dir=str(path), layout=layout)
        for path in (model_dir(family), tmp_path / "m")
    ]
    assert digests[0] == digests[1]
