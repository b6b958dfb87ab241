"""Steps that torch.compile makes: the same gradient, for the trainer alone, and refused where there is no compiler."""

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
CLOSE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.05}


def found(model: Model) -> list[torch.Tensor]:
    """Hidden states, and the gradient of each trained weight."""
    hidden = model.hidden(PACK.ids, PACK.positions, PackedAttention(PACK))
    weights = [weight for _, weight in model.trained_weights() if weight is not model.head_weight]
    told = hidden.double() * torch.cos(torch.arange(hidden.numel()).view_as(hidden))
    return [hidden.detach(), *torch.autograd.grad(told.sum(), weights)]


@pytest.mark.soak
@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "adapted", "checkpointed"])
def test_the_gradient_is_that_of_the_steps_written_by_hand(dtype: torch.dtype, kind: str) -> None:
    family = kind if kind.startswith("qwen") else "llama"
    by_hand, by_torch = (create(tiny_config(50, family=family), seed=1, dtype=dtype) for _ in range(2))
    if kind == "adapted":
        require("lora")
        by_hand, by_torch = (adapt(model, LoraAdapterConfig(rank=4), seed=0) for model in (by_hand, by_torch))
    by_torch.compile()
    by_hand.activation_checkpointing = by_torch.activation_checkpointing = "full" if kind == "checkpointed" else "none"
    for ours, theirs in zip(found(by_hand), found(by_torch), strict=True):
        scale = float(ours.abs().max())
        torch.testing.assert_close(theirs, ours, rtol=CLOSE[dtype], atol=CLOSE[dtype] * max(scale, 1e-30))
    with torch.no_grad():
        told = by_torch.hidden(PACK.ids, PACK.positions, PackedAttention(PACK))
    torch.testing.assert_close(told, found(by_torch)[0], rtol=CLOSE[dtype], atol=CLOSE[dtype])
    with torch.inference_mode():
        inferred, plain = (m.hidden(PACK.ids, PACK.positions, PackedAttention(PACK)) for m in (by_torch, by_hand))
    assert torch.equal(inferred, plain), "an engine that shares the model runs the steps written by hand"


def test_a_family_that_runs_by_itself_is_refused() -> None:
    with pytest.raises(ConfigError, match="This is a gpt2 model, which runs transformers' own code"):
        create(tiny_config(50, family="gpt2"), seed=0).compile()


def test_without_a_compiler_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    compile_layer_ops.cache_clear()
    torch._dynamo.reset()
    told = r"`train.compile` needs a compiler that torch can call, and a small trial"
    with inductor.patch({"cpp.cxx": ("no-such-compiler",)}), pytest.raises(ConfigError, match=told):
        create(tiny_config(50), seed=0).compile()
