"""Reward functions, which score the text of an answer, and the judge, which runs them and contains their failures.

judge = Judge(REWARDS["gsm8k"](), Judging(on_error="stop"))
verdict = await judge.judge(task, "… #### 42")
"""

from __future__ import annotations

from etude.rewards.base import RewardFunction, Score, parse_score
from etude.rewards.by_source import SOURCE_REWARDS, BySourceReward
from etude.rewards.combined import COMBINABLE_REWARDS, CombinedReward
from etude.rewards.constant import EnvironmentReward, NoReward
from etude.rewards.countdown import Countdown
from etude.rewards.function import FunctionReward
from etude.rewards.gsm8k import Gsm8k
from etude.rewards.instructions import Instructions
from etude.rewards.judge import Judge, JudgingConfig
from etude.rewards.maths import Math
from etude.rewards.model_judge import ModelJudge
from etude.rewards.multiple_choice import MultipleChoice
from etude.rewards.reward_model import RewardModelScore
from etude.rewards.sandbox import Code
from etude.rewards.text import F1, ExactMatch, Format, Regex
from etude.rewards.verdict import Verdict

__all__ = [
    "COMBINABLE_REWARDS",
    "F1",
    "REWARDS",
    "BySourceReward",
    "Code",
    "CombinedReward",
    "Countdown",
    "EnvironmentReward",
    "ExactMatch",
    "Format",
    "FunctionReward",
    "Gsm8k",
    "Instructions",
    "Judge",
    "JudgingConfig",
    "Math",
    "ModelJudge",
    "MultipleChoice",
    "NoReward",
    "Regex",
    "RewardFunction",
    "RewardModelScore",
    "Score",
    "Verdict",
    "parse_score",
]

REWARDS: dict[str, type[RewardFunction]] = {**SOURCE_REWARDS, "by_source": BySourceReward}
"""Every reward that a run can choose by name. Those of `COMBINABLE_REWARDS` can also be parts of `combined`."""
