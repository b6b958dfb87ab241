"""Layer operations compiled by torch.compile: the same gradients, in training only, and refused without a compiler."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch._inductor import config as inductor

from etude.errors import ConfigError
from etude.models import LoraAdapterConfig, Model, PackedAttention, adapt, create, tiny_config
from etude.models.compiled_ops import compile_layer_ops
from tests.components import require
from tests.models.packs import FOREST, pack_of

PACK = pack_of(FOREST)
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.05}


def outputs_and_gradients(model: Model) -> list[torch.Tensor]:
    """Return hidden states, and the gradient of each trained weight."""
    hidden = model.hidden(PACK.ids, PACK.positions, PackedAttention(PACK))
    weights = [weight for _, weight in model.trained_weights() if weight is not model.head_weight]
    loss = hidden.double() * torch.cos(torch.arange(hidden.numel()).view_as(hidden))
    return [hidden.detach(), *torch.autograd.grad(loss.sum(), weights)]


@pytest.mark.soak
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "adapted", "checkpointed"])
def test_compiled_operations_have_the_gradients_of_the_hand_written_ones(dtype: torch.dtype, kind: str) -> None:
    family = kind if kind.startswith("qwen") else "llama"
    hand_written, compiled = (create(tiny_config(50, family=family), seed=1, dtype=dtype) for _ in range(2))
    if kind == "adapted":
        require("lora")
        hand_written, compiled = (adapt(model, LoraAdapterConfig(rank=4), seed=0) for model in (hand_written, compiled))
    compiled.compile()
    hand_written.activation_checkpointing = compiled.activation_checkpointing = (
        "full" if kind == "checkpointed" else "none"
    )
    for ours, theirs in zip(outputs_and_gradients(hand_written), outputs_and_gradients(compiled), strict=True):
        scale = float(ours.abs().max())
        torch.testing.assert_close(theirs, ours, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype] * max(scale, 1e-30))
    with torch.no_grad():
        compiled_hidden = compiled.hidden(PACK.ids, PACK.positions, PackedAttention(PACK))
    torch.testing.assert_close(
        compiled_hidden, outputs_and_gradients(compiled)[0], rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype]
    )
    with torch.inference_mode():
        inferred, plain = (m.hidden(PACK.ids, PACK.positions, PackedAttention(PACK)) for m in (compiled, hand_written))
    assert torch.equal(inferred, plain), "an engine that shares the model runs the hand-written operations"


def test_a_family_with_transformers_own_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"a gpt2 model, which runs transformers' own code. Set `train.engine=fsdp`"):
        create(tiny_config(50, family="gpt2"), seed=0).compile()


def test_compilation_without_a_compiler_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    compile_layer_ops.cache_clear()
    torch._dynamo.reset()
    compiled_hidden = r"`train.compile` needs a compiler that torch can call, and a small trial"
    with inductor.patch({"cpp.cxx": ("no-such-compiler",)}), pytest.raises(ConfigError, match=compiled_hidden):
        create(tiny_config(50), seed=0).compile()
