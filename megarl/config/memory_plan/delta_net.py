"""What Gated DeltaNet layers add to the plan: parameters, what they keep for backward, and the states of requests."""

from megarl.common.values import FP32
from megarl.models.architecture.architecture import DELTA_CHUNK, DeltaNet

CHUNK_ROWS = 1.25  # rows of the rule's chunks per token, because sequences end inside chunks. An estimate


def parameters(delta: DeltaNet, hidden: int, tensor: int) -> int:
    """Return the parameters of a layer on one of `tensor` ranks."""
    held = (2 * delta.keys + 3 * delta.values + 2 * delta.value_heads) // tensor * hidden
    return held + ((2 * delta.keys + delta.values) * delta.conv + 2 * delta.value_heads) // tensor + delta.value_dim


def kept_bytes(delta: DeltaNet, tensor: int, element: int, *, fused: bool, rows: float = CHUNK_ROWS) -> float:
    """Return the bytes per packed token that a layer keeps, without its input norm.

    `element`: bytes of one number. With fla's kernels (`fused`) it is an estimate.
    """
    heads, groups = delta.value_heads // tensor, delta.key_heads // tensor
    keys, values = delta.keys // tensor, delta.values // tensor
    mixed = 2 * keys + values
    kept: float = (mixed + values + 2 * heads) * element  # the projection
    kept += values * (3 * element + 2 * FP32)  # the norm, its scaled result, the gate's SiLU, and their product
    if fused:
        # The convolution's input, a query and a key for each value head, the values, a matrix of each chunk.
        return kept + (mixed + 2 * heads * delta.key_dim + values + heads * DELTA_CHUNK) * element
    kept += delta.conv * mixed * element  # the earlier tokens for the convolution, and its result
    kept += 2 * keys * FP32 + (0 if element == FP32 else (2 * keys + values) * FP32)  # the normalised, and fp32 copies
    # Inside a chunk: 4 matrices of a value head, 2 of a key head; right sides, solutions, queries, keys, additions.
    inside: float = (4 * heads + 2 * groups) * DELTA_CHUNK
    inside += 2 * heads * (delta.value_dim + delta.key_dim) + 2 * heads * delta.key_dim + 2 * keys + values
    inside += heads * delta.key_dim * delta.value_dim / DELTA_CHUNK  # the states between chunks
    return kept + rows * inside * FP32


def request_bytes(delta: DeltaNet, element: int) -> int:
    """Return the bytes that an engine keeps per request in all DeltaNet layers, whatever its length."""
    convolution = (delta.conv - 1) * (2 * delta.keys + delta.values) * element
    return sum(delta.layers) * (delta.state * FP32 + convolution)
