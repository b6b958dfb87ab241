"""An example of each hub teaches: its run is killed, resumes, and earns more in its last steps than in its first."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.decoders import Fuse

from etude.cli import main
from etude.demo.sorting_model import END, PAD
from etude.models import create, save, tiny_config
from tests.components import require_hub
from tests.learn import games
from tests.openenv import echo_server
from tests.recipes import partners, players
from tests.recipes.runs import step_metrics
from tests.waits import blocked_until

Example = Callable[[Path], AbstractContextManager[dict[str, Any]]]
STEPS = 10
MODULES = Path(__file__).parents[1] / "agents/hubs"
"""Holds the examples of hubs whose environments are Python modules."""
NUMBERS = [str(number) for number in range(22)]
ONE_WORD = {"sampling.max_tokens": 1, "advantage": "turn_baseline"}


def make_player(directory: Path, words: Sequence[str]) -> Path:
    """Make a random model whose tokens are these words. It reads all others as one more."""
    directory.mkdir()
    vocabulary = {word: number for number, word in enumerate([PAD, END, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = Fuse()
    tokenizer.add_special_tokens([PAD, END])
    tokenizer.save(str(directory / "tokenizer.json"))
    tokens = {"pad_token": PAD, "eos_token": END, "tokenizer_class": "PreTrainedTokenizerFast"}
    (directory / "tokenizer_config.json").write_text(json.dumps(tokens))
    (directory / "chat_template.jinja").write_text("{%- for m in messages -%}{{ m.content }}{%- endfor -%}")
    save(
        create(
            tiny_config(len(vocabulary), layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, context=512),
            seed=0,
            dtype=torch.float32,
        ),
        directory,
    )
    return directory


@contextmanager
def gymnasium(directory: Path) -> Iterator[dict[str, Any]]:
    """Name one of the two actions, and the better one."""
    yield {
        "env.hub": "gymnasium:Blackjack-v1",
        "env.python": require_hub("gymnasium"),
        "env.kwargs": "{text: true, instructions: 'play:', actions: [stick, hit], unclear: -1}",
        "env.workers": 2,
        "model.path": make_player(directory / "model", ["stick", "hit", *NUMBERS]),
        **ONE_WORD,
    }


@contextmanager
def textarena(directory: Path) -> Iterator[dict[str, Any]]:
    """Answer with a number that the game allows, and follow its hints."""
    yield {
        "env.hub": "textarena:GuessTheNumber-v0",
        "env.python": require_hub("textarena"),
        "env.kwargs": "{text: true, min_number: 1, max_number: 5}",
        "env.max_turns": 4,
        "model.path": make_player(directory / "model", ["higher", "lower", *NUMBERS]),
        **ONE_WORD,
    }


@contextmanager
def poker(directory: Path) -> Iterator[dict[str, Any]]:
    """Make moves that a game for two allows, against an opponent."""
    yield {
        "env.hub": "textarena:KuhnPoker-v0",
        "env.python": require_hub("textarena"),
        "env.kwargs": "{text: true, opponent: random, max_rounds: 3}",
        "env.max_turns": 10,
        "model.path": make_player(directory / "model", ["check", "bet", "call", "fold", "J", "Q", "K", "available"]),
        **ONE_WORD,
    }


@contextmanager
def openenv(directory: Path) -> Iterator[dict[str, Any]]:
    """Write long messages, of which each character earns a tenth."""
    with echo_server(directory) as address:
        yield {
            "env.hub": f"openenv:{address}",
            "env.python": require_hub("openenv"),
            "env.kwargs": "{text: true, instructions: 'say:', show: echoed_message}",
            "env.max_concurrency": 1,
            "env.max_turns": 1,
            "model.path": make_player(directory / "model", "abcd"),
            "sampling.max_tokens": 8,
            "collect.tasks": 4,
        }


@contextmanager
def trl(directory: Path) -> Iterator[dict[str, Any]]:
    """Call a tool more often than the model was taught."""
    rows = games.lookups(200, seed=0)
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    yield {
        "env.hub": f"trl:{MODULES / 'looking_env.py'}:Table",
        "env.max_turns": 3,
        "data.train": directory / "rows.jsonl",
        "data.max_prompt_length": 16,
        "model.path": games.make_speaker(directory / "model"),
        "sampling.max_tokens": 8,
        "train.learning_rate": 2e-3,
    }


@contextmanager
def verifiers(directory: Path) -> Iterator[dict[str, Any]]:
    """Answer with a digit, and with the one that was asked for."""
    yield {
        "env.hub": "verifiers:copy_v1",
        "env.python": require_hub("verifiers"),
        "model.path": make_player(directory / "model", "123abc"),
        "sampling.max_tokens": 1,
        "collect.tasks": 4,
    }


@pytest.mark.integration
@pytest.mark.parametrize(
    "example",
    [
        trl,
        verifiers,
        pytest.param(gymnasium, marks=pytest.mark.soak),
        pytest.param(textarena, marks=pytest.mark.soak),
        pytest.param(poker, marks=pytest.mark.soak),
        pytest.param(openenv, marks=pytest.mark.soak),
    ],
)
def test_an_example_of_a_hub_is_killed_resumes_and_teaches(
    example: Example, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the run resumes, its tasks go on: no step is made twice, and none is left out."""
    own_modules = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(MODULES)])
    monkeypatch.setenv("PYTHONPATH", own_modules)
    run = tmp_path / "run"
    with example(tmp_path) as chosen:
        options = {
            "data.train": "env:0:200",
            "data.max_prompt_length": 64,
            "reward": "environment",
            "collect.tasks": 8,
            "collect.group_size": 8,
            "train.precision": "fp32",
            "train.learning_rate": 6e-3,
            "threads": 1,
            "steps": STEPS,
            "checkpoint.every": 1,
            "observe.console": "off",
            "directory": run,
            **chosen,
        }
        command = [sys.executable, "-m", "etude", "train", *(f"{name}={value}" for name, value in options.items())]
        with subprocess.Popen(command) as killed:
            blocked_until(lambda: killed.poll() is not None or [*run.glob("checkpoints/step-00000002.?")], within=300)
            killed.kill()
        assert killed.returncode == -signal.SIGKILL
        assert main(["train", "--resume", str(run)]) == 0
    steps = step_metrics(run)
    rewards = [step["reward"] for step in steps]
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    assert not any(step["failed_attempts"] for step in steps)
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.5, rewards


