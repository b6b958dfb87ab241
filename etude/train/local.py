"""The engine of one rank: whole weights on one device, which an embedded engine may share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

from etude.algorithms.view import Ranks, SingleRank
from etude.batch import Batch, Pack
from etude.errors import ConfigError
from etude.images.pixel_cache import PixelCache
from etude.models import Model
from etude.models.routes import RouteShape
from etude.observe import get_logger
from etude.train.config import TrainConfig
from etude.train.forward import ForwardPass, ReferenceModel
from etude.train.optim import PRECISIONS, MixedPrecisionOptimizer


class LocalBackend:
    """A `Backend` whose forward passes read the model's own parameters.

    In half precision these are a copy of float32 weights that the optimizer keeps; see `MixedPrecisionOptimizer`.
    """

    is_sharded = False

    def __init__(
        self,
        model: Model,
        config: TrainConfig,
        *,
        temperature: float,
        pack: Callable[[Batch], Pack],
        reference: ReferenceModel | None = None,
        option: str = "train",
        routes: RouteShape | None = None,
        pixels: PixelCache | None = None,
    ) -> None:
        if model.dtype != PRECISIONS[config.precision]:
            raise ConfigError(
                f"`{option}.precision={config.precision}` computes in {PRECISIONS[config.precision]}, and the model "
                f"was loaded in {model.dtype}. Load it in that dtype, or choose another precision."
            )
        self.model = model
        self.dtype = model.dtype
        if config.compile is True:
            model.compile()
        elif config.compile == "auto" and model.device.type == "cuda":
            compile_if_possible(model, option)
        model.activation_checkpointing = config.activation_checkpointing
        self.ranks: Ranks = SingleRank()
        self.all_ranks: Ranks = self.ranks
        self.ranks_per_rollout = 1
        self.forward = ForwardPass(model, pack, temperature, reference, routes=routes, pixels=pixels)
        self.optimizer = MixedPrecisionOptimizer(
            model.trained_weights(), config, model.take_float32_weights(), option=option
        )

    @contextmanager
    def micro_pass(self, wanted: frozenset[str], shows_images: bool = False, *, backward: bool) -> Iterator[None]:
        """Frame one micro-batch."""
        del wanted, shows_images, backward
        yield

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a micro-batch's loss."""
        if loss.requires_grad:
            (loss * float(self.optimizer.scale)).backward()  # type: ignore[no-untyped-call]

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each weight, in the dtype of forward passes: the tensors themselves."""
        return ((name, weight.detach()) for name, weight in self.model.named_weights())

    def merged_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each weight of the equal model without adapters."""
        return self.model.merged_weights()

    def adapter_weights(self) -> dict[str, Tensor]:
        """Return the adapters' weights."""
        return self.model.adapter_weights()


def compile_if_possible(model: Model, option: str) -> bool:
    """Compile a model's small steps, and return true; if that is refused, log the reason in one line."""
    try:
        model.compile()
    except ConfigError as error:
        get_logger("train").info("`%s.compile=auto` compiles nothing here. %s", option, error)
        return False
    return True
