"""The page of the rollout queue matches the code."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

from etude.store.queue.local_queue import KEY_GRACE_S
from etude.store.queue.rollout_limits import MAX_INFRA_RETRIES, RolloutLimits

PAGE = (Path(__file__).parents[3] / "docs" / "internals/rollout-queue.md").read_text(encoding="utf-8")


def test_the_example_plays_a_rollout() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, "rollout-queue.md", "exec"), names)
    assert asyncio.run(names["one_rollout"]()) == 0.75


def test_the_documented_limits_are_those_of_the_code() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", PAGE, re.MULTILINE))
    assert rows.keys() == set(RolloutLimits.__slots__)
    for name, documented in rows.items():
        default = getattr(RolloutLimits(), name)
        if name == "retry_on":
            assert documented.split(", ") == [str(outcome) for outcome in default]
        else:
            assert documented == ("none" if default is None else f"{default:g}")
    assert (MAX_INFRA_RETRIES, KEY_GRACE_S) == (10, 600.0) and "up to ten times" in PAGE and "ten minutes after" in PAGE
