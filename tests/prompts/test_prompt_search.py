"""Searches for a prompt: a scripted writer finds the words that an agent rewards, also after it was stopped."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import etude
from etude.cli import main
from etude.errors import ConfigError, EngineError, RunError
from etude.prompts.search import PromptSearch, PromptTrial
from etude.prompts.search_log import SearchLog
from etude.prompts.writer import UnusablePromptError, read_prompt
from etude.store import RolloutState, Status, open_store
from tests.learn import games
from tests.rewards.served import Reply, serving

Captured = pytest.CaptureFixture[str]
WORDS = ("carefully", "stepwise", "digits")
FIRST = "Add the numbers of {question}."
TASKS = [{"question": f"{n}+{n}", "answer": str(2 * n)} for n in range(6)]


@etude.agent
async def adder(task: Any, llm: Any, resources: Any) -> float:
    """Ask the model, and return how many of the words the prompt has."""
    prompt = resources["prompt"]
    if "fail" in prompt:
        raise RuntimeError("the agent cannot work with this prompt")
    messages = [{"role": "user", "content": "key"}]
    await llm.async_client.chat.completions.create(model=llm.model, messages=messages)
    return sum(word in prompt for word in WORDS) / len(WORDS)


class Scripted:
    """A writer that names a missing word, and then adds it. Its n-th call may fail."""

    def __init__(self, fails_at: int = 10**6) -> None:
        self.calls: list[str] = []
        self.fails_at = fails_at

    def __call__(self, message: str) -> str:
        """Answer a message of APO or GEPA."""
        self.calls.append(message)
        if len(self.calls) == self.fails_at:
            raise RuntimeError("the power is off")
        if "```" in message:
            now = message.split("```")[1].strip()
            return f"```\n{now} {missing(now)}\n```"
        prompt = message.split("<prompt>\n")[1].split("\n</prompt>")[0]
        if "A reviewer says" not in message:
            assert "Reward: " in message and "The model was asked:" in message and '"answer": "' in message
            return missing(prompt)
        return f"Here it is: <prompt>{prompt} {message.split('says about it:')[1].split()[0]}</prompt>"


def missing(prompt: str) -> str:
    """Return the first word that a prompt lacks, as one word of the message."""
    return next((word for word in WORDS if word not in prompt), "more")


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    torch.set_num_threads(1)
    model = tmp_path_factory.mktemp("prompts") / "model"
    games.make_speaker(model, steps=11)
    few = {"sampling.max_tokens": 4, "threads": 1, "train.precision": "fp32", "collect.retries": 0}
    return {"model.path": model, **few, "observe.level": "error"}


def fit(search: PromptSearch) -> dict[str, float]:
    return etude.Trainer(search, n_runners=1).fit(adder, TASKS[:4], TASKS[4:])


SEARCHES: dict[str, Callable[..., PromptSearch]] = {
    "apo": lambda **more: etude.APO(FIRST, beam_width=2, branch_factor=1, gradient_batch_size=2, **more),
    "gepa": lambda **more: etude.GEPA(FIRST, max_rollouts=40, **more),
}


@pytest.mark.parametrize("kind", SEARCHES)
def test_a_search_that_was_stopped_continues_and_finds_the_best_prompt(
    kind: str, options: dict[str, Any], tmp_path: Path, capsys: Captured
) -> None:
    where = tmp_path / "search"
    with pytest.raises(RuntimeError, match="the power is off"):
        fit(SEARCHES[kind](options=options, writer=Scripted(fails_at=3), directory=where))
    resumed = SEARCHES[kind](options=options, writer=Scripted(), directory=where)
    scores = fit(resumed)
    assert "The search continues after " in capsys.readouterr().out
    assert (scores["first_score"], scores["score"]) == (0.0, 1.0)
    assert resumed.best is not None and all(word in resumed.best.text for word in WORDS)
    assert "{question}" in resumed.best.text and (where / "prompt.txt").read_text() == resumed.best.text
    with pytest.raises(
        RunError, match=r"another sampling\.max_tokens and evaluate\.sampling\.max_tokens: 4 there, 3 here"
    ):
        fit(SEARCHES[kind](options={**options, "sampling.max_tokens": 3}, writer=Scripted(), directory=where))
    log = [json.loads(line) for line in (where / "search.jsonl").read_text().splitlines()]
    assert len({line["name"] for line in log[1:]}) == len(log) - 1
    with closing(open_store(where / "journal.sqlite")) as store:
        states = Counter(state.status for state in store.iter_states(RolloutState))
    assert set(states) <= {Status.SUCCEEDED, Status.CANCELLED} and states[Status.SUCCEEDED] >= scores["rollouts"]


def test_a_writer_without_a_usable_prompt_and_an_agent_that_fails_are_told(options: dict[str, Any]) -> None:
    search = etude.APO(FIRST, options, lambda _: "<prompt>Add them.</prompt>", beam_width=1, branch_factor=1)
    with pytest.raises(
        RunError, match=r"no new prompt in 1 branches of round 1\. The writer's prompt lacks \{question\}"
    ):
        fit(search)
    evolved = etude.GEPA(FIRST, options, lambda _: "```\nAdd carefully.\n```", max_rollouts=12)
    assert fit(evolved)["score"] == 0.0 and evolved.best is not None and evolved.best.text == FIRST
    with pytest.raises(
        RunError, match=r"2 of 2 rollouts of the first prompt failed.*cannot work with this prompt\. Correct"
    ):
        fit(etude.APO("Please fail.", options, Scripted()))


def test_the_command_asks_a_writer_of_another_provider(
    options: dict[str, Any], tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It prints what it finds, also after Ctrl-C, and the provider sees its own model and key."""
    script = Scripted()
    presses = [signal.SIGINT]

    def answer(body: dict[str, Any]) -> Reply:
        while presses:
            os.kill(os.getpid(), presses.pop())
        return Reply(script(body["messages"][0]["content"]))

    monkeypatch.setenv("WRITER_KEY", "k1")
    (tmp_path / "prompt.txt").write_text(FIRST + "\n")
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in TASKS[:2]))
    with serving(lambda _, body: answer(body)) as provider:
        models = {"gpt": {"url": provider.url, "model": "gpt-9", "api_key_env": "WRITER_KEY"}}
        (tmp_path / "models.yaml").write_text(yaml.safe_dump(models))
        words = ["optimize-prompt", "apo", str(options["model.path"]), "--prompt", str(tmp_path / "prompt.txt")]
        words += ["--out", str(tmp_path / "out"), "--rounds", "1", "--width", "1", "--branches", "1", "--writer", "gpt"]
        words += ["sampling.max_tokens=4", "threads=1", "train.precision=fp32", "observe.level=error", "--json"]
        words += [f"agent.path={__file__}:adder", f"data.train=[{tmp_path / 'tasks.jsonl'}]"]
        words.append(f"agent.external={tmp_path / 'models.yaml'}")
        assert main(words) == 130
        assert f"with `--out {tmp_path / 'out'}` continues the search" in capsys.readouterr().out
        assert main(words) == 0
        assert [sent["model"] for sent in provider.requests] == ["gpt-9"] * 3
        assert provider.headers[0]["authorization"] == "Bearer k1"
        shown = capsys.readouterr().out
        assert json.loads(shown.splitlines()[-1])["score"] == pytest.approx(1 / 3)
        assert "first prompt: 0.000 on 2 tasks" in shown and "1 new prompts, the best has 0.333" in shown
        assert main([*words, "--max-rollouts", "9"]) == 2 and main([*words, "--writer", "claude"]) == 2
        assert "`apo` has no `--max-rollouts`" in (refused := capsys.readouterr().err)
        assert "There is no writer 'claude'. The writers are: served, gpt." in refused


