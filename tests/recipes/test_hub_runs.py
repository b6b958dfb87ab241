"""Whole runs in the environments of hubs: trained, resumed, scored, and refused."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch

from etude.agents.agent import LLM
from etude.agents.hubs.agent import HubAgent
from etude.agents.hubs.pool import HubPool
from etude.agents.hubs.process import HubSpec
from etude.cli import main
from etude.config.compose import compose
from etude.demo.sorting_model import END, PAD, write_tokenizer
from etude.errors import ConfigError
from etude.models import create, save, tiny_config
from etude.protocols import Observation
from etude.recipes.run.builders.hubs import name_task_files
from etude.recipes.run.config import Run
from etude.records import Message, Outcome, Task
from etude.store import open_store
from etude.store.queue.rollout_queue import AttemptReport
from tests.agents.hubs.test_pool import ODD
from tests.components import require_hub
from tests.joined import started
from tests.learn.games import make_tokenizer
from tests.learn.test_hubs import make_player
from tests.openenv import echo_server
from tests.recipes import partners
from tests.recipes.runs import REWARDS, Captured, options, refused_run, same, step_metrics, train, weights
from tests.recipes.supervised_runs import write
from tests.waits import blocked_until

BLACKJACK = {
    "env.hub": "gymnasium:Blackjack-v1",
    "env.kwargs": "{text: true, instructions: 'play:', actions: [stick, hit], unclear: -1}",
}


@pytest.fixture(scope="module")
def player(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose tokens are the characters of hands, and the two actions."""
    directory = tmp_path_factory.mktemp("player")
    tokenizer = write_tokenizer(directory, (PAD, END), "0123456789[], play:\n", ("stick", "hit"))
    sizes = {"layers": 2, "hidden": 96, "heads": 4, "kv_heads": 2, "head_dim": 24, "intermediate": 256, "context": 128}
    save(create(tiny_config(tokenizer.vocab_size, **sizes), seed=0, dtype=torch.float32), directory)
    return directory


def words(player: Path, directory: Path, **changes: Any) -> list[str]:
    chosen = {
        "model.path": player,
        "data.train": "env:0:500",
        "data.max_prompt_length": 32,
        **BLACKJACK,
        "env.python": require_hub("gymnasium"),
        "env.max_turns": 8,
        "reward": "environment",
        "advantage": "turn_baseline",
        "sampling.max_tokens": 1,
        "collect.tasks": 16,
        "collect.group_size": 8,
        "train.precision": "fp32",
        "train.learning_rate": 4e-3,
        "threads": 1,
        "steps": 2,
        "checkpoint.every": 1,
        "observe.console": "off",
        "directory": directory,
    }
    chosen |= {name.replace("__", "."): value for name, value in changes.items()}
    return [f"{name}={value}" for name, value in chosen.items() if value is not None]


