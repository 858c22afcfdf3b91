"""Large float32 products are those of float64 but for rounding, and all others are torch's own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.platforms import cpu_matmul
from megarl.platforms.cpu_matmul import CACHE_VARIABLES, MIN_MULTIPLICATIONS, VARIABLE, mm
from tests.support.checkout import ROOT, environment

SIDE = 1 << 8
needs_onednn = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this torch was built without oneDNN"
)


@pytest.fixture
def onednn(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.Size, ...]]:
    """The shapes of the products that oneDNN is asked for."""
    asked: list[tuple[torch.Size, ...]] = []
    original = cpu_matmul._is_for_onednn

    def record(a: torch.Tensor, b: torch.Tensor) -> bool:
        if chosen := original(a, b):
            asked.append((a.shape, b.shape))
        return chosen

    monkeypatch.setattr(cpu_matmul, "_is_for_onednn", record)
    return asked


@needs_onednn
@settings(max_examples=30)
@given(
    st.integers(200, 400),
    st.integers(200, 400),
    st.integers(200, 400),
    st.booleans(),
    st.booleans(),
    st.integers(0, 99),
)
def test_large_products_in_every_layout(m: int, k: int, n: int, a_is_t: bool, b_is_t: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(k, m, generator=generator).t() if a_is_t else torch.randn(m, k, generator=generator)
    b = torch.randn(n, k, generator=generator).t() if b_is_t else torch.randn(k, n, generator=generator)
    product = mm(a, b)
    assert product.dtype == torch.float32 and product.shape == (m, n)
    # The bound on any order of k additions with a rounding of 2^-24 each; with fewer bits, as of TF32, it is missed.
    bound = k * 2**-24 * (a.abs().double() @ b.abs().double())
    assert bool(((product.double() - a.double() @ b.double()).abs() <= bound).all())


@needs_onednn
def test_parts_of_larger_tensors_and_repeated_rows(onednn: list[tuple[torch.Size, ...]]) -> None:
    base = torch.randn(2 * SIDE, 3 * SIDE, generator=torch.Generator().manual_seed(1))
    a, b = base[::2, SIDE:-SIDE], torch.randn(SIDE, 1).expand(SIDE, SIDE)
    assert torch.allclose(mm(a, b).double(), a.double() @ b.double(), atol=1e-3)
    assert torch.equal(mm(a, b), mm(a, b))
    assert onednn == [((SIDE, SIDE), (SIDE, SIDE))] * 3


def test_small_products_and_other_types_are_torchs_own(onednn: list[tuple[torch.Size, ...]]) -> None:
    rows = MIN_MULTIPLICATIONS // SIDE**2 - 1
    for dtype, size in ((torch.float32, rows), (torch.float64, SIDE), (torch.bfloat16, SIDE), (torch.int64, 4)):
        a, b = torch.ones(size, SIDE, dtype=dtype), torch.ones(SIDE, SIDE, dtype=dtype)
        assert torch.equal(mm(a, b), torch.mm(a, b)) and mm(a, b).dtype == dtype
    assert mm(torch.ones(0, 3), torch.ones(3, 2)).shape == (0, 2)
    assert onednn == []


def test_wrong_operands_get_torchs_message() -> None:
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        mm(torch.ones(SIDE, SIDE), torch.ones(SIDE + 1, SIDE))
    with pytest.raises(RuntimeError, match="must be a matrix"):
        mm(torch.ones(SIDE), torch.ones(SIDE, SIDE))


PROGRAM = f"""
import warnings
warnings.simplefilter("error")
import torch
from megarl import platforms
platforms.activate()
from megarl.platforms import cpu_matmul
taken = []
original = cpu_matmul._is_for_onednn
cpu_matmul._is_for_onednn = lambda a, b: taken.append((*a.shape, b.shape[1])) or original(a, b)
x = torch.randn({SIDE}, 2, {SIDE}, requires_grad=True)
w = torch.randn(3 * {SIDE}, {SIDE}, requires_grad=True)
(x @ w.t()).square().sum().backward()
exact = [each.detach().double().requires_grad_() for each in (x, w)]
(exact[0] @ exact[1].t()).square().sum().backward()
for mine, other in zip((x.grad, w.grad), (exact[0].grad, exact[1].grad)):
    assert float((mine.double() - other).abs().max() / other.abs().max()) < 1e-5
