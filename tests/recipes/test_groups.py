"""How few rollouts of a group an advantage can compare."""

from __future__ import annotations

import pytest

from etude.config.compose import compose
from etude.recipes.groups import min_group
from etude.recipes.run import Run


@pytest.mark.parametrize(
    ("advantage", "wanted"),
    [
        ("grpo", 2),
        ("dr_grpo", 2),
        ("rloo", 2),
        ("pass_at_k", 2),
        ("pkpo advantage.k=4", 4),
        ("reinforce++", 1),
        ("remax", 1),
        ("gae", 1),
    ],
)
def test_a_group_needs_as_many_as_its_advantage_compares(advantage: str, wanted: int) -> None:
    options = ["model.path=model", "data.train=[tasks.jsonl]", *f"advantage={advantage}".split()]
    assert min_group(compose(Run, options)) == wanted
    assert min_group(compose(Run, [*options, "collect.group_size=1"])) == 1, "what is asked for is not a failure"
