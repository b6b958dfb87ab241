"""`etude.Trainer`: what `dev` shows of an agent, the errors, and the role that ETUDE_ROLE gives a process."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import etude
from etude.agents.agent import get_agent_spec, load_agent
from etude.cli import main
from etude.config.plugin import load_object
from etude.errors import ConfigError, EtudeError
from etude.recipes.run.directory import read_metrics, read_run
from etude.recipes.served_model import ServedModel
from etude.store import Phase
from etude.store.queue.rollout_queue import RolloutQuery
from tests.joined import ROOT, descendants
from tests.learn import games
from tests.learn.looking import looker
from tests.learn.test_agents import rows
from tests.processes import gone
from tests.waits import blocked_until

Captured = pytest.CaptureFixture[str]


@etude.agent
def raises(task: Any) -> float:
    """Raise at once."""
    raise RuntimeError("no such tool")


@etude.agent
async def unpaid(task: Any, llm: Any) -> None:
    """Call the model, and return no reward."""
    await llm.async_client.completions.create(model=llm.model, prompt="a")


@etude.agent
async def varied(task: Any, llm: Any, rollout: Any) -> float:
    """Return 1 at every second attempt."""
    messages = [{"role": "user", "content": task["key"]}]
    await llm.async_client.chat.completions.create(model=llm.model, messages=messages)
    return float(rollout.id % 2)


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    torch.set_num_threads(1)
    place = tmp_path_factory.mktemp("trainer")
    games.make_speaker(place / "model", steps=60)
    required = {"model.path": place / "model", "sampling.max_tokens": 8, "data.max_prompt_length": 16, "threads": 1}
    return {**required, "train.precision": "fp32", "collect.retries": 0}


def trainer(options: dict[str, Any], **more: Any) -> etude.Trainer:
    return etude.Trainer(etude.RL("grpo", options), **more)


def test_dev_shows_turns_rewards_and_trained_tokens(
    options: dict[str, Any], capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ETUDE_ROLE", "train")  # it plays here, in any role of a run
    trainer(options).dev(varied, rows(2, 0))
    shown = capsys.readouterr().out
    assert "try 1" in shown and "try 2" in shown and shown.count("reward ") == 4
    assert "turn 0: 4 tokens read" in shown and "tokens written (" in shown and "table={" in shown
    assert shown.count("row 1 of 1: ") == 4
    assert "advantage +" in shown and "would become more likely" in shown and "would become less likely" in shown
    assert "Nothing was trained" in shown and "served at" not in shown


@pytest.mark.parametrize(
    ("agent", "tasks", "message"),
    [
        (raises, [{"q": "x"}], "no such tool"),
        (unpaid, [{"q": "x"}], "ended without a reward, and the run's `reward` could not judge"),
    ],
)
def test_an_agent_that_fails_is_reported_with_the_reason(
    agent: Any, tasks: Any, message: str, options: dict[str, Any], capsys: Captured
) -> None:
    with pytest.raises(EtudeError, match="nothing to train on") as error:
        trainer(options).dev(agent, tasks)
    assert message in str(error.value)
    shown = capsys.readouterr().out
    assert "try 1: " in shown and ("turn 0: " in shown) == (agent is unpaid), "what was said before it failed"


BLACK_BOX = """
import json, os, urllib.error, urllib.request
asked = {"model": "gpt-9", "messages": [{"role": "user", "content": "a"}]}
headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
try:
    urllib.request.urlopen(urllib.request.Request(url, json.dumps(asked).encode(), headers))
except urllib.error.HTTPError as error:
    print("giving up:", error.code)
    raise SystemExit(1)
