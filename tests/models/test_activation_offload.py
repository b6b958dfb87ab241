"""`activation_checkpointing=offload`: only the input of each layer is copied to CPU memory, and copies are exact."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.reductions import StorageWeakRef

from etude.data.pack import pack_prefix_tree
from etude.models import ActivationCheckpointing, Model, PackedAttention, checkpointing
from etude.models.checkpointing import OffloadedTensor, checkpoint_layer
from etude.train.device_mesh import ShardMeshes
from etude.train.fsdp import ShardedModel
from tests.recipes.ranked import adapted_model, unfused_model
from tests.train.tasks import model, rollouts

LAYERS = 2
PACK = pack_prefix_tree(rollouts())


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The tensors that are copied to CPU memory."""
    tensors = list[Tensor]()

    class Recorded(OffloadedTensor):
        def __init__(self, tensor: Tensor) -> None:
            tensors.append(tensor.detach().clone())
            super().__init__(tensor)

    monkeypatch.setattr(checkpointing, "OffloadedTensor", Recorded)
    return tensors


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def gradients(policy: Model, kind: ActivationCheckpointing) -> dict[str, Tensor]:
    policy.activation_checkpointing = kind
    policy.hidden(PACK.ids, PACK.positions, PackedAttention(PACK)).square().sum().backward()
    result = {name: weight.grad for name, weight in policy.trained_weights() if weight.grad is not None}
    for weight in policy.parameters():
        weight.grad = None
    return result


@pytest.mark.parametrize("policy", [model, adapted_model, unfused_model])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gradients_are_the_same_bits(policy: Callable[[str], Model], precision: str, copied: list[Tensor]) -> None:
    """Only one input of each layer is copied: no weight, no rotary angle."""
    policy_model = policy(precision)
    expected, result = gradients(policy_model, "none"), gradients(policy_model, "offload")
    assert expected.keys() == result.keys() and all(torch.equal(result[name], expected[name]) for name in expected)
    assert [tensor.squeeze(0).shape for tensor in copied] == [
        (len(PACK.ids), policy_model.head_weight.shape[1])
    ] * LAYERS


@pytest.mark.usefixtures("one_rank")
def test_weights_that_fsdp_gathered_are_not_copied(copied: list[Tensor]) -> None:
    policy_model, width = unfused_model("fp32"), unfused_model("fp32").head_weight.shape[1]
    sharded = ShardedModel(policy_model, ShardMeshes.from_mesh(init_device_mesh("cpu", (1,))))
    policy_model.activation_checkpointing = "offload"

    def compute() -> dict[str, Tensor]:
        return {"hidden": policy_model.hidden(PACK.ids, PACK.positions, PackedAttention(PACK)) * 1}

    with sharded.micro_pass(backward=True):
        sharded.backward(sharded.run(compute)["hidden"].square().sum())
    assert [tensor.squeeze(0).shape for tensor in copied] == [(len(PACK.ids), width)] * LAYERS


def test_the_input_is_released_on_the_device() -> None:
    x = torch.rand(5, requires_grad=True)
    hidden = x * 2
    storage = StorageWeakRef(hidden.untyped_storage())  # type: ignore[no-untyped-call]
    out = checkpoint_layer(torch.sin, "offload")(hidden)
    del hidden
    assert storage.expired()  # type: ignore[no-untyped-call]
    out.sum().backward()
    assert x.grad is not None and torch.equal(x.grad, 2 * (2 * x.detach()).cos())
