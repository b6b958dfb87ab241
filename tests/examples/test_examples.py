"""The examples are complete: each runs by itself, as its first line says, and its model learns."""

from __future__ import annotations

import ast
import json
import os
import re
import runpy
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from etude.cli import main
from etude.demo import counting_model
from etude.recipes.run.directory import read_metrics
from etude.records import Message, Task
from etude.store import open_store
from tests.house.documents import ROOT, unexplained_metrics
from tests.learn.games import make_speaker

EXAMPLES = ROOT / "examples"
GOALS = {"train_my_reward": 2.0, "own_loss": 0.8, "tasks_from_python": 0.8, "text_game": 0.35}
"""Each example, and the reward that it must reach. None begins above a quarter of that."""

AGENTS = {"openai_sdk_agent": 12, "langgraph_agent": 12, "command_agent/train": 16}
"""Examples of agents, and the number of steps in which each learns to use its tools."""

PICTURES = {"picture_game", "picture_agent"}
"""Examples with a vision-language model. Their tests make it with few steps, and train for one."""

OWN_METRICS = {"pace"}
"""The metrics of the example's own loss."""


def run_command(words: list[str], folder: Path) -> str:
    """Return the output of a command, started as a user would, with the examples on the path."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(EXAMPLES), str(ROOT)])}
    done = subprocess.run([sys.executable, *words], cwd=folder, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_is_run() -> None:
    agents = {path for path in AGENTS if "/" not in path}
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {
        *GOALS,
        *agents,
        *PICTURES,
        "teach_and_judge",
        "harbor_agent",
    }
    assert {path.parent.name for path in EXAMPLES.glob("*/*.py")} == {
        path.partition("/")[0] for path in {*AGENTS} - agents
    }


@pytest.mark.integration
@pytest.mark.parametrize("name", GOALS)
def test_an_example_learns(name: str, tmp_path: Path) -> None:
    output = run_command([str(EXAMPLES / f"{name}.py"), "run"], tmp_path)
    rewards = [float(value) for value in re.findall(r"^step .* reward +([\d.]+)", output, flags=re.MULTILINE)]
    assert rewards[0] < GOALS[name] / 4 and rewards[-1] > GOALS[name], output
    assert not unexplained_metrics(tmp_path / "run/run/metrics.jsonl") - OWN_METRICS


def played(name: str, directory: Path, steps: int) -> tuple[str, list[float]]:
    """Run an example of an agent; return its output and the reward of each step."""
    output = run_command([str(EXAMPLES / f"{name}.py"), "run", str(steps)], directory)
    rewards = [float(value) for value in re.findall(r"^step .* reward +([\d.]+)", output, flags=re.MULTILINE)]
    assert len(rewards) == steps and re.search(r"^Right answers to held-out questions: \d+%", output, re.MULTILINE), (
        output
    )
    return output, rewards


@pytest.mark.integration
@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_is_trained(name: str, tmp_path: Path) -> None:
    """One step shows that it is trained; `make soak` measures how far it comes."""
    output, rewards = played(name, tmp_path, 1)
    assert 0.1 < rewards[0] < 0.6, output
    last = json.loads((tmp_path / "run/run/metrics.jsonl").read_text().splitlines()[-1])
    assert last["failed_attempts"] == 0 and last["endpoint/turns_continued"] > 10, last
    assert "endpoint/turns_branched" not in last, "every turn goes on from the one before"
    shown = run_command(["-m", "etude", "answers", "run/run"], tmp_path)
    assert "user: How many" in shown and '{"name": "find"' in shown
    assert ("of them written by the model" in output) == name.startswith("command"), "which tries its agent out first"


@pytest.mark.soak
@pytest.mark.parametrize(("name", "steps"), AGENTS.items())
def test_an_agent_learns_to_use_its_tools(name: str, steps: int, tmp_path: Path) -> None:
    _, rewards = played(name, tmp_path, steps)
    assert rewards[0] < 0.45 and rewards[-1] > 0.7


HARBOR = """#!{python}
import json, os, pathlib, sys, urllib.request
given = dict(word.removeprefix("--").partition("=")[::2] for word in sys.argv[2:])
instruction = pathlib.Path(given["path"], "instruction.md").read_text()
asked = {{"model": given["model"].removeprefix("openai/"), "messages": [{{"role": "user", "content": instruction}}]}}
headers = {{"Authorization": "Bearer " + os.environ[given["api-key-name"]], "Content-Type": "application/json"}}
request = urllib.request.Request(given["base-url"] + "/chat/completions", json.dumps(asked).encode(), headers)
urllib.request.urlopen(request).read()
result = {{"verifier_result": {{"rewards": {{"passed": 0.5}}}}, "exception_info": None}}
if "broken" in given["path"]:
    result = {{"verifier_result": None, "exception_info": {{"exception_type": "NoContainerError"}}}}