"""


def test_the_cause_of_a_black_boxs_failure_is_shown_with_what_it_wrote(
    options: dict[str, Any], capsys: Captured
) -> None:
    agent = etude.command([sys.executable, "-c", BLACK_BOX])
    with pytest.raises(EtudeError, match="nothing to train on") as error:
        trainer(options).dev(agent, [{"q": "x"}, {"q": "y"}], count=1)
    shown = capsys.readouterr().out
    for text in (str(error.value), shown):
        assert "exit code 1" in text and "Its standard output ended with:\ngiving up: 404" in text
        assert "The endpoint refused a call to /v1/chat/completions (404): This endpoint has no model 'gpt-9'" in text
    assert "standard output:\ngiving up: 404" in shown
    assert "task 1" not in shown, "no other task is played in place of one that failed"


@etude.agent
async def asks_apart(task: Any, llm: Any, rollout: Any) -> float:
    """Make two unrelated calls, continue from the first, and rewrite its history."""
    calls = llm.async_client.chat.completions
    messages: list[Any] = [{"role": "user", "content": "a"}]
    response = await calls.create(model=llm.model, messages=messages)
    await calls.create(model=llm.model, messages=[{"role": "user", "content": "b"}])
    answer = {"role": "assistant", "content": response.choices[0].message.content or ""}
    await calls.create(model=llm.model, messages=[*messages, answer, {"role": "user", "content": "c"}])
    await calls.create(model=llm.model, messages=[*messages, {"role": "assistant", "content": "h"}, *messages])
    return float(rollout.id % 2)


def test_dev_distinguishes_separate_calls_from_a_rewritten_history(options: dict[str, Any], capsys: Captured) -> None:
    trainer(options).dev(asks_apart, [{"q": "x"}], count=1)
    turns = re.findall(r"^turn (\d): .*? read(.*)$", capsys.readouterr().out, re.MULTILINE)
    assert turns[:4] == [
        ("0", ""),
        ("1", ", a separate conversation"),
        ("2", ", after those of turn 0"),
        ("3", ", a new row: after the prompt of turn 0 the agent rewrote its history"),
    ]


class Prompts(etude.Algorithm):
    """Find the prompt that earns the most; nothing is trained."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self.options, self.results = options, dict[str, list[str]]()

    def run(self, train: Any, val: Any) -> dict[str, float]:
        """Play every task with each prompt, all at once, and read the turns by a client."""
        with self.serving(self.options) as served, ThreadPoolExecutor() as threads:
            wanted = {"ab": train, "cd": [Path(train)]}
            playing = {prompt: threads.submit(served.play, of, {"prompt": prompt}) for prompt, of in wanted.items()}
            scores = {prompt: sum(each.total for each in played.result()) / 3 for prompt, played in playing.items()}
            asyncio.run(self._look())
            self._stop_waiting(served, train)
        return scores

    def _stop_waiting(self, served: ServedModel, train: Any) -> None:
        """Have the agent play a task that it never ends, and wait no longer, as after Ctrl-C."""
        tasks = served.load(train)
        playing = served.loop.submit(served.play_rows(tasks, [0], {"prompt": "wait"}))
        running = partial(served.store.rollouts, Phase.RUNNING)
        blocked_until(running)
        playing.cancel()
        blocked_until(lambda: not running())

    async def _look(self) -> None:
        client = self.get_client()
        for state in (await client.find(RolloutQuery())).rollouts:
            (turn,) = await client.turns(state.id)
            self.results.setdefault(state.status.value, []).append(turn.completion.text)
        await client.close()


@etude.agent
async def prompted(task: Any, llm: Any, resources: Any) -> float:
    """Return 1 for a prompt of c and d. Never end with one that says so."""
    if resources["prompt"] == "wait":
        await asyncio.Event().wait()
    messages = [{"role": "user", "content": resources["prompt"] + task["key"]}]
    await llm.async_client.chat.completions.create(model=llm.model, messages=messages)
    return float(resources["prompt"] == "cd")


