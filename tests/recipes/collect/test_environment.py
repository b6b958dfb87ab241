"""Environments and tools that cannot be used are refused before a run starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from etude.config.compose import compose
from etude.errors import ConfigError, PluginError
from etude.observe import configure_logging
from etude.recipes.collect.environment import EnvConfig, Environment
from etude.recipes.run.config import Run
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
        Environment(EnvConfig(**options)).prepare()


def test_classes_functions_and_tools_are_accepted(tmp_path: Path) -> None:
    Environment(EnvConfig(path=f"{PARTNERS}:Echo", kwargs={"turns": 2})).prepare()
    Environment(EnvConfig(path=f"{PARTNERS}:make_echo")).prepare()
    config = EnvConfig(tools=f"{PARTNERS}:add")
    Environment(config).prepare()
    assert config.tools == (f"{PARTNERS}:add",) and config.is_enabled and not EnvConfig().is_enabled
    file = tmp_path / "mine.py"
    file.write_text("from tests.recipes.partners import Echo, add\n")
    Environment(EnvConfig(path=f"{file}:Echo", tools=(f"{file}:add",))).prepare()


def test_a_data_source_has_its_own_environment_and_the_limits_that_it_sets() -> None:
    game = {"path": f"{PARTNERS}:Echo", "max_turns": 3, "timeout": 5}
    config = EnvConfig(tools=f"{PARTNERS}:add", max_turns=2, max_tokens=50, sources={"game": game})
    played = config.of_source("game")
    assert played is not None and played.section == "env.sources.game"
    assert (played.options.max_turns, played.options.max_tokens, played.options.timeout) == (3, 50, 5)
    assert played.options.tools == (), "the tools of `env` are for other sources"
    others = config.of_source("sums")
    assert others is not None and others.options.tools and others.options.max_turns == 2
    assert EnvConfig(sources={"game": game}).of_source("sums") is None


def test_a_list_of_data_sources_is_refused_with_the_options_to_give() -> None:
    for given in ("[game]", "game"):
        with pytest.raises(ConfigError, match=r"`game` is a name alone. Write `env.sources.game.path=my_game.py:Game`"):
            compose(Run, [f"env.sources={given}"])


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
