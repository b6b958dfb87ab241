"""The least number of rollouts in a group for each advantage."""

from __future__ import annotations

from etude.algorithms import ADVANTAGES, Advantage
from etude.algorithms.advantages.pass_at_k import PKPO
from etude.recipes.run.config import Run
from etude.recipes.run.rules.group_size import min_group_size
from tests.recipes.runs import composed
from tests.sweeps import sweep

OPTIONS = ("model.path=model", "data.train=[tasks.jsonl]")


@sweep(
    ("advantage", "wanted"),
    [
        (ADVANTAGES["grpo"](), 2),
        (ADVANTAGES["dr_grpo"](), 2),
        (ADVANTAGES["rloo"](), 2),
        (ADVANTAGES["pass_at_k"](), 2),
        (PKPO(k=4), 4),
        (ADVANTAGES["reinforce++"](), 1),
        (ADVANTAGES["remax"](), 1),
        (ADVANTAGES["gae"](), 1),
    ],
)
def test_a_group_needs_the_least_size_of_its_advantage(advantage: Advantage, wanted: int) -> None:
    for more, least in (((), wanted), (("collect.group_size=1",), 1)):  # a lower request is another error
        size = composed(Run, (*OPTIONS, *more)).collect.group_size
        assert min_group_size(advantage, size) == least
