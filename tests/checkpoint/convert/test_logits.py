"""`verify --logits` sees what a tensor-by-tensor comparison cannot: a rule that is wrong in both directions."""

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megarl.checkpoint.convert import logits
from megarl.models.architecture.architecture import ModelInfo
from megarl.models.architecture.mapping import Entry
from megarl.models.megatron import shards
from megarl.models.megatron.vision_model import VisionGPTModel
from tests.support.checkpoints.converter import convert, run, run_forked
from tests.support.models.tiny import make_tiny_model

TEXTS = (
    "--text",
    "1 + 1 = 2, and so on",
    "--text",
    "a much longer text, beyond the original context of the model " * 2,
)


def verify_logits(a: Path, b: Path, out: Path) -> tuple[int, str]:
    """Run it in a process of its own, as it sets torch.distributed up; return exit status and output."""
    code = run_forked("verify", a, b, "--logits", *TEXTS, "--tolerance", 1e-5, stdout=out)
    return code, out.read_text()


def test_log_probs_decide(model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    source = model_dir("qwen3")
    convert("import", "--hf", source, "--out", tmp_path / "right")
    code, out = verify_logits(source, tmp_path / "right", tmp_path / "log")
    assert code == 0 and "0 differing" in out and "within 1e-05" in out, out

    original = shards.expand

    def expand(rules: Any, info: ModelInfo) -> Iterator[Entry]:
        """Exchange the key and value projections of every layer."""
        other = {"k_proj": "v_proj", "v_proj": "k_proj"}
        for entry in original(rules, info):
            yield replace(
                entry, names=tuple(re.sub("[kv]_proj", lambda found: other[found[0]], n) for n in entry.names)
            )

    with mock.patch.object(shards, "expand", expand):
        convert("import", "--hf", source, "--out", tmp_path / "wrong")
        code, out = verify_logits(source, tmp_path / "wrong", tmp_path / "log")
    assert "0 differing" in out, "the mutation undoes itself"
    assert code == 1 and "ABOVE 1e-05" in out, out


def test_log_probs_of_a_model_that_sees_show_its_tower(model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    source = model_dir("qwen2_5_vl")
    convert("import", "--hf", source, "--out", tmp_path / "right")
    code, out = verify_logits(source, tmp_path / "right", tmp_path / "log")
    assert code == 0 and "0 differing" in out and "within 1e-05" in out, out

    def inverted(self: Any, patches: torch.Tensor, grids: torch.Tensor) -> Any:
        return features(self, 255 - patches, grids)

    features = VisionGPTModel._features
    with mock.patch.object(VisionGPTModel, "_features", inverted):
        code, out = verify_logits(source, tmp_path / "right", tmp_path / "log")
    assert code == 1 and "ABOVE 1e-05" in out, out


def test_nan_is_never_near() -> None:
    one = torch.zeros(2, 3)
    found = logits.compare_logprobs([one], [torch.full((2, 3), float("nan"))])
    assert found.max_delta == float("inf") and found.tokens == 2
    shifted = one.clone()
    shifted[1, 2] = 0.25
    found = logits.compare_logprobs([one], [shifted])
    assert (found.max_delta, found.same_top, found.tokens) == (0.25, 1, 2)


@pytest.mark.parametrize("arguments", [("--logits",), ("--text", "x")])
def test_text_and_logits_go_together(arguments: tuple[str, ...], model_dir: Callable[[str], Path]) -> None:
    code, _, err = run("verify", model_dir("qwen3"), model_dir("qwen3"), *arguments)
    assert code == 1 and "--logits" in err


def test_other_vocabularies(model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    other = make_tiny_model(tmp_path / "other", "qwen3", vocab_size=8192)
    code, out, err = run("verify", model_dir("qwen3"), other, "--logits", "--text", "x")
    assert code == 1 and "of another shape" in out
    assert err.startswith("convert.py: log-probs cannot be compared: the vocabulary of ") and "8,192" in err


def test_fp32_is_not_tf32(model_dir: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformer Engine multiplies fp32 as TF32 on GPUs, unless a variable says otherwise before it is loaded."""
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    monkeypatch.setattr(logits, "logprobs", lambda path, ids: [torch.zeros(len(each), 2) for each in ids])
    logits.agreement(model_dir("qwen3"), model_dir("qwen3"), ["a"])
    assert os.environ["NVIDIA_TF32_OVERRIDE"] == "0"
