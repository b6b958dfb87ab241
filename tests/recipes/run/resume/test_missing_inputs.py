"""A run that names files which are not there is refused before torch is loaded, with all of them in one error."""

from __future__ import annotations

from pathlib import Path

import pytest

from etude.errors import ConfigError
from etude.recipes.run.resume.missing_inputs import check_required, check_scored
from tests.recipes.runs import run_of

MISSING = {
    "data.val": ["held_out.jsonl"],
    "reward": "function",
    "reward.path": "gone.py:score",
    "env.path": "no.py:Env",
}


def test_missing_files_are_told_in_one_error(world: Path) -> None:
    with pytest.raises(ConfigError, match=r"There are 3 problems\.") as refused:
        check_required(run_of(world, **MISSING))
    for file in ("`held_out.jsonl`", "`reward` names code in gone.py", "`env` names code in no.py"):
        assert file in str(refused.value)
    with pytest.raises(ConfigError, match=r"`held_out\.jsonl`"):
        check_scored(run_of(world, **MISSING))


def test_a_run_that_continues_is_compared_with_the_files_it_began_with(world: Path, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").touch()
    check_required(run_of(world, **MISSING, directory=tmp_path))
