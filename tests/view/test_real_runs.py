"""The viewer over three real runs, by keys alone: the demo, an agent with a tool, and a run that is killed and resumed
while its page is open. What the pages show is compared with the journals."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import etude
from etude.chat import Tokenizer
from etude.cli import main
from etude.demo import sorting_model
from etude.recipes.run.directory import read_metrics
from etude.store import Journal
from etude.tools.rollout_reader import open_journal
from tests.chaos.scenario import KillPoint, RunKiller, make_world
from tests.learn import games
from tests.learn.looking import looker
from tests.view.browser import READY, Browser, click, texts

pytestmark = pytest.mark.usefixtures("without_problems")

KILLED_IN, STEPS = 6, 30
QUIET = {"observe.console": "off", "observe.level": "error"}


@pytest.fixture(scope="module")
def killer() -> RunKiller:
    return RunKiller()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, killer: RunKiller, world: Path) -> Path:
    root = tmp_path_factory.mktemp("runs")
    assert not killer.run_once(root / "killed", world, KillPoint("updated", KILLED_IN), steps=STEPS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sorting_model, "STEPS", 100)
        few = ["steps=2", "collect.tasks=4", "evaluate.limit=20", f"directory={root / 'demo'}"]
        assert main(["demo", *few, *(f"{name}={value}" for name, value in QUIET.items())]) == 0
    lookups: list[Any] = games.lookups(24, 0)
    rows = [{**row, "key": row["prompt"][0]["content"]} for row in lookups]
    options = {"model.path": games.make_speaker(world / "speaker"), "steps": 2, "threads": 1, **QUIET}
    options |= {"collect.tasks": 4, "sampling.max_tokens": 8, "data.max_prompt_length": 16, "train.precision": "fp32"}
    etude.Trainer(etude.RL("grpo", options, root / "agent")).fit(looker, rows)
    return root


def last_step(root: Path) -> int:
    """Return the last step that the killed run has logged."""
    return int(read_metrics(root / "killed")[-1]["step"])


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stop a process for a block."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def follow(browser: Browser, link: str, heading: str) -> None:
    """Follow a link by the Enter key, and wait for the page with this heading."""
    browser.evaluate(f"document.querySelector({link!r}).focus()")
    browser.press("Enter")
    browser.until(f"document.querySelector('h1')?.innerText.startsWith({heading!r}) && {READY}")


def table(browser: Browser, caption: str) -> list[dict[str, str]]:
    """Return the rows of a table by its headings, which have a mark if they sort."""
    region = f".scroll[aria-label={caption!r}]"
    browser.until(f'document.querySelector("{region} tbody td")')
    headings = [text.strip(" ▾▴") for text in texts(browser, f"{region} th")]
    cells = iter(texts(browser, f"{region} tbody td"))
    return [dict(zip(headings, row, strict=True)) for row in zip(*[cells] * len(headings), strict=True)]


def rewards(store: Journal, step: int) -> dict[str, float]:
    """Return the reward of each rollout that a step trained on, by its id as text."""
    states = [store.rollout(rollout) for rollout in store.admitted()[step]]
    return {str(state.id): state.last.total for state in states if state.last and state.last.total is not None}


def shown_rewards(rows: list[dict[str, str]], known: Mapping[str, float]) -> dict[str, float]:
    """Return the rewards of a table for these rollouts."""
    return {row["rollout"]: float(row["reward"]) for row in rows if row["rollout"] in known}


def answer_tokens(browser: Browser) -> str:
    """Return the text of the tokens that the policy sampled in the shown turn."""
    browser.until(f"{READY} && document.querySelector('.tokens [data-place]')")
    shown = "[...document.querySelectorAll('[data-place]:not(.context)')]"
    return str(browser.evaluate(f"{shown}.map(token => token.textContent).join('')"))


def test_a_killed_run_is_resumed_while_its_page_is_open(
    browser: Browser, address: str, root: Path, world: Path, killer: RunKiller
) -> None:
    browser.open(address)
    found = {row["run"]: row["status"] for row in table(browser, "runs")}
    assert found == {"demo": "done", "agent": "done", "killed": "killed"}
    follow(browser, "tbody a[href*=killed]", "killed")
    assert f"step\n{KILLED_IN - 1} of {STEPS}" in texts(browser, ".facts div")
    ends = '[aria-label="sessions"] .status'

    def watch(pid: int) -> None:
        end = time.monotonic() + 60
        while last_step(root) <= KILLED_IN and time.monotonic() < end:
            time.sleep(0.02)
        with stopped(pid):
            step = last_step(root)
            assert KILLED_IN < step < STEPS, "it trains while its page is open"
            browser.until(f"document.querySelector('.facts').innerText.includes('step\\n{step} of {STEPS}')")
            assert texts(browser, "h1 .status") == ["running"] and texts(browser, ends) == ["killed", "running"]

    assert killer.run_once(root / "killed", world, KillPoint(), meanwhile=watch, steps=STEPS)
    browser.until("document.querySelector('h1 .status').innerText == 'done'")
    assert texts(browser, ends) == ["killed", "done"]
    assert {"killed", "resumed"} <= set(texts(browser, ".legend span"))
    steps = {row["step"]: row for row in table(browser, "steps")}
    metrics = {str(step["step"]): step for step in read_metrics(root / "killed")}
    for step, row in steps.items():
        assert float(row["reward"]) == pytest.approx(metrics[step]["reward"], abs=1e-4), step


def test_the_demo_is_read_from_its_curves_down_to_a_token(browser: Browser, address: str, root: Path) -> None:
    with open_journal(root / "demo") as store:
        expected = rewards(store, 2)
    browser.open(address)
    table(browser, "runs")
    follow(browser, "tbody a[href*=demo]", "demo")
    browser.press("/")
    browser.type("grad_norm")
    browser.until("document.querySelector('.metric')?.innerText == 'grad_norm'")
    table(browser, "steps")
    follow(browser, "[aria-label=steps] tbody a", "Step 2")
    assert shown_rewards(table(browser, "rollouts"), expected) == pytest.approx(expected, abs=1e-4)
    follow(browser, "[aria-label=groups] tbody a", "Group of task")
    follow(browser, ".answer a", "Rollout")
    rollout = texts(browser, "h1")[0].split()[1]
    with open_journal(root / "demo") as store:
        (turn,) = store.turns(int(rollout), 0)
        prompt = store.task(store.rollout(int(rollout)).task).fields["prompt"]
    assert texts(browser, ".fate") in (
        ["Step 2 trained on this rollout."],
        ["Step 2 dropped its group: all rewards are equal."],
    )
    assert texts(browser, ".message .said") == [prompt, turn.completion.text]
    click(browser, "Tokens")
    tokenizer = Tokenizer.load(root / "demo" / "world" / "model")
    assert answer_tokens(browser) == tokenizer.decode(turn.completion.ids, keep_special_tokens=True)
    assert answer_tokens(browser).startswith(turn.completion.text)
    browser.evaluate("document.querySelector('.tokens').focus()")
    browser.press("ArrowRight")
    browser.until("document.querySelector('.token-facts').innerText.includes('token 0 of the answer')")
    follow(browser, "dd a[href^=group]", "Group of task")
    follow(browser, "dd a[href^=task]", "Task of row")
    assert [prompt] == texts(browser, ".message .said") and f"rollout {rollout}" in " ".join(texts(browser, ".answer"))
    follow(browser, "nav a[href^=search]", "Search")
    browser.press("/")
    browser.type("reward=1 step=2 batch:yes")
    right = sorted(rollout for rollout, reward in expected.items() if reward == 1)
    browser.until(f"{READY} && document.querySelector('.looked').innerText.startsWith('{len(right)} found')")
    assert sorted(texts(browser, "tbody td:first-child")) == right


def test_an_agent_is_read_by_its_turns_and_its_tool(browser: Browser, address: str, root: Path) -> None:
    browser.open(f"{address}search?run=agent&q=tool%3Alook")
    rows = table(browser, "rollouts")
    rollout = next(row for row in rows if row["turns"] == "2")["rollout"]
    with open_journal(root / "agent") as store:
        state, turns = store.rollout(int(rollout)), store.turns(int(rollout), 0)
        task = store.task(state.task).fields
        succeeded = sum(state.status == "succeeded" for state in store.rollouts())
    follow(browser, f"tbody a[href$='={rollout}']", f"Rollout {rollout}")
    assert state.last is not None and f"reward\n{state.last.total:g}" in texts(browser, ".facts div")
    assert texts(browser, ".by-model summary") == ["tool call look"]
    assert texts(browser, ".message h3") == ["user", "model", "tool", "model"]
    assert task["table"][task["key"]] in texts(browser, ".message")[2]
    click(browser, "Tokens")
    assert answer_tokens(browser).startswith(turns[1].completion.text)
    click(browser, "previous turn")
    browser.until("location.search.includes('turn=0')")
    assert answer_tokens(browser).startswith(turns[0].completion.text) and "<tool_call>" in turns[0].completion.text
    follow(browser, "nav a[href^=run]", "agent")
    follow(browser, "a[href^=store]", "Rollout queue")
    (runner,) = table(browser, "Runners")
    assert (runner["attempts under way"], runner["succeeded"]) == ("0", str(succeeded))
