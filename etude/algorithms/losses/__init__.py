"""The losses, by name: those that follow an advantage, and those that learn from what is written down."""

from __future__ import annotations

from etude.algorithms.base import Loss, PolicyLoss
from etude.algorithms.losses.clip import CISPO, PPO, SAPO
from etude.algorithms.losses.covariance import ClipCov, KLCov
from etude.algorithms.losses.distill import TopKDistillation
from etude.algorithms.losses.pairs import DPO, RewardModel
from etude.algorithms.losses.plain import DRO, GPG, REINFORCE
from etude.algorithms.losses.proximal import DecoupledPPO
from etude.algorithms.losses.sequence import GMPO, GSPO, VESPO
from etude.algorithms.losses.supervised import SFT, Value
from etude.algorithms.losses.trust import DPPO, M2PO

__all__ = ["LOSSES", "SUPERVISED"]

LOSSES: dict[str, type[PolicyLoss]] = {
    "ppo": PPO,
    "gspo": GSPO,
    "cispo": CISPO,
    "sapo": SAPO,
    "gmpo": GMPO,
    "dppo": DPPO,
    "clip_cov": ClipCov,
    "kl_cov": KLCov,
    "dro": DRO,
    "reinforce": REINFORCE,
    "gpg": GPG,
    "decoupled_ppo": DecoupledPPO,
    "vespo": VESPO,
    "m2po": M2PO,
}

SUPERVISED: dict[str, type[Loss]] = {
    "sft": SFT,
    "dpo": DPO,
    "reward_model": RewardModel,
    "value": Value,
    "distill_topk": TopKDistillation,
}