print(len(taken))
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="it is for machines without CUDA")
@pytest.mark.parametrize("chosen", [None, "onednn"])
def test_the_platform_installs_it_for_products_and_their_gradients(chosen: str | None) -> None:
    """It runs in a new process, because a replaced kernel is that of a whole process."""
    command = [sys.executable, "-c", PROGRAM]
    variables = environment(**({VARIABLE: chosen} if chosen else {}))
    result = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    usable = torch.backends.cpu.get_cpu_capability() == "AVX512" and torch.backends.mkldnn.is_available()
    wanted = chosen == "onednn" or (chosen is None and not cpu_matmul.is_intel())
    assert int(result.stdout) == (6 if usable and wanted else 0)


def test_it_is_not_installed_if_the_user_wants_torchs_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "torch")
    assert cpu_matmul.install.__wrapped__() is None
    monkeypatch.setenv(VARIABLE, "mkl")
    with pytest.raises(ValueError, match=r"MEGARL_CPU_MATMUL is 'mkl'; set it to one of onednn, torch, or unset it"):
        cpu_matmul.install.__wrapped__()


@needs_onednn
def test_the_smaller_operand_of_a_gradient_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[tuple[int, int]] = []
    original = cpu_matmul._onednn

    def record(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        copied.append((x.shape[0], weight.shape[0]))
        return original(x, weight)

    monkeypatch.setattr(cpu_matmul, "_onednn", record)
    generator = torch.Generator().manual_seed(2)
    small, large = (torch.randn(512, width, generator=generator) for width in (128, 384))
    for gradient, activation in ((large, small), (small, large)):
        product = mm(gradient.t(), activation)
        assert product.is_contiguous()
        assert torch.allclose(product.double(), gradient.double().t() @ activation.double(), atol=1e-3)
    assert copied == [(128, 384), (128, 384)]  # it is always the one with 128 columns that is copied


@pytest.mark.parametrize(
    "text, intel",
    [("vendor_id\t: GenuineIntel\n", True), ("vendor_id\t: AuthenticAMD\n", False), (None, False)],
)
def test_the_maker_of_the_processor(
    text: str | None, intel: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "cpuinfo"
    if text is not None:
        path.write_text(text)
    monkeypatch.setattr(cpu_matmul, "CPU_INFO", path)
    assert cpu_matmul.is_intel.__wrapped__() is intel


GROWTH = """
import ctypes, sys
class Info(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]
libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Info
import torch
from megarl.platforms import cpu_matmul
assert cpu_matmul.install() is not None
weights = [torch.ones(*shape) for shape in ((128, 128), (128, 384), (512, 128), (128, 104))]
def products(rows):
    for each in weights:
        k, n = each.shape
        torch.mm(torch.ones(rows, k), each)
        torch.mm(torch.ones(k, rows), torch.ones(rows, n))
        torch.mm(torch.ones(rows, n), each.t())
before = libc.mallinfo2().uordblks
for number in range(30):
    products(3000 + 7 * number)
print((libc.mallinfo2().uordblks - before) >> 20)
"""


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() != "AVX512", reason="torch's own products are taken here")
@pytest.mark.parametrize(
    ("cached", "least", "most"), [({}, 0, 80), (dict.fromkeys(CACHE_VARIABLES, "1024"), 160, 2000)]
)
def test_products_of_ever_new_lengths_fill_no_memory(cached: dict[str, str], least: int, most: int) -> None:
    """In MiB: of 360 prepared products few are kept, unless the user wants more, as the second case shows."""
    variables = {key: value for key, value in os.environ.items() if key not in CACHE_VARIABLES} | cached
    variables[VARIABLE] = "onednn"
    result = subprocess.run(
        [sys.executable, "-c", GROWTH],
        cwd=ROOT,
        env=variables,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert least <= int(result.stdout) <= most
