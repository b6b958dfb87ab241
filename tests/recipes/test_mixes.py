"""A mix of data sources in one run: each with its own file, reward, share and length of answers; one is played."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from tests.recipes import partners, players
from tests.recipes.runs import REWARDS, Captured, refused_run, same, step_metrics, train, weights
from tests.recipes.supervised_runs import write

SOURCES = ("sums", "words", "game")
PARTNERS = partners.__name__
ECHO = f"{PARTNERS}:Echo"
REPEATER = f"{players.__name__}:repeater"
PROGRAM = {"env.sources.words.hub": "verifiers:x"}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tasks without a data source, in a file for each."""
    directory = tmp_path_factory.mktemp("mix")
    for source, prompt in zip(SOURCES, ("{}+{}=", "{}-{}:", "{}*{}="), strict=True):
        rows = [{"prompt": prompt.format(n % 10, n // 10)} for n in range(20)]
        write(directory / f"{source}.jsonl", rows)
    return {source: directory / f"{source}.jsonl" for source in SOURCES}


def mix(files: dict[str, Path], **changes: Any) -> dict[str, Any]:
    """Return the options of a run on a mix: digits earn in sums, other letters in words, and turns in the game."""
    return {
        "data.train": f"{{{', '.join(f'{source}: {file}' for source, file in files.items())}}}",
        "data.sampler": "weighted",
        "data.sampler.weights": "{sums: 2, words: 1, game: 1}",
        "reward": "by_source",
        "reward.path": None,
        "reward.sources.sums": "function",
        "reward.sources.sums.path": f"{REWARDS}:digits",
        "reward.sources.words": "function",
        "reward.sources.words.path": f"{REWARDS}:others",
        "reward.sources.game": "environment",
        "env.sources.game.path": ECHO,
        "env.sources.game.kwargs.turns": 2,
        "sampling.max_tokens_of.words": 3,
        "collect.tasks": 4,
    } | {name.replace("__", "."): value for name, value in changes.items()}


REWARD_OPTIONS = [name for name in mix({}) if name.startswith("reward.")]


@pytest.mark.slow
def test_each_source_of_a_mix_learns_and_a_resumed_run_is_the_same(
    world: Path, files: dict[str, Path], tmp_path: Path
) -> None:
    run = train(world, tmp_path / "run", **mix(files, steps=24))
    steps = step_metrics(run)
    for source, share in zip(SOURCES, (2, 1, 1), strict=True):
        earned = [step[f"source/{source}/reward"] for step in steps]
        assert fmean(earned[-4:]) > fmean(earned[:4]) + 0.1, f"{source}: {earned}"
        assert all(step[f"source/{source}/rollouts"] == 4 * share for step in steps)
        assert all(step[f"source/{source}/turns"] == 1 + (source == "game") for step in steps)
    assert max(step["source/words/answer_length"] for step in steps) <= 3
    assert max(step["source/sums/answer_length"] for step in steps) > 3
    halves = train(world, tmp_path / "halves", **mix(files, steps=11))
    train(world, halves, **mix(files, steps=24))
    assert same(weights(halves), weights(run))


@pytest.mark.slow
def test_each_agent_of_a_mix_learns_and_the_rest_is_answered_once(
    world: Path, files: dict[str, Path], tmp_path: Path
) -> None:
    """A run that stopped and resumed plays the same rollouts, in processes of their own too."""
    left_out = dict.fromkeys(name for name in mix(files) if name.startswith(("env.", "reward.sources.w")))
    options = mix(files) | left_out | {"reward.sources.words": "environment", "agent.runners": 2}
    options |= {"agent.sources.game": ECHO, "agent.sources.words": REPEATER}
    run = train(world, tmp_path / "run", **options, steps=14)
    steps = step_metrics(run)
    for source, share in zip(SOURCES, (2, 1, 1), strict=True):
        earned = [step[f"source/{source}/reward"] for step in steps]
        assert fmean(earned[-4:]) > fmean(earned[:4]) + 0.15, f"{source}: {earned}"
        assert all(step[f"source/{source}/rollouts"] == 4 * share for step in steps)
    assert all(step["failed_attempts"] == 0 for step in steps)
    assert max(step["source/words/answer_length"] for step in steps) <= 2 * 3, "both its answers have the limit"
    assert max(step["source/game/answer_length"] for step in steps) > 3 * 3
    halves = train(world, tmp_path / "halves", **options, steps=5)
    train(world, halves, **options | {"agent.strategy": "cs"}, steps=14)
    assert same(weights(halves), weights(run))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"reward.sources.words": None, "reward.sources.words.path": None},
            "`data.train` has rows of the data source `words`, for which `reward.sources` has no reward",
        ),
        (
            {"env.sources.game.path": None, "env.sources.game.kwargs.turns": None, "env.sources.sums.path": ECHO},
            "`reward.sources.game=environment` leaves the rewards of the data source `game`",
        ),
        ({"env.sources.maze.path": ECHO}, "`env.sources` names the data source `maze`, and `data.train` has no row"),
        ({"env.sources.words.max_turns": 2}, "`env.sources.words` names no environment: give `env.sources.words.path`"),
        ({"env.sources.words.tools": f"[{PARTNERS}:add]"}, "`env.sources.words.tools` offers functions to a model"),
        ({"env.sources.words.tools": f"[{PARTNERS}:NOBODY]"}, "is of type int, which cannot be called"),
        ({"env.sources.words.hub": "gymnasiun:X"}, "`env.sources.words.hub=gymnasiun:X` names no hub that is known"),
        (PROGRAM | {"env.sources.words.max_turns": 2}, "words.max_turns=2` does nothing where the hub's own"),
        (PROGRAM | {"env.sources.game.timeout": 2}, "does nothing in a run where a hub's own program plays"),
        (PROGRAM | {"env.sources.game.tools": f"[{PARTNERS}:add]"}, "and `env.sources.game.tools` would do nothing"),
        (PROGRAM | {"env.path": ECHO, "agent.path": REPEATER}, "and `agent.path` another agent. Leave one out."),
        (PROGRAM | {"agent.sources.game": REPEATER}, "and `agent.sources.game` an agent. Leave one out."),
        (PROGRAM | {"agent.runners": 0}, "can play `env.sources.words.hub=verifiers:x` if it plays all tasks of a run"),
        ({"env.sources.game.workers": 2}, "`env.sources.game.workers=2` is for the environment of a hub, and"),
        ({"env.sources.game.max_tokens": 129}, "`env.sources.game.max_tokens=129` is more than the 128 tokens"),
        ({"env.kwargs.turns": 2}, "are for the class of `env.path` or the hub of `env.hub`, and neither is named"),
        (
            {"reward": "environment", **dict.fromkeys(REWARD_OPTIONS)},
            "`data.train` has rows of the data source `sums`, which none plays that gives rewards",
        ),
        (
            {"env.sources.game.path": None, "env.sources.game.kwargs.turns": None, "agent.sources.sums": REPEATER},
            "`agent.sources.game`, or choose a reward",
        ),
        ({"agent.sources.maze": REPEATER}, "`agent.sources` has an agent make the rollouts, and `env` an environment"),
        ({"sampling.max_tokens_of.words": 7}, "`max_tokens_of` gives answers of the data source `words` 7 tokens"),
        ({"sampling.max_tokens_of.maze": 2}, "`sampling.max_tokens_of` names the data source `maze`"),
    ],
)
def test_a_mix_that_does_not_fit_its_data_is_refused(
    world: Path, files: dict[str, Path], tmp_path: Path, capsys: Captured, changes: dict[str, Any], message: str
) -> None:
    assert message in refused_run(capsys, world, tmp_path / "run", **mix(files) | changes)
