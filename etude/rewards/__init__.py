"""Rewards: what an answer earns, from its text alone; and the judge, which computes them whatever they do.

judge = Judge(REWARDS["gsm8k"](), Judging(on_error="stop"))
verdict = await judge.judge(task, "… #### 42")
"""

from __future__ import annotations

from etude.rewards.base import RewardFunction, Score, score_of
from etude.rewards.environment import FromEnvironment
from etude.rewards.function import Function
from etude.rewards.gsm8k import Gsm8k
from etude.rewards.judge import Judge, Judging
from etude.rewards.maths import Math
from etude.rewards.nothing import Nothing
from etude.rewards.text import F1, Exact, Format, Regex
from etude.rewards.verdict import Verdict

__all__ = [
    "F1",
    "REWARDS",
    "Exact",
    "Format",
    "FromEnvironment",
    "Function",
    "Gsm8k",
    "Judge",
    "Judging",
    "Math",
    "Nothing",
    "Regex",
    "RewardFunction",
    "Score",
    "Verdict",
    "score_of",
]

REWARDS: dict[str, type[RewardFunction]] = {
    "exact": Exact,
    "regex": Regex,
    "f1": F1,
    "format": Format,
    "gsm8k": Gsm8k,
    "math": Math,
    "function": Function,
    "nothing": Nothing,
    "environment": FromEnvironment,
}
