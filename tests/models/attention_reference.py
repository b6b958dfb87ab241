"""The definition of attention over packs, and of a kernel for rows of any lengths, in plain operations."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import strategies as st
from torch import Tensor

from etude.batch import Pack
from etude.models.tree_attention import LevelCall, VarlenKernel
from tests.packs import attention_mask

HEADS, KEY_HEADS, WIDTH, SCALE = 4, 2, 8, 0.3


def qkv(tokens: int, dtype: torch.dtype = torch.float64, heads: tuple[int, int] = (HEADS, KEY_HEADS)) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    shapes = [(tokens, n, WIDTH) for n in (heads[0], heads[1], heads[1])]
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def masked_attention(pack: Pack, q: Tensor, k: Tensor, v: Tensor, window: int | None, softcap: float | None) -> Tensor:
    """Return the definition of attention: the scores of all pairs, masked."""
    mask = attention_mask(pack)
    if window is not None:
        mask = mask & (pack.positions[:, None] - pack.positions < window)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * SCALE
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~mask, -torch.inf).softmax(-1), v)


@st.composite
def forests(draw: st.DrawFn) -> tuple[tuple[int, int], ...]:
    """Draw any forest, with empty segments too. A root has at least one token, because each path has a first one."""
    segments: list[tuple[int, int]] = []
    for index in range(draw(st.integers(1, 8))):
        parent = draw(st.integers(-1, index - 1))
        segments.append((parent, draw(st.integers(1 if parent < 0 else 0, 24))))
    return tuple(segments)


class PlainKernel(VarlenKernel):
    """The contract of `VarlenKernel`, row by row. It counts its forward and backward calls."""

    def __init__(self) -> None:
        self.forward_calls: list[LevelCall] = []
        self.backward_calls: list[LevelCall] = []

    def supports(self, q: Tensor, softcap: float | None) -> bool:
        return softcap is None

    def forward(self, call: LevelCall, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        self.forward_calls.append(call)
        outs, lses = [], []
        for row, (queries, keys) in enumerate(zip(_rows(call.query.ends), _rows(call.key.ends), strict=True)):
            scores = _scores(call, q[queries], k[keys], scale)
            lse = scores.logsumexp(-1)
            outs.append(torch.einsum("hqk,khd->qhd", (scores - lse[..., None]).exp(), _wide(q, v[keys])))
            lses.append(lse.T)
            assert len(outs[-1]) <= call.query.longest and keys.stop - keys.start <= call.key.longest, row
        return torch.cat(outs).to(q.dtype), torch.cat(lses)

    def backward(
        self, call: LevelCall, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        self.backward_calls.append(call)
        of_q, of_k, of_v = (torch.empty_like(x) for x in (q, k, v))
        for queries, keys in zip(_rows(call.query.ends), _rows(call.key.ends), strict=True):
            shares = (_scores(call, q[queries], k[keys], scale) - lse[queries].T[..., None]).exp()
            delta = (grad[queries] * out[queries]).sum(-1).T[..., None]
            of_shares = torch.einsum("qhd,khd->hqk", _wide(q, grad[queries]), _wide(q, v[keys]))
            of_scores = shares * (of_shares - delta) * scale
            of_q[queries] = torch.einsum("hqk,khd->qhd", of_scores, _wide(q, k[keys])).to(q.dtype)
            of_k[keys] = _fold(torch.einsum("hqk,qhd->khd", of_scores, _wide(q, q[queries])), k).to(k.dtype)
            of_v[keys] = _fold(torch.einsum("hqk,qhd->khd", shares, _wide(q, grad[queries])), v).to(v.dtype)
        return of_q, of_k, of_v


def _rows(ends: Tensor) -> list[slice]:
    return [slice(start, stop) for start, stop in pairwise(ends.tolist())]


def _wide(q: Tensor, x: Tensor) -> Tensor:
    """Return keys or values with a head for each query head, in float32 or wider."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], 1).to(torch.promote_types(x.dtype, torch.float32))


def _fold(x: Tensor, like: Tensor) -> Tensor:
    """Return the sum over the query heads that share a key head."""
    return x.view(x.shape[0], like.shape[1], -1, x.shape[2]).sum(2)


def _scores(call: LevelCall, q: Tensor, k: Tensor, scale: float) -> Tensor:
    scores = torch.einsum("qhd,khd->hqk", _wide(q, q), _wide(q, k)) * scale
    distance = torch.arange(len(q), device=q.device)[:, None] - torch.arange(len(k), device=q.device)
    if call.causal:
        scores = scores.masked_fill(distance < 0, -torch.inf)
    if call.window is not None:
        scores = scores.masked_fill(distance >= call.window, -torch.inf)
    return scores