@pytest.mark.integration
def test_a_mix_of_a_program_and_what_agents_play_beside_it_teaches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program of verifiers, an environment of another hub, tools, a class, and an agent, each in its own turns. The
    class pays for what is learned first."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(MODULES)]))
    rows = games.lookups(200, seed=0)
    (tmp_path / "facts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "words.jsonl").write_text("".join(json.dumps({"prompt": key}) + "\n" for key in games.KEYS))
    files = {"table": "facts", "facts": "facts", "game": "words", "words": "words"}
    data = {"copy": "env:0:60", **{source: tmp_path / f"{file}.jsonl" for source, file in files.items()}}
    options = {
        "data.train": f"{{{', '.join(f'{source}: {file}' for source, file in data.items())}}}",
        "data.max_prompt_length": 16,
        "env.sources.copy.hub": "verifiers:copy_v1",
        "env.sources.copy.python": require_hub("verifiers"),
        "env.sources.table.hub": f"trl:{MODULES / 'looking_env.py'}:Table",
        "env.sources.facts.tools": f"[{games.__name__}:look]",
        "env.sources.game.path": f"{partners.__name__}:Echo",
        "env.sources.game.kwargs.turns": 2,
        "env.max_turns": 3,
        "agent.sources.words": f"{players.__name__}:repeater",
        "reward": "by_source",
        "reward.sources": "{copy: environment, table: environment, facts: exact_match, game: environment, "
        "words: environment}",
        "model.path": games.make_speaker(tmp_path / "model"),
        "sampling.max_tokens": 8,
        "data.sampler": "weighted",
        "data.sampler.weights": "{copy: 2, table: 3, facts: 3, game: 1, words: 1}",
        "collect.tasks": 10,
        "collect.group_size": 8,
        "train.precision": "fp32",
        "train.learning_rate": 2e-3,
        "threads": 1,
        "steps": 6,
        "observe.console": "off",
        "directory": tmp_path / "run",
    }
    assert main(["train", *(f"{name}={value}" for name, value in options.items())]) == 0
    steps = step_metrics(tmp_path / "run")
    assert not any(step["failed_attempts"] for step in steps)
    turns = {source: [step[f"source/{source}/turns"] for step in steps] for source in data}
    assert {*turns["copy"]} == {1} and {*turns["game"], *turns["words"]} == {2}
    assert all(1 < most <= 3 for source in ("table", "facts") for most in turns[source])
    earned = {source: [step[f"source/{source}/reward"] for step in steps] for source in data}
    assert all(fmean(rewards) > 0 for rewards in earned.values()), earned
    assert fmean(earned["game"][-2:]) > fmean(earned["game"][:2]) + 0.5, earned
