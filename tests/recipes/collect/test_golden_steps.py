"""Without staleness, steps equal those of a golden file: tasks, rollouts, rewards, drops and the order of tasks.

`python -m tests.recipes.collect.test_golden_steps` writes the file again, after an intended change.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager, closing
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest

from etude.recipes.collect.collector import Collector
from etude.recipes.collect.rollouts import StepGroups
from etude.store import Journal, TaskDropped, open_store
from tests.recipes.collect.test_sources import ECHO, Scripted, group_records, sourced
from tests.recipes.test_replays import Saved, agents, judged

FILE = Path(__file__).with_name("golden_steps.json")
STEPS = 4
ENGINE: dict[str, dict[str, Any]] = {
    "one answer": {"sampler": "curriculum", "refill": 1, "retries": 1, "group_size": 2, "greedy": True},
    "many turns": {"sampler": "shuffled", "refill": 2, "retries": 0, "group_size": 3, "env": ECHO},
}


def open_source(case: str, store: Journal) -> AbstractContextManager[Collector]:
    """Return the source of a case, over a journal."""
    if case == "agents":
        return agents(store, Saved())
    return sourced(Scripted(), store, judged, **ENGINE[case])


def run_steps(case: str) -> list[dict[str, Any]]:
    """Return what each step of a case trained on and left out."""
    with closing(open_store()) as store, open_source(case, store) as source:
        return [_describe(step, source.next(step), source.mark()[0], store) for step in range(1, STEPS + 1)]


def _describe(step: int, groups: StepGroups, order: Mapping[str, Any], store: Journal) -> dict[str, Any]:
    rows, rollouts = group_records(groups)
    fields = ("id", "task", "group", "reward", "parts", "greedy_reward", "role", "truncated")
    trained = [[getattr(rollout, name) for name in fields] for rollout in rollouts]
    drops = [event for _, event in store.read(kinds=(TaskDropped,)) if isinstance(event, TaskDropped)]
    return {
        "admitted": list(store.admitted()[step]),
        "dropped": [[drop.task, drop.cause] for drop in drops if drop.step == step],
        "trained": _digest([rows, trained]),
        "order": _digest(order),
        "sampled_tokens": groups.metrics.reduce()["sampled_tokens"],
        "failed_attempts": groups.metrics.reduce()["failed_attempts"],
    }


def _digest(tree: Any) -> str:
    return blake2b(json.dumps(tree, sort_keys=True).encode(), digest_size=8).hexdigest()


@pytest.mark.parametrize("case", [*ENGINE, "agents"])
def test_steps_are_those_of_the_golden_file(case: str) -> None:
    assert run_steps(case) == json.loads(FILE.read_text())[case]


if __name__ == "__main__":
    cases = {case: ",\n  ".join(map(json.dumps, run_steps(case))) for case in [*ENGINE, "agents"]}
    FILE.write_text("{\n" + ",\n".join(f' "{case}": [\n  {steps}\n ]' for case, steps in cases.items()) + "\n}\n")
