"""The directory that `python -m examples.quickstart` makes: reproducible, loadable, all or nothing."""

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import examples.quickstart.build as build_module
from examples.quickstart.__main__ import main
from examples.quickstart.additions_task import AdditionsTask
from examples.quickstart.build import build_assets
from examples.quickstart.demonstrations import Demonstration, read_problems
from examples.quickstart.problems import Addition, solutions
from examples.quickstart.tokenizer import prompt_text
from examples.quickstart.warm_start import WarmStart, encode_corpus
from megarl.config.loading.load import load_config
from megarl.models.hf.read_config import load_info
from tests.support.checkout import ROOT

SIZE = WarmStart(steps=3, batch=8, warmup=1, threads=1)
CONFIG = ROOT / "examples/rl/configs/quickstart_cpu.yaml"


def prompt_ids(tokenizer: AutoTokenizer, problem: str) -> list[int]:
    return tokenizer(prompt_text(tokenizer, problem), add_special_tokens=False)["input_ids"]


def contents(root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("quickstart") / "assets"
    assert build_assets(out, seed=3, size=SIZE)
    return out


@pytest.fixture(scope="module")
def tokenizer(assets: Path) -> AutoTokenizer:
    return AutoTokenizer.from_pretrained(assets / "model")


def test_another_seed_gives_other_bytes(assets: Path, tmp_path: Path) -> None:
    build_assets(tmp_path / "other", seed=4, size=SIZE)
    first, other = contents(assets), contents(tmp_path / "other")
    for name in ("train.jsonl", "heldout.jsonl", "warm_start.jsonl", "model/model.safetensors"):
        assert first[name] != other[name], name


def test_complete_directory_is_left_alone_and_a_damaged_one_made_again(assets: Path, tmp_path: Path) -> None:
    """The same seed gives the same bytes."""
    out = tmp_path / "assets"
    shutil.copytree(assets, out)
    stamp = (out / "assets.json").stat().st_mtime_ns
    assert not build_assets(out, seed=3, size=SIZE)
    assert (out / "assets.json").stat().st_mtime_ns == stamp
    (out / "heldout.jsonl").write_text("")
    assert build_assets(out, seed=3, size=SIZE)
    assert contents(out) == contents(assets)
    assert [path.name for path in tmp_path.iterdir()] == ["assets"]


def test_failure_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> float:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(build_module, "warm_start", broken)
    with pytest.raises(RuntimeError, match="out of luck"):
        build_assets(tmp_path / "assets", size=SIZE)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_of_the_user_is_not_touched(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with caplog.at_level(logging.ERROR):
        assert main(["--out", str(tmp_path), "--warm-start-steps", "1"]) == 2
    assert "not made by examples.quickstart" in caplog.text
    assert contents(tmp_path) == {"thesis.tex": b"years of work"}


def test_files_are_what_the_config_reads(assets: Path) -> None:
    config = load_config(CONFIG, [])
    (heldout,) = config.evaluation.sets
    assert heldout.limit is None or heldout.limit >= 500
    for name in (config.data.path.name, heldout.path.name):
        rows = [json.loads(line) for line in (assets / name).read_text().splitlines()]
        assert len(rows) >= 500
        assert all(set(row) == {"problem", "answer"} and row["answer"].isdigit() for row in rows)
    assert (assets / config.model.path.name / "model.safetensors").is_file()
    assert config.model.shape and load_info(ROOT / config.model.shape) == load_info(assets / "model")


def test_written_files_are_checked_for_leaks(assets: Path, tmp_path: Path) -> None:
    for name in ("train", "heldout", "warm_start"):
        (tmp_path / f"{name}.jsonl").write_text((assets / f"{name}.jsonl").read_text())
    AdditionsTask().check(read_problems(tmp_path))
    leak = (tmp_path / "heldout.jsonl").read_text().splitlines()[0]
    with (tmp_path / "train.jsonl").open("a") as file:
        file.write(leak + "\n")
    with pytest.raises(AssertionError, match="train and heldout share"):
        AdditionsTask().check(read_problems(tmp_path))


@pytest.mark.parametrize("text", ["ones 7+5=12, tens 4+3+1=8, \\boxed{82}", "  naïve\t中文 🙂\n\n1234", ""])
def test_tokenizer_round_trip(tokenizer: AutoTokenizer, text: str) -> None:
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text


def test_digits_are_single_tokens(tokenizer: AutoTokenizer) -> None:
    tokens = tokenizer.convert_ids_to_tokens(tokenizer("\\boxed{182}")["input_ids"])
    assert [token for token in tokens if any(digit in token for digit in "0123456789")] == ["1", "8", "2"]


def test_chat_template_and_special_tokens(assets: Path, tokenizer: AutoTokenizer) -> None:
    problem = Addition(47, 35).problem
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": problem}], add_generation_prompt=True, tokenize=False
    )
    assert text == "<|im_start|>user\nWhat is 47 + 35?<|im_end|>\n<|im_start|>assistant\n"
    ids = prompt_ids(tokenizer, problem)
    assert tokenizer.decode(ids) == text
    assert ids.count(tokenizer.eos_token_id) == 1  # special tokens in the text are tokens, not characters
    assert tokenizer.eos_token == "<|im_end|>" != tokenizer.pad_token
    assert GenerationConfig.from_pretrained(assets / "model").eos_token_id == tokenizer.eos_token_id


def test_model_loads_and_splits_over_two_ranks(assets: Path, tokenizer: AutoTokenizer) -> None:
    model = AutoModelForCausalLM.from_pretrained(assets / "model")
    config = AutoConfig.from_pretrained(assets / "model")
    assert config.model_type == "qwen3" and config.vocab_size == len(tokenizer)
    for size in (config.vocab_size, config.num_attention_heads, config.num_key_value_heads, config.intermediate_size):
        assert size % 2 == 0
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    logits = model(torch.tensor([prompt_ids(tokenizer, "What is 10 + 10?")])).logits
    assert logits.isfinite().all() and logits.shape[-1] == config.vocab_size


def test_only_the_response_and_its_end_are_learned(tokenizer: AutoTokenizer) -> None:
    item = Addition(47, 35)
    prompt = prompt_text(tokenizer, item.problem)
    ids, labels = encode_corpus(tokenizer, [Demonstration(prompt, (text,)) for text in solutions(item)])
    assert ids.shape == labels.shape and len(ids) == 4
    learned = labels[0][labels[0] != -100].tolist()
    assert tokenizer.decode(learned) == item.solution(careful=True) + "<|im_end|>"
    start = len(prompt_ids(tokenizer, item.problem))
    assert (labels[:, :start] == -100).all() and (labels[:, start] != -100).all()
    config = load_config(CONFIG, [])
    assert (labels != -100).sum(1).max() <= config.sampling.max_tokens
    assert config.rollout.max_model_len is None or ids.shape[1] <= config.rollout.max_model_len
