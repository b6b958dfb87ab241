"""The losses, by name: policy losses, which use an advantage, and supervised losses, which learn from data."""

from __future__ import annotations

from etude.algorithms.base import Loss, PolicyLoss
from etude.algorithms.losses.clip import CISPO, PPO, SAPO
from etude.algorithms.losses.covariance import ClipCov, KLCov
from etude.algorithms.losses.decoupled_ppo import DecoupledPPO
from etude.algorithms.losses.distill import TopKDistillation
from etude.algorithms.losses.preference import DPO, RewardModelLoss
from etude.algorithms.losses.reinforce import DRO, REINFORCE, GPGLoss
from etude.algorithms.losses.sequence import GMPO, GSPO, VESPO
from etude.algorithms.losses.supervised import SFT, ValueLoss
from etude.algorithms.losses.trust_region import DPPO, IPO, M2PO, FlashReinforce

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
    "gpg": GPGLoss,
    "decoupled_ppo": DecoupledPPO,
    "vespo": VESPO,
    "m2po": M2PO,
    "ipo": IPO,
    "flash_reinforce": FlashReinforce,
}

SUPERVISED: dict[str, type[Loss]] = {
    "sft": SFT,
    "dpo": DPO,
    "reward_model": RewardModelLoss,
    "value": ValueLoss,
    "distill_topk": TopKDistillation,
}
