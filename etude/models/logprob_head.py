"""Log-probs and entropies directly from hidden states: the whole [N, V] matrix of logits never exists.

The logits of a chunk of rows are computed, used, and freed; the backward pass computes them again. The results are
those of `algorithms/logits.py`: in float32 or wider, with logits divided by the temperature first. Rows whose token was
drawn from a small set get the logits of a part of the vocabulary only (see `token_sets`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from etude.models.gpu_memory import gpu_memory
from etude.models.model import Model
from etude.models.token_sets import HeadRows, TokenSets, split_rows

CHUNK = 1024
"""The largest number of rows of logits at a time on a CPU."""
GPU_CHUNK = 4096
"""The same on a GPU. Each chunk reads and writes the whole gradient of the head, so fewer chunks take less time."""
MAX_LOGITS = 2**26
"""The largest number of logits at a time. A larger vocabulary gets fewer rows, but at least an eighth of a chunk,
because of that gradient."""
MAX_LOGITS_OF_LARGE_GPU = 2**29
"""The same on a GPU with `LARGE_GPU` bytes. The backward pass holds three such matrices in float32, 6 GiB."""
LARGE_GPU = 40 * 10**9
NEEDED_BYTES = 16 * 2**30
"""The bytes that a large GPU must have free for chunks of that size."""

LogitChunkFn = Callable[[Tensor, int, int], tuple[Tensor, ...]]


def map_logit_chunks(
    model: Model, hidden: Tensor, fn: LogitChunkFn, chunk: int | None = None, sets: TokenSets | None = None
) -> tuple[Tensor, ...]:
    """Apply `fn(logits[start:stop], start, stop)` to each chunk of rows; return the results end to end: tensors [N, …].

    sets: the tokens that each row's token was drawn from. The logits of all others are -inf.
    `fn` is differentiated through the logits, and called again in the backward pass; both calls must give the same.
    Other tensors that it reads are constants.
    """

    def restricted(logits: Tensor, start: int, stop: int) -> tuple[Tensor, ...]:
        return fn(logits if sets is None else sets.restrict(logits, slice(start, stop)), start, stop)

    out: tuple[Tensor, ...] = _LogitChunks.apply(
        model, restricted, chunk or _chunk_rows(model), hidden, *_weights(model)
    )  # type: ignore[no-untyped-call]
    return out


def token_logp(
    model: Model,
    hidden: Tensor,
    ids: Tensor,
    temperature: float = 1.0,
    *,
    chunk: int | None = None,
    sets: TokenSets | None = None,
) -> Tensor:
    """[N, H], [N] → [N]: log π of each row's token, among the tokens of its set."""
    logp: Tensor
    logp, _ = _LogpEntropy.apply(
        model, ids, temperature, chunk or _chunk_rows(model), False, sets, hidden, *_weights(model)
    )  # type: ignore[no-untyped-call]
    return logp


def logp_and_entropy(
    model: Model,
    hidden: Tensor,
    ids: Tensor,
    temperature: float = 1.0,
    *,
    chunk: int | None = None,
    sets: TokenSets | None = None,
) -> tuple[Tensor, Tensor]:
    """[N, H], [N] → [N], [N]: log π of each row's token, and the entropy of the row's distribution.

    sets: the tokens that each row's token was drawn from; both are of the distribution over these.
    """
    both: tuple[Tensor, Tensor] = _LogpEntropy.apply(
        model, ids, temperature, chunk or _chunk_rows(model), True, sets, hidden, *_weights(model)
    )  # type: ignore[no-untyped-call]
    return both


