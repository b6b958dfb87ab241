"""The routers' choices of experts: recorded in one pass, given to another, and refused where they cannot be."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from etude.errors import ConfigError
from etude.models import Model, PackedAttention
from etude.models.routes import Routes, RouteShape, use_routes
from tests.families import family_model
from tests.models.packs import FOREST, pack_of

ROUTED = ["qwen3_moe", "gpt_oss", "deepseek_v3", "mixtral"]


def run(model: Model, routes: Routes | None) -> list[Tensor]:
    """Return the log-probs of a packed tree, and the gradients of their sum."""
    pack = pack_of(FOREST)
    model.module.zero_grad()
    with use_routes(routes):
        hidden = model.hidden(pack.ids, pack.positions, PackedAttention(pack))
    logp = model.logits(hidden).log_softmax(-1).gather(1, pack.ids[:, None].long())
    logp.sum().backward()  # type: ignore[no-untyped-call]
    return [logp.detach(), *(weight.grad for weight in model.parameters() if weight.grad is not None)]


def others(routes: Routes) -> Tensor:
    """Return other experts than these, for each token."""
    return (routes.recorded() + 1) % routes.shape.experts


@pytest.mark.parametrize("name", ROUTED)
def test_own_routes_change_no_bit_and_others_are_followed(name: str) -> None:
    model = family_model(name)
    expected = run(model, None)
    shape = model.control_routers("train.router_replay=r2")
    recorded = Routes(shape)
    again = run(model, recorded)
    assert all(map(torch.equal, expected, again))
    for checkpointing in ("none", "selective", "full"):
        model.activation_checkpointing = checkpointing  # type: ignore[assignment]
        own = Routes(shape, recorded.recorded(), records=False)
        assert all(map(torch.equal, expected, run(model, own)))
        given = Routes(shape, others(recorded))
        changed = run(model, given)
        assert torch.equal(given.recorded(), others(recorded)) and not torch.equal(changed[0], expected[0])


def test_a_token_without_routes_is_left_to_the_router() -> None:
    model = family_model("qwen3_moe")
    shape = model.control_routers("train.router_replay=r2")
    recorded = Routes(shape)
    expected = run(model, recorded)
    partly = shape.blank(len(recorded.recorded()))
    partly[::2] = recorded.recorded()[::2]
    assert all(map(torch.equal, expected, run(model, Routes(shape, partly))))


def test_a_copy_has_routers_of_its_own() -> None:
    model = family_model("qwen3_moe")
    shape = model.control_routers("train.router_replay=r2")
    copy = model.copy()
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    changed, kept = Routes(shape), Routes(shape)
    run(model, changed)
    run(copy, kept)
    assert not torch.equal(changed.recorded(), kept.recorded())


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("phimoe", r"has routers \(PhimoeTopKRouter\) that do not choose by one topk over all experts"),
        ("gemma4_text", "has no mixture of experts"),
    ],
)
def test_models_without_such_routers_are_refused(name: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"`train.router_replay=r2` .* this {name} model {reason}. Leave it out"):
        family_model(name).control_routers("train.router_replay=r2")


def test_more_experts_take_more_bytes() -> None:
    few, many = RouteShape((0, 3), 2, 255), RouteShape((0, 3), 2, 256)
    assert [few.blank(1).tolist(), many.blank(1).tolist()] == [[[255] * 4], [[-1] * 4]]
    assert (few.dtype, many.dtype) == (torch.uint8, torch.int16)
