"""The recurrent operations of transformers' layers, answered by the mixer of the current pass.

transformers keeps each of these operations in one function for each model file, under the same name, behind which a
kernel package may stand. `route` replaces it by a function that asks the current mixer, as Etude's attention does.
Outside of a pass of Etude the original function answers. So no family has code of its own: the recurrence of a row is
the original function, and the mixer chooses the rows.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus
from transformers.activations import ACT2FN

from etude.models.mixers import Mixer, current_layer, current_mixer
from etude.models.states import Recurrence, Rows

CHUNK = 64
"""The number of tokens that transformers' recurrences compute at once; a state at such a border has the same bits
however the row was divided."""


def route(module: nn.Module) -> None:
    """Let the recurrent operations of the files of a model's layers ask the current mixer."""
    for name in {type(part).__module__ for part in module.modules()}:
        namespace = vars(sys.modules[name])
        for operation, answer in ANSWERS.items():
            original = namespace.get(operation)
            if original is not None and not hasattr(original, "routed"):
                namespace[operation] = _routed(original, answer, namespace)


def _routed(original: Any, answer: Any, namespace: dict[str, Any]) -> Any:
    """Return an operation that asks the current mixer, and otherwise the original."""

    @functools.wraps(original)
    def routed(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        mixer, operation = current_mixer.get(), _choose_code(original, x)
        if mixer is None:
            return operation(x, *args, **kwargs)
        return answer(cast("Mixer", mixer), operation, namespace, x, *args, **kwargs)

    uncompiled: Any = torch.compiler.disable(routed)  # type: ignore[no-untyped-call]
    uncompiled.routed = original
    return uncompiled


def _choose_code(operation: Any, x: Tensor) -> Any:
    """Return the code of an operation on a tensor: on a CPU it is torch's.

    transformers prefers the kernels of a package wherever it can be imported, and they run on a GPU alone.
    """
    return inspect.unwrap(operation) if x.device.type == "cpu" else operation


def _convolve(
    mixer: Mixer,
    original: Any,
    _namespace: dict[str, Any],
    x: Tensor,  # [1, C, P]
    weight: Tensor,  # [C, K]
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> Tensor:
    """Answer a short convolution.

    The activation is applied to [P, C]: an elementwise kernel gives the tail of a row other bits.
    """

    def run(row: Tensor) -> Tensor:
        out: Tensor = original(row[None], weight, bias)[0]
        return out

    out = mixer.convolve(current_layer.get(), run, x[0], weight.shape[-1] - 1).T.contiguous()
    if activation is not None:
        out = ACT2FN[activation](out)
    return out.T[None]


def _delta_rule(
    mixer: Mixer,
    original: Any,
    _namespace: dict[str, Any],
    query: Tensor,  # [1, P, Hk, Dk]
    key: Tensor,
    value: Tensor,  # [1, P, Hv, Dv]
    *,
    g: Tensor,  # [1, P, Hv], or [1, P, Hv, Dk] in Kimi's
    beta: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, None]:
    """Answer a gated delta rule: S ← S · exp(g) + β · k (v − (S · exp(g))ᵀ k)ᵀ, with the output Sᵀ q / √Dk."""

    def run(rows: Rows, first: Tensor | None) -> tuple[Tensor, Tensor]:
        q, k, v, decay, rate, _ = rows
        out, last = original(
            q,
            k,
            v,
            g=decay,
            beta=rate,
            initial_state=first,
            output_final_state=True,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        )
        return out, last

    def step(rows: Rows, state: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v, _, rate, kept = (row[:, 0].to(state.dtype) for row in rows)
        if use_qk_l2norm_in_kernel:
            q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
        q, k = (x.repeat_interleave(v.shape[1] // x.shape[1], 1) for x in (q, k))
        state = state * kept.reshape(*kept.shape[:2], -1, 1)
        change = (v - (state * k[..., None]).sum(-2)) * rate[..., None]
        state = state + k[..., None] * change[..., None, :]
        out = (state * (q * q.shape[-1] ** -0.5)[..., None]).sum(-2)
        return out.to(value.dtype)[:, None], state

    # exp(g) is taken of all tokens at once: the bits of an elementwise kernel depend on its tail
    inputs = tuple(x[0] for x in (query, key, value, g, beta, g.exp()))
    recurrence = Recurrence(run, step, neutral=(3, 4), products=3)
    return mixer.scan(current_layer.get(), recurrence, inputs)[None], None


def _mamba2(
    mixer: Mixer,
    original: Any,
    namespace: dict[str, Any],
    x: Tensor,  # [1, P, H, D]
    dt: Tensor,  # [1, P, H]
    A: Tensor,
    B: Tensor,  # [1, P, G, N]
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **_: Any,
) -> Tensor:
    """Answer Mamba2. Step sizes are finished here, so that those of padding are exactly 0. They are as exact as their
    bias, which is float32 in a model of half precision, because they enter an exponential."""
    dt = dt if dt_bias is None else dt + dt_bias
    dt = torch.clamp(softplus(dt) if dt_softplus else dt, *dt_limit)

    def run(rows: Rows, first: Tensor | None) -> tuple[Tensor, Tensor]:
        inner, steps, b, c = rows
        out, last = original(
            inner,
            steps,
            A,
            b,
            c,
            chunk_size=min(chunk_size, CHUNK),
            D=D,
            initial_states=first,
            return_final_states=True,
        )
        return out, last

    def step(rows: Rows, first: Tensor) -> tuple[Tensor, Tensor]:
        inner, steps, b, c = (row[:, 0] for row in rows)
        state, width = first.clone(), inner.shape[2]
        update = _choose_code(namespace["mamba2_selective_state_update"], inner)
        out = update(
            state,
            inner,
            steps[..., None].expand(-1, -1, width),
            A[:, None, None].expand(-1, *first.shape[2:]),
            b,
            c,
            None if D is None else D[:, None].expand(-1, width),
        )
        return out[:, None], state

    inputs = tuple(rows[0] for rows in (x, dt, B, C))
    recurrence = Recurrence(run, step, neutral=(1,), products=2)
    return mixer.scan(current_layer.get(), recurrence, inputs)[None]


ANSWERS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _convolve,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _mamba2,
}
"""The operations of transformers' model files that Etude answers."""
