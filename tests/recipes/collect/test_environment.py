"""Environments and tools that cannot be used are refused before a run starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from etude.errors import ConfigError, PluginError
from etude.observe import configure_logging
from etude.recipes.collect.environment import EnvConfig
from etude.recipes.run.rules.checks import check_run
from tests.learn.games import TEMPLATE
from tests.recipes.runs import Captured, refused_run, run_of

PARTNERS = "tests.recipes.partners"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": "partners"}, r"The environment 'partners' is incomplete.*`env\.path=my_game\.py:Game`"),
        ({"path": f"{PARTNERS}:Ecko"}, "has no Ecko. Did you mean Echo"),
        ({"path": "nowhere.py:Game"}, "there is no file nowhere.py"),
        ({"path": f"{PARTNERS}:NOBODY"}, "is of type int. Name a class"),
        ({"path": f"{PARTNERS}:Deaf"}, r"has no `step`\. An environment has two methods"),
        (
            {"path": f"{PARTNERS}:Echo", "kwargs": {"turnz": 3}},
            r"cannot be created with `env.kwargs` \(turnz=3\).*turns",
        ),
        ({"path": f"{PARTNERS}:Echo", "kwargs": {"turns": 1, "more": 2}}, "unexpected keyword argument 'more'"),
        ({"path": f"{PARTNERS}:Picky"}, r"missing a required argument: 'taste'"),
        ({"tools": ["partners"]}, r"The tool 'partners' is incomplete"),
        ({"tools": [f"{PARTNERS}:NOBODY"]}, "is of type int, which cannot be called"),
        ({"tools": [f"{PARTNERS}:add", f"{PARTNERS}:add"]}, "Two tools have the name `add`"),
        ({"tools": [f"{PARTNERS}:untold"]}, "`untold` has no docstring"),
    ],
)
def test_an_environment_that_cannot_be_created_is_reported(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PluginError, match=message):
        EnvConfig(**options).prepare()


def test_classes_functions_and_tools_are_accepted(tmp_path: Path) -> None:
    EnvConfig(path=f"{PARTNERS}:Echo", kwargs={"turns": 2}).prepare()
    EnvConfig(path=f"{PARTNERS}:make_echo").prepare()
    config = EnvConfig(tools=f"{PARTNERS}:add")
    config.prepare()
    assert config.tools == (f"{PARTNERS}:add",) and config.is_enabled and not EnvConfig().is_enabled
    file = tmp_path / "mine.py"
    file.write_text("from tests.recipes.partners import Echo, add\n")
    EnvConfig(path=f"{file}:Echo", tools=(f"{file}:add",)).prepare()


GAME = {"env.path": f"{PARTNERS}:Echo", "reward": "environment", "reward.path": None}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"env.max_turns": 3}, "`env` has options, and names neither environment nor tools"),
        (
            {"reward": "environment", "reward.path": None},
            "leaves rewards to the environment, and there is none that gives rewards",
        ),
        (
            {"env.tools": f"[{PARTNERS}:add]", "reward": "environment", "reward.path": None},
            "leaves rewards to the environment, and there is none that gives rewards",
        ),
        (GAME | {"data.overlong": "truncate"}, "a multi-turn rollout keeps its own"),
        (GAME | {"env.path": f"{PARTNERS}:Deaf"}, "has no `step`"),
        ({"advantage": "gigpo"}, "needs the column `anchor`.*Give one with `env.path`"),
    ],
)
def test_contradictory_options_of_environments_are_refused(change: dict[str, Any], message: str, world: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        check_run(run_of(world, **change))


def test_compatible_options_of_environments_are_accepted(world: Path, capsys: Captured) -> None:
    configure_logging("info")
    for advantage in ("gigpo", "rae", "turn_baseline", "remax", "mt_grpo"):
        check_run(run_of(world, advantage=advantage, **GAME))
    assert capsys.readouterr().err == ""
    check_run(run_of(world, **GAME, **{"overlong.max_length": 6}))
    assert "counts the tokens of all turns of a rollout" in capsys.readouterr().err


def test_tools_need_a_model_that_can_call_them(world: Path, tmp_path: Path, capsys: Captured) -> None:
    message = refused_run(capsys, world, tmp_path / "run", **{"env.tools": f"[{PARTNERS}:add]"})
    assert "has no known format of tool calls" in message and "`chat.template`" in message
    assert not (tmp_path / "run").exists()


def test_rollouts_longer_than_the_context_are_reported(world: Path, tmp_path: Path, capsys: Captured) -> None:
    message = refused_run(capsys, world, tmp_path / "run", **GAME, **{"env.max_tokens": 129})
    assert "`env.max_tokens=129` is more than the 128 tokens" in message


def test_tools_with_text_prompts_are_refused(world: Path, tmp_path: Path, capsys: Captured) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    options = {"env.tools": f"[{PARTNERS}:add]", "chat.template": template}
    assert "has a text prompt" in refused_run(capsys, world, tmp_path / "run", **options)


def test_tasks_without_an_answer_need_rewards_of_the_environment(world: Path, tmp_path: Path, capsys: Captured) -> None:
    bare = tmp_path / "bare.jsonl"
    bare.write_text('{"prompt": "1+1="}\n')
    options = GAME | {"reward": "exact_match", "data.train": bare}
    assert "`reward=environment`" in refused_run(capsys, world, tmp_path / "run", **options)
