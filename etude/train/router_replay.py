"""Router replay in a learner: passes over a batch take the experts that its column `routes` names.

r2   the learner's own pass before the updates records the column
r3   the sampler has recorded it, and it comes with the rollouts

The same column has the loads of experts in the whole update batch, which the balance loss needs before the first pass.
"""

from __future__ import annotations

from torch import Tensor

from etude.algorithms.view import Ranks
from etude.batch import Batch
from etude.errors import BatchError, ConfigError
from etude.models import Model
from etude.models.balance import Scoring
from etude.models.routes import RouteShape
from etude.train.balance_loss import BalanceLoss
from etude.train.config import PolicyTrainConfig, TrainConfig, refuse_unreplayed_balance

BIASES = ("e_score_correction_bias", "expert_bias")
"""The names of the numbers that routers add to their scores to balance experts, and only to choose by."""


class RouterReplay:
    """The routes that a learner records and replays, if its options say so."""

    def __init__(self, model: Model, config: TrainConfig, option: str) -> None:
        """config: only that of a policy can say so. option: the configuration section that errors name."""
        policy = config if isinstance(config, PolicyTrainConfig) else PolicyTrainConfig()
        self._mode = policy.router_replay
        self._option = f"{option}.router_replay"
        self.shape: RouteShape | None = None
        """The size of the routes; None if nothing is replayed."""
        if self._mode != "none":
            self.shape = model.control_routers(f"{self._option}={self._mode}")
        refuse_unreplayed_balance(policy, option)
        self._rate = policy.balance_rate
        self._scoring = None if policy.balance == "none" else _find_scoring(model, self.shape, option)

    def check(self, batch: Batch) -> None:
        """Refuse routes of another model, and rollouts without routes where the sampler's are replayed."""
        if self.shape is not None and batch.routes is not None:
            self.shape.check(batch.routes)
        elif self._mode == "r3" and batch.num_rows:
            raise BatchError(
                f"`{self._option}=r3` takes routes from the sampler, and none of these rollouts has them: they were "
                f"sampled without this option. Sample again, or set `{self._option}=r2`."
            )

    def balance(self, batch: Batch, ranks: Ranks, scale: float) -> BalanceLoss | None:
        """Return the balance loss of an update batch; None without this loss. All ranks call it together.

        scale: the factor of the objective's loss in the backward pass.
        """
        if self.shape is None or self._scoring is None:
            return None
        if batch.routes is None and batch.num_rows:
            raise BatchError(
                "`balance=loss` reads how many tokens each expert gets from the column `routes`, and this batch has "
                "none. Compute it with `annotate` before the update."
            )
        return BalanceLoss(batch, self.shape, self._scoring, ranks, self._rate * scale)

    def blank_column(self, batch: Batch) -> Tensor:
        """[T, L · k]: return the routes of a batch before any are recorded."""
        assert self.shape is not None, "only a learner that replays records routes"
        return self.shape.blank(batch.num_tokens)


def _find_scoring(model: Model, shape: RouteShape | None, option: str) -> Scoring:
    """Return the function of the scores that a balance loss is made of; refuse a model that has another balance."""
    family = model.module.config.model_type
    names = (name for named in (model.module.named_buffers(), model.module.named_parameters()) for name, _ in named)
    bias = next((name for name in names if name.rsplit(".", 1)[-1] in BIASES), None)
    if bias is not None:
        raise ConfigError(
            f"`{option}.balance=loss` is for routers without a bias, and this {family} model has `{bias}`, by which "
            f"its experts were balanced. Set `{option}.balance=none`: the bias then stays as it is."
        )
    if shape is None or shape.scoring is None:
        raise ConfigError(
            f"`{option}.balance=loss` needs routers that score experts by one linear map, and those of this {family} "
            f"model do not. Set `{option}.balance=none`."
        )
    return shape.scoring
