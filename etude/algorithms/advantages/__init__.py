"""The advantage estimators, by name."""

from __future__ import annotations

from etude.algorithms.advantages.batch import GDPO, BatchMean, BatchStd, GPGAdvantage, ReinforcePPBaseline
from etude.algorithms.advantages.group import GRPO, OPO, OPOB, RLOO, DrGRPO, MaxRL, ReMax
from etude.algorithms.advantages.pass_at_k import PKPO, PassAtK
from etude.algorithms.advantages.role import RAE
from etude.algorithms.advantages.token import GAE, OnPolicyDistillation, OptimalTokenBaseline, ReinforcePP
from etude.algorithms.advantages.turns import MTGRPO, GiGPO, StepRewardAdvantage, TurnBaseline, TurnBaselineBiased
from etude.algorithms.base import Advantage

__all__ = ["ADVANTAGES"]

ADVANTAGES: dict[str, type[Advantage]] = {
    "gae": GAE,
    "grpo": GRPO,
    "dr_grpo": DrGRPO,
    "batch_mean": BatchMean,
    "batch_std": BatchStd,
    "rloo": RLOO,
    "reinforce++": ReinforcePP,
    "reinforce++_baseline": ReinforcePPBaseline,
    "remax": ReMax,
    "opo": OPO,
    "gpg": GPGAdvantage,
    "maxrl": MaxRL,
    "gdpo": GDPO,
    "pass_at_k": PassAtK,
    "pkpo": PKPO,
    "opob": OPOB,
    "token_baseline": OptimalTokenBaseline,
    "step_rewards": StepRewardAdvantage,
    "turn_baseline": TurnBaseline,
    "turn_baseline_biased": TurnBaselineBiased,
    "gigpo": GiGPO,
    "mt_grpo": MTGRPO,
    "rae": RAE,
    "distillation": OnPolicyDistillation,
}
