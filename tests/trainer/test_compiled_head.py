"""The passes that torch.compile fuses against the separate operations of `logprobs`, and what happens without them."""

import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._inductor.exc import InvalidCxxCompiler

from megarl.trainer import compiled_head
from megarl.trainer.compiled_head import RowTerms
from megarl.trainer.logprobs import _grad_logits, _reduce_rows, _scale
from tests.support.checkout import ROOT, environment
from tests.support.losses.head_results import results


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Each test starts with a process that can compile."""
    compiled_head._State.usable = True
    compiled_head._compiled.cache_clear()
    yield
    compiled_head._State.usable = True
    compiled_head._compiled.cache_clear()


def rows(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """A chunk of which every third target belongs to another rank."""
    generator = torch.Generator().manual_seed(3)
    logits = (8 * torch.randn(9, 40, generator=generator)).to(dtype)
    owned = torch.arange(9) % 3 != 0
    return {
        "logits": logits,
        "lse": torch.logsumexp(logits.float() / 0.7, 1),
        "local": torch.where(owned, torch.randint(40, (9,), generator=generator), 0),
        "owned": owned,
        "grad_logprobs": torch.randn(9, generator=generator),
        "grad_entropy": torch.randn(9, generator=generator),
        "entropy": torch.rand(9, generator=generator),
    }


def run_compiling(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a process of its own, in which torch.compile works whatever other tests have set."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment(TORCHDYNAMO_DISABLE="0", TORCHINDUCTOR_COMPILE_THREADS="1"),  # no pool of processes
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("with_entropy", [True, False])
@pytest.mark.parametrize("temperature", [0.7, torch.linspace(0.5, 1.3, 9)], ids=["one", "per row"])
def test_the_fused_formulas_are_those_of_the_separate_operations(
    dtype: torch.dtype, with_entropy: bool, temperature: float | torch.Tensor
) -> None:
    p, expected = rows(dtype), torch.zeros(4, 9)
    _reduce_rows(_scale(p["logits"].clone(), temperature), p["local"], expected, with_entropy)
    got = compiled_head.reduce_rows(p["logits"], p["local"], temperature, with_entropy)
    torch.testing.assert_close(got, expected)
    grad_entropy = p["grad_entropy"] if with_entropy else None
    terms = RowTerms(p["lse"], p["local"], p["owned"], p["grad_logprobs"], grad_entropy, p["entropy"])
    gradient = _grad_logits(_scale(p["logits"].clone(), temperature), terms).to(dtype)
    torch.testing.assert_close(compiled_head.differentiate_rows(p["logits"], terms, temperature), gradient)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("with_entropy", [True, False])
def test_the_compiled_head_equals_the_eager_one_with_any_number_of_rows(dtype: str, with_entropy: bool) -> None:
    """It is compiled once per dtype and kind, and once more for a single row: no other number compiles it again."""
    done = run_compiling("-m", "tests.support.losses.head_results", dtype, str(with_entropy))
    assert done.returncode == 0, done.stderr


def test_what_cannot_be_compiled_runs_eagerly_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any, **__: Any) -> Callable[..., torch.Tensor]:
        raise InvalidCxxCompiler

    monkeypatch.setattr(torch, "compile", broken)
    with caplog.at_level(logging.WARNING, compiled_head.__name__):
        got = results(True, torch.float32, 23)
    expected = results(False, torch.float32, 23)
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))
    [record] = caplog.records
    assert "InvalidCxxCompiler: No working C++ compiler" in record.message


COMPILE = """
import torch
from megarl.trainer import compiled_head
logits, local = torch.randn(5, 7), torch.arange(5)
got = compiled_head.row_stats(logits, local, 0.7, True)
assert compiled_head._State.usable and got is not None
assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
torch.testing.assert_close(got, compiled_head.reduce_rows(logits, local, 0.7, True))
"""


@pytest.mark.slow
def test_a_tiny_shape_is_really_compiled() -> None:
    done = run_compiling("-c", COMPILE)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("error", [RuntimeError, torch.AcceleratorError, TypeError])
def test_errors_of_the_gpu_and_mistakes_are_raised(monkeypatch: pytest.MonkeyPatch, error: type[Exception]) -> None:
    def broken(*_: Any) -> torch.Tensor:
        raise error("an illegal memory access was encountered")

    monkeypatch.setattr(torch, "compile", lambda function, **_: broken)
    with pytest.raises(error):
        results(True, torch.float32, 23)
    assert compiled_head._State.usable


def test_lack_of_memory_is_not_taken_for_a_failed_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(*_: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(torch, "compile", lambda function, **_: out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        results(True, torch.float32, 23)
    assert compiled_head._State.usable
