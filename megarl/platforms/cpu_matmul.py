"""Matrix products in float32 on a CPU with AVX-512 that is not Intel's, by oneDNN instead of MKL.

torch 2.13 takes MKL, whose float32 products use no AVX-512 on processors of other makers than Intel: on an AMD EPYC,
oneDNN needs 0.45 of its time for x @ wᵀ of [2048, 448] and [1344, 448], and 0.55 for the product that gives the
gradient of w. On an Intel Xeon both are as fast for x @ wᵀ, and MKL needs half of oneDNN's time for the gradient of w,
because it reads a transposed operand as it lies. Both round in float32, not alike in the last bits. The product is the
one that torch itself takes for bfloat16, and for compiled linear layers in float32.

The environment variable MEGARL_CPU_MATMUL=torch keeps torch's own products, to compare a run bit for bit with one of
another processor, or of a commit without this module. It also keeps torch's functions where cpu_elementwise.py would
replace them.
"""

from __future__ import annotations

import functools
import os
import warnings
from pathlib import Path

import torch
from torch import Tensor

VARIABLE = "MEGARL_CPU_MATMUL"
CHOICES = ("onednn", "torch")
CPU_INFO = Path("/proc/cpuinfo")
MIN_MULTIPLICATIONS = 1 << 22  # below them the call costs more than it gains
# Products that oneDNN and torch's layer above it keep prepared, by shape; 1024 each by default. A micro-batch has a few
# shapes, and the next one has other lengths: more of them only fill memory, 0.45 GiB in 75 steps of the quickstart.
CACHE_VARIABLES, CACHED_PRODUCTS = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"), 64


@functools.cache  # the registration ends with the object that is returned
def install() -> torch.library.Library | None:
    """Take oneDNN for the large float32 products of this process; return None where that gains nothing.

    Also None if MEGARL_CPU_MATMUL is `torch`; if it is `onednn`, an Intel processor takes oneDNN too. Raises ValueError
    if it is neither.
    """
    chosen = os.environ.get(VARIABLE)
    if chosen is not None and chosen not in CHOICES:
        raise ValueError(f"{VARIABLE} is {chosen!r}; set it to one of {', '.join(CHOICES)}, or unset it")
    if chosen == "torch" or (chosen is None and is_intel()):
        return None
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not torch.backends.mkldnn.is_available():
        return None
    for name in CACHE_VARIABLES:  # read at the first product
        os.environ.setdefault(name, str(CACHED_PRODUCTS))
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a kernel is replaced, as is meant
        library.impl("mm", mm, "CPU", allow_override=True)
    return library


def mm(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    """Return the product [M, N] as torch.mm does, which it replaces on the CPU."""
    if _is_for_onednn(a_MK, b_KN):
        return _product_of_smaller_copy(a_MK, b_KN)
    return torch.mm(a_MK, b_KN, out=a_MK.new_empty(0))  # a given result has a kernel of its own, which stays


def _product_of_smaller_copy(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    """Return the product by oneDNN.

    torch copies its first operand if that is transposed, as a gradient by a weight has it, and takes the second one as
    it lies: so a is the second one of the transposed product where b is smaller.
    """
    if not a_MK.is_contiguous() and a_MK.t().is_contiguous() and b_KN.numel() < a_MK.numel():
        return _onednn(b_KN.t(), a_MK).t().contiguous()
    return _onednn(a_MK, b_KN.t())


def _onednn(x_MK: Tensor, weight_NK: Tensor) -> Tensor:
    """Return x @ weightᵀ, [M, N]."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise.default(x_MK, weight_NK, None, "none", [], "")
    return product


@functools.cache
def is_intel() -> bool:
    """Tell whether the processor is Intel's; False if the system does not say so."""
    try:
        return "GenuineIntel" in CPU_INFO.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False


def _is_for_onednn(a_MK: Tensor, b_KN: Tensor) -> bool:
    """Tell whether the product is large and in float32. Wrong shapes and types get torch's own message."""
    return (
        a_MK.dtype == b_KN.dtype == torch.float32
        and a_MK.dim() == b_KN.dim() == 2
        and a_MK.shape[1] == b_KN.shape[0]
        and a_MK.shape[0] * b_KN.numel() >= MIN_MULTIPLICATIONS
    )
