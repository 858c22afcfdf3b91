"""The gated delta rule (arXiv 2412.06464) and its short convolution, in PyTorch, for packed sequences.

The state S of a head is a matrix. A token t with decay g, strength beta, key k, value v and query q does

    S_t = e^g S_{t-1} + beta k (v - e^g S_{t-1}^T k)^T        o_t = S_t^T q / sqrt(K)

Sequences are cut into chunks. The work inside chunks is one batched computation over the chunks of all sequences. A
loop then passes the states from chunk to chunk, for all unfinished sequences at once; it has as many steps as the
longest sequence has chunks.

Shapes: T packed tokens, S sequences, M chunks of C tokens, G key heads, R value heads of each, H = G R value heads, K
and V channels of a key and of a value head, X channels of the convolution, W its width in tokens.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch.nn import functional

from megarl.models.architecture.architecture import DELTA_CHUNK


class _Chunks:
    """Packed sequences as chunks: the first chunk of each sequence, longest sequence first, then the second ones, ...

    `order`: the sequences, longest first; `steps`: how many of them have a first chunk, a second chunk, and so on.
    """

    def __init__(self, bounds: Sequence[int], chunk: int, device: torch.device) -> None:
        spans = list(pairwise(bounds))
        self.order = sorted(range(len(spans)), key=lambda i: spans[i][0] - spans[i][1])
        self.tokens = bounds[-1]
        longest = max((stop - start for start, stop in spans), default=0)
        found = [
            [(start + at, stop) for start, stop in (spans[i] for i in self.order) if start + at < stop]
            for at in range(0, longest, chunk)
        ]
        self.steps = [len(step) for step in found]
        starts_stops = torch.tensor([each for step in found for each in step], dtype=torch.long).view(-1, 2)
        place_MC = starts_stops[:, :1] + torch.arange(chunk)
        real_MC = place_MC < starts_stops[:, 1:]
        back_T = torch.empty(self.tokens, dtype=torch.long)
        back_T[place_MC[real_MC]] = real_MC.flatten().nonzero()[:, 0]
        self._place_MC = torch.where(real_MC, place_MC, self.tokens).to(device)  # `tokens` is a row of zeros
        self._back_T = back_T.to(device)

    def cut(self, packed: torch.Tensor) -> torch.Tensor:
        """Return [T, ...] as [M, C, ...], with zeros beyond the end of a sequence."""
        return torch.cat([packed[: self.tokens], packed.new_zeros(1, *packed.shape[1:])])[self._place_MC]

    def join(self, chunks: torch.Tensor) -> torch.Tensor:
        """Return [M, C, ...] as [T, ...]."""
        return chunks.flatten(0, 1)[self._back_T]


def _unit(vectors: torch.Tensor) -> torch.Tensor:
    return vectors * torch.rsqrt(vectors.square().sum(-1, keepdim=True) + 1e-6)


def gated_delta_rule(
    q_TGK: torch.Tensor,
    k_TGK: torch.Tensor,
    v_THV: torch.Tensor,
    g_TH: torch.Tensor,
    beta_TH: torch.Tensor,
    bounds: Sequence[int],
    state_SHKV: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs [T, H, V] in the dtype of `v`, and the last state of each sequence [S, H, K, V].

    `bounds`: where sequences begin, and the end of the last; outputs beyond it are 0. `g`: logs of the decays.
    `state`: before each sequence's first token; None = 0. Normalises queries and keys. Computes in fp32, or in fp64 if
    `v` is fp64.
    """
    heads, groups, wide = v_THV.shape[1], k_TGK.shape[1], torch.promote_types(v_THV.dtype, torch.float32)
    longest = max((stop - start for start, stop in pairwise(bounds)), default=1)
    chunks = _Chunks(bounds, min(DELTA_CHUNK, 1 << max(0, longest - 1).bit_length()), v_THV.device)
    order = torch.tensor(chunks.order, dtype=torch.long, device=v_THV.device)

    q, k = (chunks.cut(_unit(x.to(wide))).transpose(1, 2).unsqueeze(2) for x in (q_TGK, k_TGK))  # [M, G, 1, C, K]
    v = chunks.cut(v_THV.to(wide)).transpose(1, 2).unflatten(1, (groups, heads // groups))  # [M, G, R, C, V]
    g, beta = (chunks.cut(x.to(wide)).transpose(1, 2).unflatten(1, (groups, heads // groups)) for x in (g_TH, beta_TH))
    if state_SHKV is None:
        state_SHKV = v.new_zeros(len(bounds) - 1, heads, k_TGK.shape[2], v_THV.shape[2])
    state = state_SHKV.to(wide)[order].unflatten(1, (groups, heads // groups))
    out, last = _pass_states(_inside(q, k, v, g, beta), state, chunks.steps)
    out_THV = chunks.join(out.flatten(1, 2).transpose(1, 2)).to(v_THV.dtype)
    out_THV = functional.pad(out_THV, (0, 0, 0, 0, 0, len(v_THV) - chunks.tokens))
    return out_THV, last.flatten(1, 2)[order.argsort()]


def _inside(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Return everything that does not depend on the states before the chunks, as `_pass_states` takes it."""
    size = g.shape[-1]
    total = g.cumsum(-1)  # log of the decay since the chunk's start, including the token's
    later = torch.ones(size, size, dtype=torch.bool, device=g.device).triu(1)
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(later, -torch.inf).exp()  # [M, G, R, C, C]
    # What a token adds to the state depends on what earlier tokens of its chunk have added: a triangular system, with
    # one right side for the values and one for what the tokens read from the state before the chunk.
    system = (k @ k.transpose(-1, -2)) * (decay * beta[..., None])
    right = (v * beta[..., None], k * (total.exp() * beta)[..., None])
    added, reads = (torch.linalg.solve_triangular(system, x, upper=False, unitriangular=True) for x in right)
    q = q * q.shape[-1] ** -0.5
    left = (total[..., -1:] - total).exp()[..., None]  # the decay from a token to the end of its chunk
    kept = total[..., -1:, None].exp()
    return added, reads, (q @ k.transpose(-1, -2)) * decay, q * total.exp()[..., None], k * left, kept


def _pass_states(
    inside: tuple[torch.Tensor, ...], state: torch.Tensor, steps: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs [M, G, R, C, V], and the last states in the order of `state` [S, G, R, K, V]."""
    out, ended = [], []
    for added, reads, seen, q_first, k_last, kept in zip(*(x.split(list(steps)) for x in inside), strict=True):
        if len(added) < len(state):
            ended.append(state[len(added) :])
            state = state[: len(added)]
        new = added - reads @ state
        out.append(q_first @ state + seen @ new)
        state = state * kept + k_last.transpose(-1, -2) @ new
    return torch.cat(out), torch.cat([state, *reversed(ended)])


def causal_conv(
    x_TX: torch.Tensor, weight_XW: torch.Tensor, bounds: Sequence[int], before_SWX: torch.Tensor | None = None
) -> torch.Tensor:
    """Return each channel's convolution [T, X] over a token and the W - 1 tokens before it in its sequence.

    `before`: the W - 1 tokens before each sequence; None = 0.
    """
    width = weight_XW.shape[1]
    starts = torch.tensor(bounds[:-1], dtype=torch.long)
    lengths = torch.tensor(bounds, dtype=torch.long).diff()
    tail = torch.tensor([len(x_TX) - bounds[-1]])
    first_T = torch.cat([starts, torch.tensor(bounds[-1:])]).repeat_interleave(torch.cat([lengths, tail]))
    age_T = (torch.arange(len(x_TX)) - first_T).to(x_TX.device)  # earlier tokens of the sequence
    out_TX = x_TX * weight_XW[:, -1]
    for back in range(1, width):
        shifted_TX = functional.pad(x_TX, (0, 0, back, 0))[: len(x_TX)] * (age_T >= back)[:, None]
        if before_SWX is not None:
            for held_WX, (start, stop) in zip(before_SWX, pairwise(bounds), strict=True):
                count = min(back, stop - start)
                shifted_TX[start : start + count] = held_WX[width - 1 - back :][:count]
        out_TX = out_TX + shifted_TX * weight_XW[:, width - 1 - back]
    return out_TX
