"""`etude demo agent`: an agent written for the OpenAI client learns to use its tools.

The agent calls the run's endpoint like any server. The endpoint records its prompts and completions, and the run trains
on them. Everything after the warm-up is what `etude train agent.path=…` does, and writes a normal run directory.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from etude.demo import storeroom_agent, storeroom_model
from etude.demo.demo_setup import AGENT_DEMO, compose_demo, create_world, print_conclusion
from etude.observe import format_seconds, make_console
from etude.recipes.run.builders.assemble import build
from etude.recipes.run.directory import read_metrics
from etude.recipes.run.loop import run_loop
from etude.recipes.run.rules.checks import find_warnings
from etude.tools.plot import plot

TASKS = {"train": 2_000, "held_out": 200}
CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
BY_TOOL = {"find": "shelf {}", "count": "{} of them"}
LEARNING = ("annotate", "estimate", "update", "publish")
"""The phases of a step without rollouts and evaluation."""


@dataclass(frozen=True)
class ScoredTask:
    """One held-out task, with the agent's conversation in an evaluation."""

    question: str
    wanted: str
    conversation: Sequence[Mapping[str, str]]
    right: bool

    @property
    def calls(self) -> int:
        """The number of tool calls of the model."""
        return sum(bool(CALL.search(message["text"])) for message in self.conversation if message["by"] == "model")


def run_demo(overrides: Sequence[str], file: Path | None = None, began: float | None = None) -> dict[str, Any]:
    """Create tasks and a model, train the model with the agent, print the progress, and return the result.

    began: a reading of `time.perf_counter` at the start of the program, so that import time counts too.
    """
    run = compose_demo(AGENT_DEMO, overrides, file)
    find_warnings(run)  # refuses a run that cannot work before the warm-up
    directory = run.directory
    assert directory is not None, "a demo has a directory"
    console = make_console(run.observe.console)
    began = time.perf_counter() if began is None else began
    _introduce(console, run.agent.strategy)
    torch.set_num_threads(run.threads or torch.get_num_threads())
    create_world(
        run,
        console,
        TASKS,
        storeroom_agent.make_rows,
        storeroom_model.warm_up,
        steps=storeroom_model.STEPS,
        head_dim=storeroom_model.HEAD_DIM,
    )
    warm_up_seconds = time.perf_counter() - began
    console.print(
        Text(f"Warmed up in {warm_up_seconds:.0f} s. Now {run.steps} steps of GRPO over the agent's rollouts.\n")
    )
    with build(run) as parts:
        run_loop(parts)
        if parts.checkpoint.step == parts.checkpoint.steps:  # else the run was stopped, and `build` raises
            before, after = (_scored(directory, step) for step in (0, parts.checkpoint.steps))
    seconds = time.perf_counter() - began
    steps = read_metrics(directory)
    outcome = _outcome(before, after, steps) | {
        "seconds": seconds,
        "warm_up_seconds": warm_up_seconds,
        "strategy": run.agent.strategy,
        "run_dir": str(directory),
    }
    _compare(console, before, after)
    plot([directory], ["reward", "turns"], console)
    _account(console, outcome)
    next_commands = {
        "ETUDE view RUN": "show the run in a web browser",
        "ETUDE answers RUN": "print the answers of the last step",
        "ETUDE eval RUN evaluate.samples=4": "evaluate it with four attempts a task",
        f"ETUDE train --resume RUN steps={2 * run.steps}": "train for as many steps again",
        "ETUDE demo agent agent.strategy=shm": "the same demo with runners as threads",
        "ETUDE train grpo agent.path=my_agent.py:solve model.path=… data.train=[…]": "your own agent",
    }
    print_conclusion(console, directory, seconds, next_commands)
    return outcome


def _scored(directory: Path, step: int) -> list[ScoredTask]:
    """Read the evaluation that the run wrote after a step."""
    lines = (directory / "evaluations" / f"step-{step:08d}.jsonl").read_text(encoding="utf-8").splitlines()
    return [
        ScoredTask(line["prompt"]["question"], line["prompt"]["answer"], line["conversation"], line["reward"] == 1)
        for line in map(json.loads, lines)
    ]