def test_a_custom_algorithm_serves_a_model_and_has_a_client(options: dict[str, Any], tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("".join(json.dumps(row) + "\n" for row in rows(3, 0)))
    algorithm = Prompts({key: value for key, value in options.items() if key != "collect.retries"})
    returned = etude.Trainer(algorithm, n_runners=1).fit(prompted, str(tasks))
    assert returned == {"ab": 0.0, "cd": 1.0}
    assert {status: len(texts) for status, texts in algorithm.results.items()} == {"succeeded": 6}
    with pytest.raises(ConfigError, match=r"no rollout queue now\. It has one inside `with self.serving\("):
        algorithm.get_client()
    with pytest.raises(ConfigError, match="no agent to serve a model to"), algorithm.serving({}):
        pass


@pytest.mark.parametrize(
    ("done", "message"),
    [
        (lambda o: trainer(o, strategy="sham"), "`shm`, or processes of their own, `cs`"),
        (lambda o: trainer(o, n_runners=-1), "n_runners is -1; it is a whole number, 0 or more"),
        (lambda o: trainer(o, max_concurrency=0), "max_concurrency is 0; it is a whole number, 1 or more"),
        (lambda o: trainer(o, n_runners=0).dev(looker, rows(2, 0)), "starts no runner here: give it 1"),
        (lambda o: trainer(o).dev(looker, []), "list of tasks is empty. Give at least one"),
        (lambda o: trainer(o).fit(looker, cast(Any, [3])), "Tasks are mappings"),
        (lambda o: trainer(o).fit(looker), "trainer.fit(agent, train=tasks)"),
        (lambda o: trainer(o).fit(3, rows(2, 0)), "An agent is a function"),
        (lambda o: trainer(o | {"data.train": "x.jsonl"}).fit(looker, rows(2, 0)), "`data.train` is in `options`, and"),
        (lambda o: trainer(o | {"agent.runners": 2}).fit(looker, rows(2, 0)), "an argument of `etude.Trainer`"),
        (lambda o: trainer(o | {"reward.path": print}).fit(looker, rows(2, 0)), "`reward.path` was given a value of"),
        (
            lambda o: etude.Trainer(etude.RL("grpo", o | {"directory": "a"}, "b")).fit(looker, rows(2, 0)),
            "`directory` is in `options`, and is given as `directory` of RL too. Give it once.",
        ),
        (lambda o: etude.Trainer(etude.RL("steps=3", o)).fit(looker, rows(2, 0)), "There is no preset 'steps=3'"),
    ],
)
def test_impossible_calls_are_refused_with_a_remedy(
    done: Callable[[dict[str, Any]], Any], message: str, options: dict[str, Any]
) -> None:
    with pytest.raises(EtudeError) as error:
        done(options)
    assert message in str(error.value)


def test_a_baseline_reports_and_learns_nothing(options: dict[str, Any], tmp_path: Path, capsys: Captured) -> None:
    metrics = etude.Trainer(etude.Baseline("grpo", options, tmp_path / "run")).fit(looker, val=iter(rows(4, 1)))
    shown = capsys.readouterr().out
    assert 0 <= metrics["eval/mean@1"] <= 1 and metrics["eval/failed"] == 0
    assert "eval/mean@1" in shown and "eval/engine" not in shown and "evaluations" in shown
    assert not list((tmp_path / "run").glob("checkpoints/step-*"))


def test_each_data_source_has_its_own_agent(options: dict[str, Any], tmp_path: Path) -> None:
    """One source looks things up, one is answered by another agent, and one is answered once and judged."""
    sources = ("shop", "game", "maths")
    tasks = [
        row | {"data_source": source, "prompt": row["key"]} for row, source in zip(rows(3, 0), sources, strict=True)
    ]
    judged = {"reward": "by_source", "reward.sources.maths": "exact_match"}
    judged |= {f"reward.sources.{source}": "environment" for source in ("shop", "game")}
    agents = {"shop": looker, "game": varied}
    metrics = etude.Trainer(etude.Baseline("grpo", options | judged, tmp_path / "run")).fit(agents, val=tasks)
    assert metrics["eval/failed"] == 0 and all(f"eval/{source}/mean@1" in metrics for source in sources)
    assert read_run(tmp_path / "run").agent.sources["shop"] == "tests.learn.looking:looker"
    with pytest.raises(ConfigError, match=r"`agent\.sources\.shop` is in `options`, and is given as"):
        trainer(options | {"agent.sources.shop": "a.py:b"}).fit(looker, tasks)


def alone(tmp_path: Path, code: str) -> str:
    """A file that holds an agent and nothing else."""
    (tmp_path / "mine.py").write_text(code)
    return f"{tmp_path / 'mine.py'}:solve"


MINE = """
async def solve(task, llm, rollout):
    asked = [{"role": "user", "content": task["key"]}]
    await llm.async_client.chat.completions.create(model=llm.model, messages=asked)
    return float(rollout.id % 2)
"""


def test_a_run_of_a_program_is_resumed_and_scored_by_commands(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    solve, run = load_object(alone(tmp_path, MINE), "agent", ""), tmp_path / "run"
    few = {"steps": 1, "collect.tasks": 2, "collect.group_size": 2}
    etude.Trainer(etude.RL("grpo", options | few, run)).fit(solve, rows(4, 0), rows(2, 1))
    monkeypatch.chdir(tmp_path / "run")
    assert main(["train", "--resume", str(run), "steps=2"]) == 0
    assert [step["step"] for step in read_metrics(run)] == [1, 2]
    assert main(["eval", str(run)]) == 0
    assert "mean@1" in capsys.readouterr().out


def test_a_run_whose_agent_no_command_finds_is_resumed_by_its_program(
    options: dict[str, Any], tmp_path: Path, capsys: Captured
) -> None:
    @etude.agent
    async def stops(task: Any, llm: Any, rollout: Any) -> float:
        os.kill(os.getpid(), signal.SIGINT) if rollout.id == 0 else None
        await llm.async_client.completions.create(model=llm.model, prompt="a")
        return float(rollout.id % 2)

    run = tmp_path / "run"
    algorithm = etude.RL("grpo", options | {"steps": 2, "collect.tasks": 2, "collect.group_size": 2}, run)
    with pytest.raises(KeyboardInterrupt):
        etude.Trainer(algorithm).fit(stops, rows(4, 0))
    errors = capsys.readouterr().err
    assert f"Go on by running the program again: `fit` with the directory {run}" in errors and "--resume" not in errors
    assert main(["train", "--resume", str(run)]) == 2
    assert "The agent stops was given to `etude.Trainer` by a program" in capsys.readouterr().err
    before = (run / "tasks" / "train.jsonl").read_bytes()
    with pytest.raises(ConfigError, match="started on other tasks"):
        etude.Trainer(algorithm).fit(stops, rows(5, 0))
    assert (run / "tasks" / "train.jsonl").read_bytes() == before
    assert etude.Trainer(algorithm).fit(stops, iter(rows(4, 0)))["step"] == 2


def test_a_file_that_trains_when_it_is_loaded_is_refused(options: dict[str, Any], tmp_path: Path) -> None:
    code = f"import etude\n{MINE}\netude.Trainer(etude.RL()).fit(solve, [dict(q='x')])\n"
    with pytest.raises(EtudeError, match=r"trains as soon as it is imported.*if __name__ == '__main__'"):
        load_agent(alone(tmp_path, code))


def test_an_agent_at_the_top_level_of_a_program_has_a_name(tmp_path: Path) -> None:
    spec = alone(
        tmp_path, "import etude\n" + MINE + "\nclass Own(etude.Agent):\n    def run(self): ...\n\nown = Own()\n"
    )
    place, solve = spec.removesuffix(":solve"), load_object(spec, "agent", "")
    held = sys.modules[solve.__module__]
    assert [get_agent_spec(agent) for agent in (solve, held.own, held.Own)] == [spec, f"{place}:own", f"{place}:Own"]
    assert (
        get_agent_spec(looker) == "tests.learn.looking:looker"
        and get_agent_spec(held.Own()) == "given by a program: Own"
    )
    assert type(load_agent(get_agent_spec(held.own))) is held.Own


def test_an_algorithm_has_a_queue_client_while_it_runs(options: dict[str, Any], tmp_path: Path) -> None:
    algorithm, seen = etude.Baseline("grpo", options, tmp_path / "run"), list[tuple[int, str]]()

    @etude.agent
    async def looks(task: Any, llm: Any, rollout: Any) -> float:
        queue = algorithm.get_client()
        state = (await queue.find(RolloutQuery(ids=(rollout.id,)))).rollouts[0]
        await queue.close()
        seen.append((state.id - rollout.id, state.status))
        return 1.0

    assert etude.Trainer(algorithm).fit(looks, val=rows(2, 1))["eval/mean@1"] == 1
    assert seen == [(0, "running")] * 2
    with pytest.raises(
        ConfigError, match=r"Baseline has no rollout queue now.*; RL and Baseline have one while they run"
    ):
        algorithm.get_client()


def test_a_training_program_refuses_the_role_of_a_store(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ETUDE_ROLE", "store")
    with pytest.raises(ConfigError, match="etude store DIRECTORY"):
        trainer(options).fit(looker, rows(2, 0))


PROGRAM = """
import sys
import etude
from tests.learn.looking import looker
from tests.learn.test_agents import rows

if __name__ == "__main__":
    model, directory, address = sys.argv[1:]
    options = {"model.path": model, "sampling.max_tokens": 8, "data.max_prompt_length": 16, "threads": 1, "steps": 2,
               "train.precision": "fp32", "collect.tasks": 2, "collect.group_size": 2, "agent.listen": address}
    print(etude.Trainer(etude.RL("grpo", options, directory), n_runners=1).fit(looker, rows(8, 0)).get("step"))
"""


@pytest.mark.integration
def test_one_program_is_the_trainer_and_its_runner(options: dict[str, Any], tmp_path: Path) -> None:
    """The program is started twice, with two values of ETUDE_ROLE. The trainer starts no runner, and the other one
    plays."""
    program, run, key = tmp_path / "program.py", tmp_path / "run", tmp_path / "run" / "runner.key"
    program.write_text(PROGRAM)
    words = [sys.executable, str(program), str(options["model.path"]), str(run), "127.0.0.1:0"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    log = tmp_path / "log"
    with log.open("w") as file:
        train = subprocess.Popen(words, env={**environment, "ETUDE_ROLE": "train"}, stdout=file, stderr=file)
    runner: subprocess.Popen[bytes] | None = None
    try:
        until = time.monotonic() + 120
        while "Runners may join" not in log.read_text() or not key.exists():
            assert train.poll() is None and time.monotonic() < until, log.read_text()
            time.sleep(0.1)
        variables = {"ETUDE_ROLE": "runner", "ETUDE_STORE_KEY": key.read_text()}
        variables["ETUDE_STORE_URL"] = log.read_text().split("--url ")[1].split()[0]
        runner = subprocess.Popen(words, env=environment | variables)
        assert train.wait(120) == 0 and log.read_text().rstrip().endswith("2"), log.read_text()
        processes = descendants(runner.pid)
        runner.send_signal(signal.SIGTERM)
        assert runner.wait(60) == 0 and all(gone(pid) for pid in processes)
    finally:
        for process in (train, runner):
            if process is not None:
                process.kill()
                process.wait()
