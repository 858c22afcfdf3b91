"""The two passes over a chunk of logits, fused by `torch.compile`: each reads the logits once or twice.

`logprobs.py` does the same with separate operations, which move about 80 bytes per logit through GPU memory; it is the
reference, and the fallback if compilation fails. Nothing is overwritten here: the compiler keeps all [C, Vt]
intermediates in registers.

Shapes: C rows of a chunk, Vt vocabulary columns of this rank without padding.
"""

import functools
import logging
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

logger = logging.getLogger(__name__)


class RowTerms(NamedTuple):
    """Values per row from which the gradient with respect to a chunk of logits is computed; floats are fp32.

    The gradient of g log p[target] + e H by x = logits / temperature is g (1[target] - p) - e p (log p + H).
    """

    lse_C: Tensor  # log-sum-exp of x over the whole vocabulary
    local_C: Tensor  # int64: the target's column here; any column if another rank has it
    owned_C: Tensor  # bool: the target is one of these columns
    grad_logprobs_C: Tensor  # g
    grad_entropy_C: Tensor | None  # e; None: 0
    entropy_C: Tensor  # H


class _State:
    """Per process: `usable` until the passes fail to compile."""

    usable = True


def row_stats(logits_CVt: Tensor, local_C: Tensor, temperature: float | Tensor, with_entropy: bool) -> Tensor | None:
    """Return `reduce_rows`, compiled; None if it cannot be compiled here."""
    return _run(reduce_rows, logits_CVt, local_C, temperature, with_entropy)


def grad_logits(logits_CVt: Tensor, terms: RowTerms, temperature: float | Tensor) -> Tensor | None:
    """Return `differentiate_rows`, compiled; None if it cannot be compiled here."""
    return _run(differentiate_rows, logits_CVt, terms, temperature)


def reduce_rows(logits_CVt: Tensor, local_C: Tensor, temperature: float | Tensor, with_entropy: bool) -> Tensor:
    """Return four numbers per row of x = logits / temperature, fp32 [4, C].

    The maximum m, the sum of exp(x - m), the target's x, and the sum of exp(x - m) * (x - m), which is 0 unless
    `with_entropy`.
    """
    scaled_CVt = logits_CVt.float() / _column(temperature)
    maximum_C = scaled_CVt.amax(dim=1)
    target_C = logits_CVt.gather(1, local_C[:, None]).squeeze(1).float() / temperature
    shifted_CVt = scaled_CVt - maximum_C[:, None]
    exponentials_CVt = shifted_CVt.exp()
    products_C = (exponentials_CVt * shifted_CVt).sum(dim=1) if with_entropy else torch.zeros_like(maximum_C)
    return torch.stack((maximum_C, exponentials_CVt.sum(dim=1), target_C, products_C))


def differentiate_rows(logits_CVt: Tensor, terms: RowTerms, temperature: float | Tensor) -> Tensor:
    """Return the gradient defined in `RowTerms`, [C, Vt] in the dtype of the logits."""
    log_p_CVt = logits_CVt.float() / _column(temperature) - terms.lse_C[:, None]
    factor_CVt = -terms.grad_logprobs_C[:, None]
    if terms.grad_entropy_C is not None:
        factor_CVt = factor_CVt - terms.grad_entropy_C[:, None] * (log_p_CVt + terms.entropy_C[:, None])
    columns_Vt = torch.arange(logits_CVt.shape[1], device=logits_CVt.device)
    is_target_CVt = (columns_Vt == terms.local_C[:, None]) & terms.owned_C[:, None]
    grad_CVt = log_p_CVt.exp() * factor_CVt + torch.where(is_target_CVt, terms.grad_logprobs_C[:, None], 0.0)
    return grad_CVt.to(logits_CVt.dtype)


def _column(temperature: float | Tensor) -> float | Tensor:
    """Return temperatures per row, [C], as a column for [C, Vt]; a single number unchanged."""
    return temperature[:, None] if isinstance(temperature, Tensor) else temperature


def _run(function: Callable[..., Tensor], *args: object) -> Tensor | None:
    """Return the compiled function's result; None after the first failure, which is warned about."""
    if not _State.usable:
        return None
    try:
        return _compiled(function)(*args)
    except _compile_errors() as error:  # neither GPU errors, which may come from earlier work, nor bugs here
        _State.usable = False
        logger.warning(
            "the log-prob head failed to compile and runs uncompiled, which is slower: %s: %s",
            type(error).__name__,
            error,
        )
        return None


@functools.cache
def _compile_errors() -> tuple[type[Exception], ...]:
    """Return the errors that torch 2.13 raises when it cannot trace or compile a function.

    Dynamo wraps errors of Inductor, Triton's compiler and a missing C++ compiler. Failures in Inductor's worker or in
    autotuning are not wrapped.
    """
    from torch._dynamo.exc import TorchDynamoException
    from torch._inductor.exc import CppCompileError, InvalidCxxCompiler

    return TorchDynamoException, CppCompileError, InvalidCxxCompiler, *_triton_errors()


def _triton_errors() -> tuple[type[Exception], ...]:
    """Return the errors of Triton's compiler, and of kernels too large for the GPU; none without Triton."""
    try:
        from triton.compiler.errors import CompilationError
        from triton.runtime.errors import OutOfResources, PTXASError
    except ImportError:
        return ()
    return CompilationError, OutOfResources, PTXASError


@functools.cache
def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    # Dynamic, because the last chunk's rows differ from batch to batch. One thread, because every rank would otherwise
    # start up to 32 processes that import torch, for two small functions.
    return torch.compile(function, dynamic=True, options={"compile_threads": 1})
