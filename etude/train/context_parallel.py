"""Context parallelism: the ranks that compute the same rollouts split their tokens, and in attention their heads.

    own tokens, all heads ──all to all──► all tokens, own heads ──attention──► ──all to all──► own tokens, all heads

Everything else in a layer is computed for own tokens, with whole weights. A rank attends with its heads over the whole
pack, so trees of shared prompts, windows and sinks are as on one rank. (Ulysses: Jacobs et al., arXiv:2309.14509.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from etude.errors import ConfigError
from etude.models.backbone import AttentionFn
from etude.models.shapes import RECURRENT, attention_shapes, read_text_config


class SplitHeads(AttentionFn):
    """An attention function for own tokens, which ranks compute together: each has some heads of all tokens."""

    def __init__(self, attend: AttentionFn, mesh: DeviceMesh) -> None:
        """attend: over all tokens. mesh: the `context` dimension."""
        self._attend = attend
        self._group = mesh.get_group()
        self._rank = mesh.get_local_rank()
        self._count = mesh.size()

    def __call__(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See `AttentionFn`. The rank's own heads are consecutive, and it has the key heads that they read."""
        copies = math.lcm(k.shape[1], self._count) // k.shape[1]
        if copies > 1:  # ranks share key heads: each gets a copy, and their gradients are added up
            k = k.repeat_interleave(copies, 1)
            v = v.repeat_interleave(copies, 1)
        own_q, own_k, own_v = _ToHeads.apply(self._group, q, k, v)  # type: ignore[no-untyped-call]
        own_sinks = None if sinks is None else sinks.chunk(self._count)[self._rank]
        own = self._attend(layer, own_q, own_k, own_v, scale=scale, window=window, softcap=softcap, sinks=own_sinks)
        (out,) = _ToTokens.apply(self._group, own)  # type: ignore[no-untyped-call]
        return cast(Tensor, out)


class _ToHeads(torch.autograd.Function):
    """[n, H, D] of each part, own tokens → [ranks · n, H / ranks, D], own heads."""

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return _send_heads(parts, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *_send_tokens(grads, ctx.group)


class _ToTokens(torch.autograd.Function):
    """[ranks · n, H / ranks, D] of each part, own heads → [n, H, D], own tokens."""

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return _send_tokens(parts, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *_send_heads(grads, ctx.group)


def _send_heads(parts: Sequence[Tensor], group: dist.ProcessGroup) -> tuple[Tensor, ...]:
    """Send each rank its heads of own tokens, all parts at once; return own heads of all tokens."""
    ranks = dist.get_world_size(group)
    shares = [part.shape[1] // ranks for part in parts]
    sent = parts[0].new_empty(ranks, len(parts[0]), sum(shares), parts[0].shape[2])
    for place, part in zip(torch.split(sent, shares, 2), parts, strict=True):
        place.copy_(torch.unflatten(part, 1, (ranks, -1)).transpose(0, 1))
    return torch.split(_all_to_all(sent, group).flatten(0, 1), shares, 1)


def _send_tokens(parts: Sequence[Tensor], group: dist.ProcessGroup) -> tuple[Tensor, ...]:
    """Send each rank its tokens of own heads, all parts at once; return all heads of own tokens."""
    ranks = dist.get_world_size(group)
    sent = torch.cat(list(parts), 1) if len(parts) > 1 else parts[0].contiguous()
    received = torch.unflatten(_all_to_all(sent, group), 0, (ranks, -1))
    pieces = torch.split(received, [part.shape[1] for part in parts], 2)
    return tuple(piece.transpose(0, 1).flatten(1, 2) for piece in pieces)


def _all_to_all(sent: Tensor, group: dist.ProcessGroup) -> Tensor:
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received


def refuse_undivided_heads(config: Any, context: int, tensor: int = 1) -> None:
    """Refuse the config of a model whose attention so many ranks cannot split.

    tensor: the ranks that have an equal part of the heads already.
    """
    text = read_text_config(config)
    for index, kind in enumerate(getattr(text, "layer_types", None) or ()):
        if kind in RECURRENT:
            raise ConfigError(
                f"`mesh.context={context}` splits the heads of attention, and layer {index} of this "
                f"{config.model_type} model is `{kind}`: it hands a state from token to token, on one rank. Set "
                f"`mesh.context=1`; `train.activation_checkpointing=full` saves memory there."
            )
    for shape in attention_shapes(text):
        heads = context if shape is None else shape.query_heads // tensor
        if heads % context:
            fits = max(number for number in range(1, context) if not heads % number)
            left = "" if tensor == 1 else f" that `mesh.tensor={tensor}` leaves a rank"
            raise ConfigError(
                f"`mesh.context={context}` gives each rank an equal part of the attention, and {heads} query heads"
                f"{left} over {context} ranks are {heads / context:.4g} each. Choose a number that divides them, such "
                f"as {fits}."
            )