def _outcome(
    before: Sequence[ScoredTask], after: Sequence[ScoredTask], steps: Sequence[Mapping[str, float]]
) -> dict[str, Any]:
    last, training_steps = steps[-1], [step for step in steps if step["step"] > 0]
    continued, branched = (last.get(f"endpoint/turns_{name}", 0.0) for name in ("continued", "branched"))

    def seconds(*names: str) -> float:
        return sum(step.get(f"time/{name}", 0.0) for step in training_steps for name in names)

    return {
        "accuracy_before": fmean(task.right for task in before),
        "accuracy_after": fmean(task.right for task in after),
        "calls_before": fmean(task.calls for task in before),
        "calls_after": fmean(task.calls for task in after),
        "rl_steps": len(training_steps),
        "rollouts": int(sum(step["rollouts"] for step in training_steps)),
        "turns": int(last["endpoint/turns"]),
        "continued_exactly": continued / max(continued + branched, 1.0),
        "tokens_read": int(last["endpoint/prompt_tokens"]),
        "tokens_written": int(last["endpoint/completion_tokens"]),
        "tokens_changed_by_rerendering": int(last["endpoint/tokens_rerendered"]),
        "failed_attempts": int(sum(step["failed_attempts"] for step in training_steps)),
        "playing_seconds": seconds("collect"),
        "learning_seconds": seconds(*LEARNING),
        "scoring_seconds": seconds("evaluate"),
    }


# -- output -----------------------------------------------------------------------------------------------------------


def _introduce(console: Console, strategy: str) -> None:
    runners = "threads of this process" if strategy == "shm" else "processes of their own"
    lines = (
        f"The task: say how many items of a kind are in a storeroom. `{storeroom_agent.question('figs')}` An agent "
        "that calls find and then count knows; a guess is right one time in ten.",
        f"The agent is {Path(storeroom_agent.__file__).name}, written for OpenAI's client. It runs in {runners}, and "
        "calls the model like any server.",
        "First a model with random weights imitates a lazy teacher, which mostly guesses. Then it improves by GRPO. "
        "Nothing is downloaded.",
    )
    console.print(Text("\n".join(lines) + "\n"), soft_wrap=True)


def _compare(console: Console, before: Sequence[ScoredTask], after: Sequence[ScoredTask]) -> None:
    """Print one held-out task before and after training; an improved one, if there is one."""
    pairs = list(zip(before, after, strict=True))
    old, new = next((pair for pair in pairs if pair[1].right and not pair[0].right), pairs[0])
    console.print(Text(f"\nA held-out task: {old.question}"), soft_wrap=True)
    for title, scored in (("before", old), ("after", new)):
        for index, (speaker, text) in enumerate(format_conversation(scored)):
            console.print(Text.assemble(f"  {title if index == 0 else '':<8}", (f"{speaker:<7}", "dim"), text))
        verdict = ("right", "green") if scored.right else (f"wrong, it is {scored.wanted}", "red")
        console.print(Text.assemble(" " * 17, verdict))
    console.print()


def format_conversation(scored: ScoredTask) -> list[tuple[str, Text]]:
    """Return the speaker and the text of each line; tool calls are formatted as calls."""
    lines: list[tuple[str, Text]] = []
    name = ""
    for message in scored.conversation:
        call = CALL.search(message["text"])
        if message["by"] != "model":
            lines.append((name, Text(BY_TOOL.get(name, "{}").format(message["text"]))))
        elif call is None:
            lines.append(("model", Text(message["text"], "bold")))
        else:
            written = _read(call[1])
            name = str(written.get("name", ""))
            arguments = ", ".join(f"{key}={value!r}" for key, value in written.get("arguments", {}).items())
            lines.append(("model", Text(f"{name}({arguments})", "cyan")))
    return lines


def _read(call: str) -> dict[str, Any]:
    """Parse a tool call; return an empty mapping for a malformed one."""
    try:
        parsed: dict[str, Any] = json.loads(call)
    except ValueError:
        return {}
    return parsed


def _account(console: Console, outcome: Mapping[str, Any]) -> None:
    seconds = {name: outcome[f"{name}_seconds"] for name in ("warm_up", "playing", "learning", "scoring")}
    rest = outcome["seconds"] - sum(seconds.values())
    shares = ", ".join(f"{name.replace('_', ' ')} {format_seconds(duration)}" for name, duration in seconds.items())
    for name, figure in (
        ("held-out accuracy", f"{outcome['accuracy_before']:.1%}  →  {outcome['accuracy_after']:.1%}"),
        ("tool calls per task", f"{outcome['calls_before']:.2f}  →  {outcome['calls_after']:.2f}"),
        ("turns recorded", f"{outcome['turns']:,}, of {outcome['rollouts']:,} training rollouts and the evaluation"),
        (
            "conversations continued",
            f"{outcome['continued_exactly']:.1%} exactly, from the served tokens; rendering them again would have "
            f"changed {outcome['tokens_changed_by_rerendering']:,}",
        ),
        ("tokens", f"{outcome['tokens_read']:,} read, {outcome['tokens_written']:,} written"),
        ("time", f"{shares}, other {format_seconds(max(rest, 0.0))}"),
    ):
        console.print(Text.assemble((f"{name:<27}", "dim"), figure), soft_wrap=True)
