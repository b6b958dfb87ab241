"""Router replay in a learner: passes over a batch take the experts that its column `routes` names.

r2   the learner's own pass before the updates records the column
r3   the sampler has recorded it, and it comes with the rollouts
"""

from __future__ import annotations

from torch import Tensor

from etude.batch import Batch
from etude.errors import BatchError
from etude.models import Model
from etude.models.routes import RouteShape
from etude.train.config import TrainConfig


class RouterReplay:
    """The routes that a learner records and replays, if its options say so."""

    def __init__(self, model: Model, config: TrainConfig, option: str) -> None:
        """option: the configuration section that errors name."""
        self._mode = config.router_replay
        self._option = f"{option}.router_replay"
        self.shape: RouteShape | None = None
        """The size of the routes; None if nothing is replayed."""
        if self._mode != "none":
            self.shape = model.control_routers(f"{self._option}={self._mode}")

    def check(self, batch: Batch) -> None:
        """Refuse routes of another model, and rollouts without routes where the sampler's are replayed."""
        if self.shape is not None and batch.routes is not None:
            self.shape.check(batch.routes)
        elif self._mode == "r3" and batch.num_rows:
            raise BatchError(
                f"`{self._option}=r3` takes routes from the sampler, and none of these rollouts has them: they were "
                f"sampled without this option. Sample again, or set `{self._option}=r2`."
            )

    def blank_column(self, batch: Batch) -> Tensor:
        """[T, L · k]: return the routes of a batch before any are recorded."""
        assert self.shape is not None, "only a learner that replays records routes"
        return self.shape.blank(batch.num_tokens)