trial = pathlib.Path(given["jobs-dir"], "job", "trial")
trial.mkdir(parents=True)
(trial / "result.json").write_text(json.dumps(result))
"""
"""A stand-in for the command `harbor`, which needs Python 3.12 and containers."""


@pytest.mark.integration
def test_a_trial_of_harbor_is_an_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its calls are recorded, and its verifier gives the reward. A trial without one fails with Harbor's error."""
    make_speaker(tmp_path / "model", steps=11)
    for name in ("broken", "whole"):
        (tmp_path / "tasks" / name).mkdir(parents=True)
        (tmp_path / "tasks" / name / "task.toml").touch()
        (tmp_path / "tasks" / name / "instruction.md").write_text("a")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/harbor").write_text(HARBOR.format(python=sys.executable))
    (tmp_path / "bin/harbor").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("HARBOR_TASKS", str(tmp_path / "tasks"))
    words = ["train", "grpo", f"model.path={tmp_path / 'model'}", "agent.path=harbor_agent:agent", "reward=environment"]
    words += ["data.train=[harbor_agent:tasks]", "collect.tasks=2", "collect.group_size=2", "collect.retries=0"]
    words += ["sampling.max_tokens=8", "data.max_prompt_length=16", "train.precision=fp32", "threads=1", "steps=1"]
    monkeypatch.syspath_prepend(EXAMPLES)
    assert main([*words, f"directory={tmp_path / 'run'}"]) == 0
    (step,) = [line for line in read_metrics(tmp_path / "run") if line["step"] == 1]
    assert step["reward/passed"] == 0.5 and step["turns"] == 1 and step["failed_attempts"] == 2
    assert main(["answers", str(tmp_path / "run")]) == 0
    assert "NoContainerError" in capsys.readouterr().out


def test_examples_of_agents_are_short() -> None:
    files = [EXAMPLES / f"{name}.py" for name in AGENTS] + [EXAMPLES / "command_agent/agent.sh"]
    assert max(len(file.read_text().splitlines()) for file in files) <= 60


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(PICTURES))
def test_an_example_with_pictures_is_trained(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counting_model, "STEPS", 21)
    monkeypatch.setattr(counting_model, "BATCH", 16)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLES)
    runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](Path("run"), 1)
    (step,) = [line for line in read_metrics(Path("run/run")) if line["step"] == 1]
    assert 0 < step["reward"] < 0.7 and not unexplained_metrics(Path("run/run/metrics.jsonl"))
    with closing(open_store(Path("run/run/journal.sqlite"), read_only=True)) as store:
        rollouts = [id for task in store.tasks() if task.step == 1 for id in task.rollouts]
        shown = {tuple(len(turn.images) for turn in store.turns(id)) for id in rollouts}
    assert shown - {(1,)} == ({(1, 2)} if name == "picture_game" else set())


@pytest.mark.integration
def test_a_reward_model_improves_a_model_trained_on_demonstrations(tmp_path: Path) -> None:
    output = run_command([str(EXAMPLES / "teach_and_judge.py"), "all"], tmp_path)
    before, after = (float(value) for value in re.findall(r"eval/mean@1 +│ +([\d.]+)", output))
    assert before < 0.5 and after > 0.7, output
    assert not unexplained_metrics(tmp_path / "all/run/metrics.jsonl")
    for name in ("taught", "judging"):
        assert not unexplained_metrics(tmp_path / f"all/{name}/metrics.jsonl", "## Supervised training")


def test_an_environment_of_gymnasium_needs_twenty_lines() -> None:
    tree = ast.parse((EXAMPLES / "text_game.py").read_text())
    (game,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Game"]
    assert game.end_lineno is not None and game.end_lineno - game.lineno + 1 <= 20


def test_a_game_that_is_won_at_the_last_turn_is_not_cut_off() -> None:
    game = runpy.run_path(str(EXAMPLES / "text_game.py"))["Game"]
    observed = []
    for digit in range(4):
        play = game(turns=1)
        play.reset(Task(0, {"seed": 0}))
        observation = play.step(Message("assistant", str(digit)))
        observed.append((observation.reward, observation.done, observation.truncated))
    assert sorted(observed) == [(0.0, False, True)] * 3 + [(1.0, True, False)]


@pytest.mark.slow
def test_the_examples_loss_trains_in_the_tabular_demonstration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLES)
    words = ["demo", "algorithms", "loss=own_loss:Fading", "loss.width=0.5", "steps=2", "observe.console=plain"]
    assert main(words) == 0 and "own_loss:Fading" in capsys.readouterr().out