def chunk_rows(vocab_size: int, *, gpu: bool = False, total: int = 0, free: int = 0) -> int:
    """Return the number of rows of logits to compute at a time. total, free: the bytes of the GPU."""
    rows = GPU_CHUNK if gpu else CHUNK
    is_large = total >= LARGE_GPU and free >= NEEDED_BYTES
    limit = MAX_LOGITS_OF_LARGE_GPU if is_large else MAX_LOGITS
    return min(rows, max(rows // 8, limit // vocab_size))


def _chunk_rows(model: Model) -> int:
    """Return the number of rows of logits to compute at a time on the model's device."""
    vocab_size = len(model.head_weight)
    if model.device.type != "cuda":
        return chunk_rows(vocab_size)
    total, free = gpu_memory(model.device)
    return chunk_rows(vocab_size, gpu=True, total=total, free=free)


def _weights(model: Model) -> tuple[Tensor, ...]:
    return (model.head_weight,) if model.head_bias is None else (model.head_weight, model.head_bias)


class _HeadGradients:
    """The gradients of hidden states and head, summed chunk by chunk from the gradient of the raw logits."""

    def __init__(self, hidden: Tensor, weights: tuple[Tensor, ...], needed: tuple[bool, ...]) -> None:
        self.weight = weights[0]
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        self.hidden = torch.empty_like(hidden) if needed[0] else None
        self.weights = [
            torch.zeros_like(w, dtype=wide) if wanted else None for w, wanted in zip(weights, needed[1:], strict=True)
        ]

    def add(self, part: HeadRows, hidden: Tensor, logits_grad: Tensor) -> None:
        """Add one chunk's share."""
        if self.hidden is not None:
            if isinstance(part.rows, slice):
                torch.mm(logits_grad, self.weight, out=self.hidden[part.rows])
            else:
                self.hidden[part.rows] = logits_grad @ (self.weight if part.words is None else self.weight[part.words])
        if self.weights[0] is not None:
            _add_words(self.weights[0], part.words, logits_grad.T @ hidden)
        if len(self.weights) > 1 and self.weights[1] is not None:
            _add_words(self.weights[1], part.words, logits_grad.sum(0))

    def all(self) -> tuple[Tensor | None, ...]:
        """Return all gradients, in the order of the function's inputs."""
        return self.hidden, *(None if w is None else w.to(self.weight.dtype) for w in self.weights)


class _LogitChunks(torch.autograd.Function):
    """`map_logit_chunks`: forward without a graph, backward through one chunk's graph at a time."""

    @staticmethod
    def forward(
        ctx: Any, model: Model, fn: LogitChunkFn, chunk: int, hidden: Tensor, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.model = model
        ctx.fn = fn
        ctx.chunk = chunk
        ctx.save_for_backward(hidden, *weights)
        parts = [
            fn(model.logits(hidden[start : start + chunk]), start, min(start + chunk, len(hidden)))
            for start in range(0, max(len(hidden), 1), chunk)
        ]
        return tuple(torch.cat(column) for column in zip(*parts, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, *weights = ctx.saved_tensors
        into = _HeadGradients(hidden, tuple(weights), ctx.needs_input_grad[3:])
        for start in range(0, len(hidden), ctx.chunk):
            rows = slice(start, min(start + ctx.chunk, len(hidden)))
            raw = ctx.model.raw_logits(hidden[rows]).detach().requires_grad_()
            with torch.enable_grad():
                outs = ctx.fn(ctx.model.scale_and_cap_logits(raw), rows.start, rows.stop)
            wanted = [(out, grad[rows]) for out, grad in zip(outs, grads, strict=True) if out.requires_grad]
            (logits_grad,) = torch.autograd.grad([o for o, _ in wanted], raw, [g for _, g in wanted])
            into.add(HeadRows(rows), hidden[rows], logits_grad.to(hidden.dtype))
        return None, None, None, *into.all()


class _LogpEntropy(torch.autograd.Function):
    """Log-prob and entropy with an explicit gradient, so that a chunk is processed in place."""

    @staticmethod
    def forward(
        ctx: Any,
        model: Model,
        ids: Tensor,
        temperature: float,
        chunk: int,
        entropy: bool,
        sets: TokenSets | None,
        hidden: Tensor,
        *weights: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        logp, total = hidden.new_empty(len(hidden), dtype=wide), hidden.new_empty(len(hidden), dtype=wide)
        spread = hidden.new_empty(len(hidden), dtype=wide) if entropy else None
        parts = split_rows(len(hidden), chunk, sets, len(weights[0]))
        for part in parts:
            rows = part.rows
            scaled = _scaled(model.logits(hidden[rows], part.words), temperature)
            if sets is not None:
                sets.restrict_(scaled, part)
            total[rows] = scaled.logsumexp(1)
            logp[rows] = scaled.gather(1, part.columns(ids))[:, 0] - total[rows]
            if spread is not None:
                spread[rows] = _entropy(scaled, total[rows])
        ctx.model = model
        ctx.temperature = temperature
        ctx.sets = sets
        ctx.parts = parts
        ctx.save_for_backward(ids, total, spread, hidden, *weights)
        return logp, spread

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ids, total, spread, hidden, *weights = ctx.saved_tensors
        of_logp, of_entropy = grads
        model = ctx.model
        into = _HeadGradients(hidden, tuple(weights), ctx.needs_input_grad[6:])
        for part in ctx.parts:
            rows = part.rows
            logits = model.logits(hidden[rows], part.words)
            # the gradient of a cap needs the capped logits at the end; without a cap they may be overwritten
            grad = _scaled(logits if model.logit_cap is None else logits.clone(), ctx.temperature)
            if ctx.sets is not None:
                ctx.sets.restrict_(grad, part)
            grad.sub_(total[rows, None])
            if spread is not None and of_entropy is not None:
                # ∂H/∂z = −p (log p + H); a logit of −∞ has p = 0 and no gradient
                p = grad.exp()
                grad.add_(spread[rows, None]).mul_(p).mul_(-of_entropy[rows, None]).masked_fill_(p == 0, 0)
                if of_logp is not None:
                    grad.sub_(p.mul_(of_logp[rows, None]))
            else:
                assert of_logp is not None, "autograd runs a node only for a gradient of one of its outputs"
                grad.exp_().mul_(-of_logp[rows, None])
            if of_logp is not None:
                grad.scatter_add_(1, part.columns(ids), of_logp[rows, None])
            grad.mul_(1 / ctx.temperature)
            into.add(part, hidden[rows], model.logits_backward(grad, logits).to(hidden.dtype))
        return None, None, None, None, None, None, *into.all()


def _add_words(total: Tensor, words: Tensor | None, values: Tensor) -> None:
    """Add the values of these words, or of the whole vocabulary; each word occurs once."""
    if words is None:
        total += values
    else:
        total.index_add_(0, words, values.to(total.dtype))


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    """Divide by the temperature, in place."""
    return logits if temperature == 1 else logits.mul_(1 / temperature)


def _entropy(scaled: Tensor, total: Tensor) -> Tensor:
    """Return −Σ p log p of each row; `scaled` is overwritten."""
    logp = scaled.sub_(total[:, None])
    return -(logp.exp() * logp.masked_fill_(logp == -torch.inf, 0)).sum(1)
