"""Rewards: what an answer earns, from its text alone; and the judge, which computes them whatever they do.

judge = Judge(REWARDS["gsm8k"](), Judging(on_error="stop"))
verdict = await judge.judge(task, "… #### 42")
"""

from __future__ import annotations

from etude.rewards.base import RewardFunction, Score, score_of
from etude.rewards.choice import MultipleChoice
from etude.rewards.combined import PARTS, Combined
from etude.rewards.countdown import Countdown
from etude.rewards.environment import FromEnvironment
from etude.rewards.function import Function
from etude.rewards.gsm8k import Gsm8k
from etude.rewards.instructions import Instructions
from etude.rewards.judge import Judge, Judging
from etude.rewards.maths import Math
from etude.rewards.model_judge import ModelJudge
from etude.rewards.nothing import Nothing
from etude.rewards.program import Program
from etude.rewards.scored import ScoredByModel
from etude.rewards.text import F1, Exact, Format, Regex
from etude.rewards.verdict import Verdict

__all__ = [
    "F1",
    "PARTS",
    "REWARDS",
    "Combined",
    "Countdown",
    "Exact",
    "Format",
    "FromEnvironment",
    "Function",
    "Gsm8k",
    "Instructions",
    "Judge",
    "Judging",
    "Math",
    "ModelJudge",
    "MultipleChoice",
    "Nothing",
    "Program",
    "Regex",
    "RewardFunction",
    "Score",
    "ScoredByModel",
    "Verdict",
    "score_of",
]

REWARDS: dict[str, type[RewardFunction]] = {
    **PARTS,
    "combined": Combined,
    "nothing": Nothing,
    "environment": FromEnvironment,
}
"""Every reward that a run may be given by name; those of `PARTS` may be parts of `combined`."""
