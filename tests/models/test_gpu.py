"""Each family on a GPU has the log-probs and gradients of a CPU: in float32, for a pack with shared prompts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from etude.batch import Pack
from etude.models import ActivationCheckpointing, Model, PackedAttention, create, tiny_config, token_logp
from etude.models.tiny import FAMILIES
from tests.models.packs import FOREST, pack_of

pytestmark = pytest.mark.gpu


def logp_and_gradients(model: Model, pack: Pack) -> tuple[Tensor, dict[str, Tensor]]:
    hidden = model.hidden(pack.ids, pack.positions, PackedAttention(pack))
    logp = token_logp(model, hidden, pack.ids.long())
    logp.sum().backward()
    return logp.detach().cpu(), {
        name: weight.grad.cpu() for name, weight in model.trained_weights() if weight.grad is not None
    }


def on_gpu(pack: Pack) -> Pack:
    return Pack(**{name: getattr(pack, name).cuda() for name in ("ids", "positions", "offsets", "parent", "source")})


@pytest.mark.parametrize("kind", ["none", "offload", "selective"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_gpu_computes_what_a_cpu_does(family: str, kind: ActivationCheckpointing) -> None:
    pack = pack_of(FOREST)
    here = create(tiny_config(50, family=family), seed=0, dtype=torch.float32)
    there = here.copy(device="cuda")
    there.activation_checkpointing = kind
    logp, gradients = logp_and_gradients(there, on_gpu(pack))
    expected_logp, expected = logp_and_gradients(here, pack)
    torch.testing.assert_close(logp, expected_logp, atol=1e-4, rtol=1e-4)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        scale = float(expected[name].abs().max())
        torch.testing.assert_close(gradient, expected[name], atol=1e-3 * scale + 1e-7, rtol=1e-3, msg=name)