def test_the_served_model_answers_the_same_call_alike(options: dict[str, Any]) -> None:
    texts: list[str] = []

    class Asking(etude.Algorithm):
        def run(self, train: Any, val: Any) -> dict[str, float]:
            with self.serving(options) as served:
                texts.extend(served.loop.run(served.ask("key", name)) for name in ("a", "a", "b"))
                with pytest.raises(EngineError, match=r"has \d+ tokens, and its context has 48\. Ask for less at once"):
                    served.loop.run(served.ask("key " * 60, "c"))
            return {}

    etude.Trainer(Asking()).fit(adder, TASKS)
    assert texts[0] == texts[1] != texts[2]


def test_a_log_keeps_whole_lines_and_refuses_other_files(tmp_path: Path) -> None:
    with SearchLog(tmp_path, {"seed": 1}) as log:
        log.add("a", {"score": 1.0})
    path = tmp_path / "search.jsonl"
    with path.open("ab") as file:
        file.write('{"name": "b", "result": {"text": "é'.encode()[:-1])
    with SearchLog(tmp_path, {"seed": 1}) as log:
        assert log.find("a") == {"score": 1.0} and log.find("b") is None
        log.add("b", {"text": "\u2028"})
    with SearchLog(tmp_path, {"seed": 1}) as log:
        assert len(log) == 2 and log.find("b") == {"text": "\u2028"}
    with pytest.raises(RunError, match="another seed: 1 there, 2 here"):
        SearchLog(tmp_path, {"seed": 2})
    path.write_text("[]\n")
    with pytest.raises(RunError, match="is not the log of a search"):
        SearchLog(tmp_path, {"seed": 1})