@pytest.fixture(scope="module")
def mix(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The options of a mix: actions earn in cards, digits in sums, and commas in the game."""
    directory = tmp_path_factory.mktemp("mix")
    for source, prompts in (("sums", "0123456789"), ("game", ",:[]")):
        write(directory / f"{source}.jsonl", [{"prompt": f"{prompt}\n"} for prompt in prompts])
    return {
        "data.train": f"{{cards: env:0:500, sums: {directory}/sums.jsonl, game: {directory}/game.jsonl}}",
        "data.sampler": "weighted",
        "data.sampler.weights": "{cards: 4, sums: 1, game: 1}",
        "collect.tasks": 24,
        **dict.fromkeys(("env.hub", "env.kwargs", "env.python", "reward", "env.max_turns")),
        **{name.replace("env.", "env.sources.cards."): value for name, value in BLACKJACK.items()},
        "env.sources.cards.python": require_hub("gymnasium"),
        "env.sources.cards.workers": 2,
        "env.sources.game.path": f"{partners.__name__}:Commas",
        "reward": "by_source",
        "reward.sources.sums": "function",
        "reward.sources.sums.path": f"{REWARDS}:digits",
        "reward.sources.game": "environment",
        "reward.sources.cards": "environment",
        "steps": 10,
    }


@pytest.mark.integration
def test_a_mix_of_answers_an_environment_and_a_hub_learns_each(
    player: Path, mix: dict[str, Any], tmp_path: Path
) -> None:
    """It begins with random tokens, of which two are actions."""
    assert main(["train", *words(player, tmp_path / "run", **mix)]) == 0
    steps = step_metrics(tmp_path / "run")
    for source, least in (("cards", 0.25), ("sums", 0.2), ("game", 0.3)):
        earned = [step[f"source/{source}/reward"] for step in steps]
        assert fmean(earned[-4:]) > fmean(earned[:3]) + least, f"{source}: {earned}"


@pytest.mark.integration
def test_a_killed_mix_resumes_with_the_tasks_that_it_was_started_with(
    player: Path, mix: dict[str, Any], tmp_path: Path, capsys: Captured
) -> None:
    given = mix | {"steps": 3}
    assert main(["train", *words(player, tmp_path / "whole", **given)]) == 0
    command = [sys.executable, "-m", "etude", "train", *words(player, tmp_path / "half", **given)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as run:
        blocked_until(lambda: [*(tmp_path / "half").glob("checkpoints/step-00000001.?")], within=120)
        run.kill()
    assert run.returncode == -signal.SIGKILL
    tasks = tmp_path / "half/tasks/env-cards-0-500.jsonl"
    rows = [json.loads(line) for line in tasks.read_text().splitlines()]
    assert rows == [{"prompt": "play:\n", "seed": seed} for seed in range(500)]
    written = tasks.stat().st_mtime_ns
    assert main(["train", "--resume", str(tmp_path / "half")]) == 0
    assert tasks.stat().st_mtime_ns == written, "they are drawn once"
    assert same(weights(tmp_path / "half"), weights(tmp_path / "whole"))
    given["data.train"] = mix["data.train"].replace("500", "600")
    assert main(["train", *words(player, tmp_path / "half", **given | {"steps": 4})]) != 0
    assert "env-cards-0-500.jsonl changed, came or went" in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.integration
def test_a_model_is_scored_on_tasks_of_a_hub(player: Path, tmp_path: Path, capsys: Captured) -> None:
    """Without a run, the tasks are drawn into a directory that is removed."""
    given = [word for word in words(player, tmp_path) if word.startswith(("model", "env", "reward", "sampling"))]
    assert main(["eval", *given, "data.val=env:7:12", "data.max_prompt_length=32", "threads=1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["tasks"] == 5
    assert not list(tmp_path.iterdir())


@pytest.mark.integration
def test_a_game_is_drawn_as_text_and_a_model_is_asked_again() -> None:
    options = {"render": True, "is_slippery": False, "actions": ["left", "down", "right", "up"]}
    spec = HubSpec("gymnasium", "FrozenLake-v1", require_hub("gymnasium"), options, 4)
    with HubPool(spec, 1) as pool:
        (row,) = pool.tasks(3, 4)
        answers = ["I go down.", "Not left: Right!", "who knows"]
        first, down, right, asked = asyncio.run(play(pool, Task(0, row), answers))
    assert first.content == [
        {
            "role": "user",
            "content": "You act in FrozenLake-v1. Answer with one of these actions: left, down, right, up.\n\n"
            "[S]FFF\nFHFH\nFFFH\nHFFG",
        }
    ]
    assert down.content == "(Down)\nSFFF\n[F]HFH\nFFFH\nHFFG" and down.reward == 0 and not down.done
    assert right.done and not right.truncated
    assert asked.content == "No action was named. Answer with one of: left, down, right, up." and not asked.done


async def play(pool: HubPool, task: Task, answers: list[str]) -> list[Observation]:
    env = pool.new_env()
    shown = [await env.reset(task)]
    shown += [await env.step(Message("assistant", answer)) for answer in answers]
    await env.close()
    return shown


@pytest.mark.integration
@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"env.hub": "gymnasium:Nowhere-v1"}, "Gymnasium cannot make Nowhere-v1"),
        ({"env.hub": "gymnasium:Pendulum-v1", "env.kwargs": "{}"}, "Only Discrete and Text actions can be named"),
        ({"env.kwargs": "{actions: [hit]}"}, "Blackjack-v1 has 2 actions: give as many different names"),
        ({"data.train": "env:5:5"}, "names no tasks of the hub. Write the first number"),
    ],
)
def test_what_gymnasium_refuses(
    player: Path, tmp_path: Path, capsys: Captured, changes: dict[str, Any], sentence: str
) -> None:
    assert main(["train", *words(player, tmp_path / "run", **changes)]) != 0
    assert sentence in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "run").exists()


@pytest.mark.integration
def test_a_game_of_textarena_says_what_is_new_and_pays_at_its_end() -> None:
    spec = HubSpec("textarena", "GuessTheNumber-v0", require_hub("textarena"), {"instructions": "Play well."}, 10)
    with HubPool(spec, 1) as pool:
        (row,) = pool.tasks(3, 4)
        first, low, right = asyncio.run(play(pool, Task(0, row), ["I say [7].", "8"]))
        games = [asyncio.run(play(pool, Task(0, row), ["[7]", "what"]))[0] for _ in range(2)]
    assert row == {"prompt": [{"role": "user", "content": "Play well."}], "seed": 3}
    assert first.content[0]["content"].startswith("Play well.\n\nYou are Player 0. You are playing Guess The Number.")
    assert low.content == "The target number is higher." and low.reward is None and not low.done
    assert right.done and right.reward == 1.0 and not right.content
    assert games[0] == games[1] == first


TOP_ROW = """
def move(seen):
    assert seen.startswith("You are Player 0")
    return str(seen.count("[Player 1] ["))
"""
"""An opponent that takes the cells 0, 1 and 2, one for each move of the model."""


@pytest.mark.integration
def test_a_game_of_textarena_has_an_opponent(tmp_path: Path) -> None:
    """The model's seat is the rest of the seed by the players. An opponent of one's own sees all that was said."""
    options = {"opponent": "random", "text": True}
    spec = HubSpec("textarena", "TicTacToe-v0", require_hub("textarena"), options, 10)
    cells = [str(cell) for cell in range(9)]
    with HubPool(spec, 1) as pool:
        rows = pool.tasks(0, 2)
        first, begun = (asyncio.run(play(pool, Task(0, row), []))[0].content for row in rows)
        games = [asyncio.run(play(pool, Task(0, rows[1]), cells)) for _ in range(2)]
    with HubPool(spec, 1) as pool:
        games.append(asyncio.run(play(pool, Task(0, rows[1]), cells)))
    assert isinstance(first, str) and first.startswith("Play this game.\nYou are Player 0 in Tic Tac Toe.")
    assert isinstance(begun, str) and "You are Player 1" in begun and re.search(r"\[Player 0\] \[\d\]", begun)
    assert games[0] == games[1] == games[2], "a game is its seed and its moves, in another process too"
    assert any(shown.done and shown.reward in (-1, 0, 1) for shown in games[0])
    (tmp_path / "top_row.py").write_text(TOP_ROW)
    scripted = {"opponent": f"{tmp_path / 'top_row.py'}:move", "seat": 1}
    with HubPool(replace(spec, options=scripted), 1) as pool:
        *_, last = asyncio.run(play(pool, Task(0, pool.tasks(0, 1)[0]), ["[8]", "[7]", "[5]"]))
    assert last.done and last.reward == -1, "the opponent has the cells 0, 1 and 2"


@pytest.mark.integration
def test_a_model_plays_both_seats_of_a_game_of_textarena_and_learns_one(world: Path, tmp_path: Path) -> None:
    """Each seat reads the rules once, and then what is new. Two runs of one seed play the same games."""
    options = {"opponent": "policy", "text": True}
    spec = HubSpec("textarena", "TicTacToe-v0", require_hub("textarena"), options, 10)
    with HubPool(spec, 1) as pool:
        rows = pool.tasks(0, 2)
        games = [asyncio.run(play(pool, Task(0, row), ["0", "4", "1", "5", "2"])) for row in rows]
    assert [[shown.opponent for shown in game] for game in games] == [[None, 1, None, 1, None, None], [0, None] * 3]
    assert [(game[0].role, game[-1].done, game[-1].reward) for game in games] == [(0, True, 1), (1, True, -1)]
    for player, shown in enumerate(games[0][:2]):
        assert isinstance(shown.content, str) and shown.content.startswith(f"Play this game.\nYou are Player {player} ")
    later = games[0][3].content
    assert isinstance(later, str) and "[Player 0] [1]" in later and "You are Player" not in later
    given = {
        **VERIFIERS,
        "env.hub": "textarena:KuhnPoker-v0",
        "env.kwargs": "{text: true, opponent: policy, max_rounds: 1}",
        "env.python": spec.python,
        "env.max_turns": 6,
        "advantage": "rae",
        "model.path": make_player(tmp_path / "model", ["check", "bet"]),
        "data.max_prompt_length": 64,
        "data.train": "env:0:8",
        "sampling.max_tokens": 1,
        "collect.tasks": 4,
        "collect.retries": 4,
        "steps": 2,
    }
    changes = {name.replace(".", "__"): value for name, value in given.items()}
    once, again = (train(world, tmp_path / name, **changes) for name in ("once", "again"))
    assert same(weights(once), weights(again))
    with closing(open_store(once / "journal.sqlite", read_only=True)) as store:
        rollouts = [store.rollout(id) for ids in store.admitted().values() for id in ids]
        assert {rollout.last.role for rollout in rollouts if rollout.last is not None} == {0, 1}


@pytest.mark.integration
@pytest.mark.parametrize(
    ("what", "options", "sentence"),
    [
        ("TicTacToe-v0", {}, r"is no game for one player: .* has to be 2.*`env\.kwargs\.opponent=random`"),
        ("TicTacToe-v0", {"opponent": "random", "players": 3}, "is no game for 3 players: .* received 3"),
        (
            "TicTacToe-v0",
            {"opponent": "self"},
            "`opponent=self` names no opponent. Write `random`, `policy`, or a func",
        ),
        ("TicTacToe-v0", {"opponent": "policy", "players": 3}, "is no game for 3 players: .* received 3"),
        ("TicTacToe-v0", {"opponent": "random", "seat": 2}, "`seat=2` is none of the seats 0 to 1 of TicTacToe-v0"),
        (
            "ConnectFour-v0",
            {"opponent": "random"},
            "name no move in brackets that seat 0 may make, .* Write an opponent",
        ),
        ("Nothing-v0", {}, "TextArena cannot play Nothing-v0: Environment Nothing-v0 not found"),
    ],
)
def test_what_textarena_refuses(what: str, options: dict[str, Any], sentence: str) -> None:
    spec = HubSpec("textarena", what, require_hub("textarena"), options, 10)
    with pytest.raises(ConfigError, match=sentence):
        HubPool(spec, 1).__enter__()


@pytest.mark.integration
def test_a_model_is_trained_on_a_game_of_textarena(world: Path, tmp_path: Path) -> None:
    given = {
        **VERIFIERS,
        "env.hub": "textarena:GuessTheNumber-v0",
        "env.kwargs": "{text: true}",
        "env.python": require_hub("textarena"),
        "env.max_turns": 2,
        "model.path": make_talker(tmp_path / "model", context=1024),
        "data.max_prompt_length": 64,
    }
    train(world, tmp_path / "run", **{name.replace(".", "__"): value for name, value in given.items()})
    (first,) = step_metrics(tmp_path / "run")
    assert first["rollouts"] == 4 and first["turns"] == 2 and first["failed_attempts"] == 0


@pytest.fixture
def echo(tmp_path: Path) -> Iterator[str]:
    """The address of a server."""
    with echo_server(tmp_path) as address:
        yield address


@pytest.mark.integration
def test_an_environment_of_openenv_is_played_at_its_server(world: Path, tmp_path: Path, echo: str) -> None:
    """The second rollout waits until the first one has given its session back."""
    spec = HubSpec("openenv", echo, require_hub("openenv"), {"show": "echoed_message"}, 4)

    async def both(pool: HubPool) -> list[list[Observation]]:
        (row,) = pool.tasks(3, 4)
        games = (play(pool, Task(0, row), ["hello", '{"message": "you"}', '{"number": 3}']) for _ in range(2))
        return list(await asyncio.gather(*games))

    with HubPool(spec, 1) as pool:
        one, other = asyncio.run(both(pool))
    assert one == other
    first, raw, by_json, wrong = one
    assert first.content[0]["content"] == (
        "Answer with this alone: Message to echo back.\n\nEcho Demo environment ready!"
    )
    assert raw.content == "hello" and raw.reward == pytest.approx(0.5) and by_json.content == "you"
    assert "message" in wrong.content and wrong.reward is None and not wrong.done, "the model reads what was wrong"
    given = {
        **VERIFIERS,
        "env.hub": f"openenv:{echo}",
        "env.python": spec.python,
        "env.max_turns": 2,
        "env.max_concurrency": 1,
        "model.path": make_talker(tmp_path / "model", context=512),
        "data.max_prompt_length": 64,
    }
    train(world, tmp_path / "run", **{name.replace(".", "__"): value for name, value in given.items()})
    (first_step,) = step_metrics(tmp_path / "run")
    assert first_step["rollouts"] == 4 and first_step["turns"] == 2 and first_step["failed_attempts"] == 0


@pytest.mark.integration
def test_a_server_that_is_not_there_is_refused() -> None:
    spec = HubSpec("openenv", "http://127.0.0.1:1", require_hub("openenv"), {}, 4)
    with pytest.raises(ConfigError, match=r"No server of OpenEnv answers at http://127.0.0.1:1 .* Start it first"):
        HubPool(spec, 1).__enter__()
    with pytest.raises(ConfigError, match="OpenEnv has no options mode"):
        HubPool(replace(spec, options={"mode": 1}), 1).__enter__()


VERIFIERS = {
    "env.hub": "verifiers:digit_v1",
    "data.train": "env:0:2",
    "reward": "environment",
    "reward.path": None,
    "collect.tasks": 2,
    "collect.group_size": 2,
    "steps": 1,
}
"""The taskset in `digit_v1.py`."""


@pytest.mark.integration
def test_a_program_of_verifiers_is_trained_by_its_calls(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = require_hub("verifiers")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    speaker = make_talker(tmp_path / "model")
    given = {**VERIFIERS, "env.python": python, "model.path": speaker, "data.max_prompt_length": 64}
    given |= {"collect.tasks": 1}
    train(world, tmp_path / "run", **{name.replace(".", "__"): value for name, value in given.items()})
    (first,) = step_metrics(tmp_path / "run")
    assert first["rollouts"] == 2 and first["turns"] == 3 and first["failed_attempts"] == 0
    assert first["endpoint/turns_continued"] == 4, "every later turn goes on from the one before"
    assert 0 <= first["reward/right"] <= 1


@pytest.mark.integration
def test_a_model_is_scored_by_a_program_of_verifiers(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    given = {"env.hub": "verifiers:digit_v1", "env.python": require_hub("verifiers"), "data.val": "env:0:3"}
    given |= {"model.path": make_talker(tmp_path / "model"), "reward": "environment", "threads": 1}
    assert main(["eval", *(f"{name}={value}" for name, value in given.items()), "--json"]) == 0
    scores = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert scores["tasks"] == 3 and scores["eval/failed"] == 0 and scores["eval/mean@1"] > 0


@pytest.mark.integration
def test_a_runner_elsewhere_plays_the_program_of_the_runs_hub(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = require_hub("verifiers")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    given = {**VERIFIERS, "env.python": python, "model.path": make_talker(tmp_path / "model"), "agent.runners": 0}
    given |= {"data.max_prompt_length": 64, "observe.console": "plain", "directory": tmp_path / "run"}
    given |= {"collect.tasks": 1}
    words = options(world, **{name.replace(".", "__"): value for name, value in given.items()})
    key = tmp_path / "run/runner.key"
    with started(["train", *words], tmp_path / "log") as train:
        joins = train.says(r"runner hub --url (\S+)")
        with started(
            ["runner", "hub", "--url", joins[1], "--python", str(python)],
            tmp_path / "runner.log",
            ETUDE_STORE_KEY=key.read_text(),
        ) as runner:
            assert train.ends(120) == 0, train.said
            runner.send_signal(signal.SIGTERM)
            assert runner.ends(30) == 0, runner.said
    (first,) = step_metrics(tmp_path / "run")
    assert first["rollouts"] == 2 and first["failed_attempts"] == 0
    assert "Attempts played: 2 succeeded" in runner.said


@pytest.mark.integration
def test_the_errors_of_a_program_of_verifiers_are_outcomes(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its program raises for the digit 9, before it calls the model."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    spec = HubSpec("verifiers", "digit_v1", require_hub("verifiers"), {}, 8)

    async def play(pool: HubPool, task: Task) -> AttemptReport:
        return await HubAgent(pool).run(task, LLM("http://127.0.0.1:1/v1", "key", "policy"))

    async def stop(pool: HubPool, task: Task) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await play(pool, task)

    with HubPool(spec, 1) as pool:
        rows = pool.tasks(7, 99)
        assert [row["digit"] for row in rows] == [7, 8, 9]
        raised = asyncio.run(play(pool, Task(0, rows[2])))
        assert raised.outcome is Outcome.FAILED and "ValueError: nine is not a digit here" in raised.error
        asyncio.run(stop(pool, Task(0, rows[0])))
        unreachable = asyncio.run(play(pool, Task(0, rows[1])))
        assert unreachable.outcome is Outcome.FAILED and unreachable.error

    elsewhere = replace(spec, options={"player": {"runtime": {"type": "prime"}}})
    with pytest.raises(ConfigError, match="whose machines need an account and a tunnel"):
        HubPool(elsewhere, 1).__enter__()


def make_talker(directory: Path, context: int = 128) -> Path:
    """Make a tiny random model with a chat template."""
    tokenizer = make_tokenizer(directory, "+=: ijklmnopqrstuvwxyz")
    sizes = {"layers": 1, "hidden": 32, "heads": 2, "kv_heads": 1, "context": context}
    save(create(tiny_config(tokenizer.vocab_size, **sizes), seed=0, dtype=torch.float32), directory)
    return directory


def test_a_hub_whose_packages_are_missing_says_how_to_install_them() -> None:
    spec = HubSpec("textarena", "GuessTheNumber-v0", Path(sys.executable), {}, 4)
    with pytest.raises(ConfigError, match=r"needs the package textarena, which .* Install it by `etude env install"):
        HubPool(spec, 1).__enter__()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"env.hub": "gymnasiun:X"}, "names no hub that is known here. Did you mean gymnasium?"),
        ({"env.hub": "gymnasium"}, "names a hub and no environment of it. Add one: `env.hub=gymnasium:Blackjack-v1`."),
        ({"env.hub": f"trl:{ODD}", "env.path": "x.py:Y"}, "`env.path` names others: leave one out"),
        ({"env.workers": 2}, "`env.workers=2` is for the environment of a hub, and `env.hub` names none"),
        ({"env.hub": "verifiers:x", "env.max_turns": 3}, "does nothing where the hub's own program plays"),
        ({"env.hub": "verifiers:x", "agent.path": f"{__file__}:y"}, "and `agent.path` another agent. Leave one out."),
        ({"env.hub": "verifiers:x", "agent.strategy": "cs"}, "plays in processes of its own"),
        ({"data.train": "env:0:9"}, "are tasks of a hub's environment, and `env.hub` names none"),
        (
            {"data.train": "{cards: 'env:0:9'}"},
            "`data.train={cards: env:0:9}` are tasks of a hub's environment, and `env.sources.cards.hub` names none.",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused(
    world: Path, tmp_path: Path, capsys: Captured, changes: dict[str, Any], sentence: str
) -> None:
    told = refused_run(capsys, world, tmp_path / "run", **{name.replace(".", "__"): v for name, v in changes.items()})
    assert sentence in " ".join(told.split())


def test_tasks_of_a_hub_are_files_of_the_run(tmp_path: Path) -> None:
    run = compose(Run, ["env.hub=gymnasium:X", "data.train=[env:3:9, mine.jsonl]", "data.val=env:9:11"])
    named = name_task_files(run.model_copy(update={"directory": tmp_path}))
    assert named.data.train == (str(tmp_path / "tasks/env-3-9.jsonl"), "mine.jsonl")
    assert named.data.val == (str(tmp_path / "tasks/env-9-11.jsonl"),)
    sources = ["env.sources.cards.hub=gymnasium:X", "env.sources.maze.hub=gymnasium:Y"]
    mix = compose(Run, [*sources, "data.train={cards: [env:3:9, env:9:11], maze: env:3:9}"])
    files = ("cards-3-9", "cards-9-11", "maze-3-9")
    named = name_task_files(mix.model_copy(update={"directory": tmp_path}))
    assert named.data.train == tuple(f"{file.partition('-')[0]}={tmp_path}/tasks/env-{file}.jsonl" for file in files)
    with pytest.raises(ConfigError, match=r"`env.hub` names none.*`cards`: `data\.val=\{cards: env:0:9\}`"):
        name_task_files(compose(Run, [*sources, "data.val=env:0:9"]))
    with pytest.raises(ConfigError, match=r"`data\.train=env:0` names no tasks"):
        name_task_files(compose(Run, ["env.hub=gymnasium:X", "data.train=env:0"]))
