"""The pages on rewards and the code say the same."""

from __future__ import annotations

import re

import pytest

from etude.rewards import REWARDS
from etude.rewards.constraints import CONSTRAINTS
from etude.rewards.sandbox.probe import PROTECTIONS
from tests.house.documents import ROOT

PAGE = "".join((ROOT / "docs/guides" / name).read_text() for name in ("rewards.md", "code-rewards.md"))


def table(page: str, heading: str) -> list[str]:
    """Return the names in the first column of a table, under a heading that begins so."""
    section = page.split(f"# {heading}")[1].split("\n#")[0]
    cells = re.findall(r"^\| ([^|]+) \|", section, re.MULTILINE)
    return [name for cell in cells for name in re.findall(r"`([\w.]+)`", cell)]


def test_every_reward_is_in_both_tables() -> None:
    assert set(table(PAGE, "Rewards")) == set(REWARDS) == set(table(PAGE, "Where rewards run"))


@pytest.mark.parametrize("name", ["multiple_choice", "instructions", "code", "judge", "combined"])
def test_every_option_is_documented(name: str) -> None:
    fields = set(REWARDS[name].model_fields)
    spoken = set(re.findall(r"\breward\.(\w+)", PAGE)) | set(re.findall(r"^  (\w+):", PAGE, re.MULTILINE))
    assert not fields - spoken


def test_no_missing_option_is_documented() -> None:
    known = {field for kind in REWARDS.values() for field in kind.model_fields}
    assert set(re.findall(r"`reward\.([a-z]\w*)", PAGE)) <= known


def test_every_instruction_and_protection_is_listed() -> None:
    listed = re.findall(r"`(\w+)`", PAGE.split("| about | instructions |")[1].split("\n\n")[0])
    assert sorted(listed) == sorted(CONSTRAINTS)
    assert set(PROTECTIONS) <= set(table(PAGE, "The sandbox"))