def test_a_log_that_met_a_full_disk_has_whole_lines(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with SearchLog(tmp_path, {"seed": 1}) as log:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
        try:
            with pytest.raises(OSError, match="too large"):
                log.add("a", {"text": "x" * 100_000})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        log.add("b", {"text": "\ud800"})  # a task may have half of a character
    with SearchLog(tmp_path, {"seed": 1}) as log:
        assert log.find("a") is None and log.find("b") == {"text": "\ud800"}


def test_a_result_is_not_taken_for_that_of_another_message() -> None:
    """A call that failed is asked again after a stop, and what follows it may then be about other prompts."""
    nothing: Any = None

    async def ask(message: str, name: str) -> str:
        return f"{name}: {message}"

    with SearchLog(None, {}) as log:
        trial = PromptTrial(nothing, nothing, nothing, "prompt", ask, log, nothing)
        answers = [asyncio.run(trial.write("round 2", message)) for message in ("old", "new", "old")]
    assert answers == ["round 2: old", "round 2: new", "round 2: old"] and len(log) == 2


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (" ", "is empty"),
        ("<prompt>Add {n}</prompt>", "repeated the prompt"),
        ("{m}", r"lacks \{n\}"),
        ("n" * 20_001, "20001"),
    ],
)
def test_an_answer_that_is_no_prompt_is_refused(answer: str, why: str) -> None:
    assert read_prompt("So: <prompt>\nAdd {n} well.\n</prompt>", "Add {n}") == "Add {n} well."
    with pytest.raises(UnusablePromptError, match=why):
        read_prompt(answer, "Add {n}")


@etude.agent
def promptless(task: Any, llm: Any) -> float:
    """Take no resources."""
    return 1.0


def test_an_agent_that_takes_no_prompt_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"The agent .*promptless.* has no parameter `resources`"):
        etude.Trainer(etude.APO(FIRST, options)).fit(promptless, TASKS)


def test_impossible_numbers_are_refused() -> None:
    with pytest.raises(ConfigError, match="beam_width is 0; it is a whole number, 1 or more"):
        etude.APO("a", beam_width=0)
    with pytest.raises(ConfigError, match="max_rollouts is 0"):
        etude.GEPA("a", max_rollouts=0)
