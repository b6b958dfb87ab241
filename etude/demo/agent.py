"""The demonstration of agents: code written for OpenAI's client learns to use its tools, live.

The agent calls the model endpoint of the run as it would call any server; what it was shown and what it sampled is
recorded there, and learned from. Everything after the warm-up is what `etude train agent.path=…` runs, and leaves a run
directory like any other.
"""

from __future__ import annotations

import json
import re
import shlex
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from etude.config.compose import compose
from etude.config.env import etude_command
from etude.demo import storeroom_agent as storeroom
from etude.demo import storeroom_model as novice
from etude.demo.demo_setup import AGENT_DEMO, compose_demo, head_dim, path_options, warm_up, write_tasks
from etude.observe import format_seconds, make_console
from etude.recipes.run.build import build
from etude.recipes.run.config import Run
from etude.recipes.run.directory import new_directory, read_metrics
from etude.recipes.run.loop import run_loop
from etude.tools.plot import plot

__all__ = ["ScoredTask", "format_conversation", "run_demo"]

TASKS, HELD_OUT = 2_000, 200
CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
BY_TOOL = {"find": "shelf {}", "count": "{} of them"}
LEARNING = ("annotate", "estimate", "update", "publish")
"""The parts of a step that are no playing and no scoring."""


@dataclass(frozen=True)
class ScoredTask:
    """One held-out task, as it was played to score the model."""

    question: str
    wanted: str
    conversation: Sequence[Mapping[str, str]]
    right: bool

    @property
    def calls(self) -> int:
        """How many functions the model called."""
        return sum(bool(CALL.search(said["text"])) for said in self.conversation if said["by"] == "model")


def run_demo(overrides: Sequence[str], file: Path | None = None, began: float | None = None) -> dict[str, Any]:
    """Make a world and a model, have an agent play in it, learn from that, show how; returns the outcome.

    began: a reading of `time.perf_counter` from which its seconds count, what was loaded before included.
    """
    asked = compose_demo(AGENT_DEMO, overrides, file)
    directory = asked.directory or new_directory(Path("runs"), "demo-agent")
    console = make_console(asked.observe.console)
    began = time.perf_counter() if began is None else began
    _introduce(console, asked)
    world = write_tasks(directory, TASKS, HELD_OUT, lambda n, held: storeroom.make_rows(asked.seed, n, held_out=held))
    torch.set_num_threads(asked.threads or torch.get_num_threads())
    heads = head_dim(asked, novice.HEAD_DIM)
    warm_up(
        world, "warming up: imitating the teacher", novice.STEPS, asked.seed, novice.warm_up, console, head_dim=heads
    )
    warmed = time.perf_counter() - began
    console.print(Text(f"Warmed up in {warmed:.0f} s. Now {asked.steps} steps of GRPO over the agent's rollouts.\n"))
    run = compose(Run, overrides, values=path_options(world, directory), file=file, preset=AGENT_DEMO.preset)
    with build(run) as parts:
        run_loop(parts)
        if parts.checkpoint.step == parts.checkpoint.steps:  # else it was stopped, which `build` tells and raises
            before, after = (_scored(directory, step) for step in (0, parts.checkpoint.steps))
    seconds = time.perf_counter() - began
    steps = read_metrics(directory)
    told = _outcome(before, after, steps) | {
        "seconds": seconds,
        "warm_up_seconds": warmed,
        "strategy": run.agent.strategy,
        "run_dir": str(directory),
    }
    _compare(console, before, after)
    plot([directory], ["reward", "turns"], console)
    _account(console, told)
    _conclude(console, directory, seconds, run.steps)
    return told


def _scored(directory: Path, step: int) -> list[ScoredTask]:
    """What the agent said and earned on held-out tasks, as the run wrote it down after a step."""
    lines = (directory / "evaluations" / f"step-{step:08d}.jsonl").read_text(encoding="utf-8").splitlines()
    found = []
    for line in map(json.loads, lines):
        task = line["prompt"]
        found.append(ScoredTask(task["question"], task["answer"], line["conversation"], line["reward"] == 1))
    return found


def _outcome(
    before: Sequence[ScoredTask], after: Sequence[ScoredTask], steps: Sequence[Mapping[str, float]]
) -> dict[str, Any]:
    """The outcome in numbers."""
    last, made = steps[-1], [step for step in steps if step["step"] > 0]
    continued, branched = (last.get(f"endpoint/turns_{name}", 0.0) for name in ("continued", "branched"))

    def seconds(*names: str) -> float:
        return sum(step.get(f"time/{name}", 0.0) for step in made for name in names)

    return {
        "accuracy_before": _share(each.right for each in before),
        "accuracy_after": _share(each.right for each in after),
        "calls_before": sum(each.calls for each in before) / len(before),
        "calls_after": sum(each.calls for each in after) / len(after),
        "rl_steps": len(made),
        "rollouts": int(sum(step["rollouts"] for step in made)),
        "turns": int(last["endpoint/turns"]),
        "continued_exactly": continued / max(continued + branched, 1.0),
        "tokens_read": int(last["endpoint/prompt_tokens"]),
        "tokens_written": int(last["endpoint/completion_tokens"]),
        "tokens_changed_by_rerendering": int(last["endpoint/tokens_rerendered"]),
        "failed_attempts": int(sum(step["failed_attempts"] for step in made)),
        "playing_seconds": seconds("collect"),
        "learning_seconds": seconds(*LEARNING),
        "scoring_seconds": seconds("evaluate"),
    }


def _share(found: Iterable[bool]) -> float:
    each = [float(one) for one in found]
    return sum(each) / len(each)


# -- what a person sees -----------------------------------------------------------------------------------------------


def _introduce(console: Console, run: Run) -> None:
    where = "threads of this process" if run.agent.strategy == "shm" else "processes of their own"
    for line in (
        f"The task: say how many of a kind lie in a storeroom. `{storeroom.question('figs')}` Who calls find, then "
        "count, knows; who guesses is right one time in ten.",
        f"The agent is {Path(storeroom.__file__).name}, written for OpenAI's client; it is played in {where}, and "
        "calls the model as it would call any server.",
        "First a model with random weights imitates a lazy teacher, who mostly guesses. Then it improves by GRPO. "
        "Nothing is downloaded.",
    ):
        console.print(Text(line), soft_wrap=True)
    console.print()


def _compare(console: Console, before: Sequence[ScoredTask], after: Sequence[ScoredTask]) -> None:
    """One held-out task, played before and after; one on which that can be seen, if there is one."""
    pairs = list(zip(before, after, strict=True))
    old, new = next((pair for pair in pairs if pair[1].right and not pair[0].right), pairs[0])
    console.print(Text(f"\nA held-out task: {old.question}"), soft_wrap=True)
    for title, played in (("before", old), ("after", new)):
        for place, (who, said) in enumerate(format_conversation(played)):
            console.print(Text.assemble(f"  {title if place == 0 else '':<8}", (f"{who:<7}", "dim"), said))
        verdict = ("right", "green") if played.right else (f"wrong, it is {played.wanted}", "red")
        console.print(Text.assemble(" " * 17, verdict))
    console.print()


def format_conversation(played: ScoredTask) -> list[tuple[str, Text]]:
    """Who said what, a line each: calls as calls, and what was written otherwise as it stands."""
    found: list[tuple[str, Text]] = []
    name = ""
    for said in played.conversation:
        call = CALL.search(said["text"])
        if said["by"] != "model":
            found.append((name, Text(BY_TOOL.get(name, "{}").format(said["text"]))))
        elif call is None:
            found.append(("model", Text(said["text"], "bold")))
        else:
            told = _read(call[1])
            name = str(told.get("name", ""))
            given = ", ".join(f"{key}={value!r}" for key, value in told.get("arguments", {}).items())
            found.append(("model", Text(f"{name}({given})", "cyan")))
    return found


def _read(call: str) -> dict[str, Any]:
    """A call as it was written; nothing of one that is malformed."""
    try:
        told: dict[str, Any] = json.loads(call)
    except ValueError:
        return {}
    return told


def _account(console: Console, told: Mapping[str, Any]) -> None:
    """The figures, and where the time went."""
    spent = {name: told[f"{name}_seconds"] for name in ("warm_up", "playing", "learning", "scoring")}
    rest = told["seconds"] - sum(spent.values())
    shares = ", ".join(f"{name.replace('_', ' ')} {format_seconds(each)}" for name, each in spent.items())
    for name, figure in (
        ("held-out accuracy", f"{told['accuracy_before']:.1%}  →  {told['accuracy_after']:.1%}"),
        ("calls of functions a task", f"{told['calls_before']:.2f}  →  {told['calls_after']:.2f}"),
        ("turns recorded", f"{told['turns']:,}, of {told['rollouts']:,} rollouts to learn from and the scoring"),
        (
            "conversations continued",
            f"{told['continued_exactly']:.1%} exactly, from the very tokens that were served; rendering them anew "
            f"would have changed {told['tokens_changed_by_rerendering']:,}",
        ),
        ("tokens", f"{told['tokens_read']:,} read, {told['tokens_written']:,} written"),
        ("time", f"{shares}, all else {format_seconds(max(rest, 0.0))}"),
    ):
        console.print(Text.assemble((f"{name:<27}", "dim"), figure), soft_wrap=True)


def _conclude(console: Console, directory: Path, seconds: float, steps: int) -> None:
    console.print(Text(f"\n{seconds:.0f} seconds in all. The run lies in {directory}. Try next:"), soft_wrap=True)
    etude, where = etude_command(), shlex.quote(str(directory))
    for command, why in (
        (f"{etude} answers {where}", "look at what it was trained on last"),
        (f"{etude} eval {where} evaluate.samples=4", "have the agent score it, four attempts a task"),
        (f"{etude} train --resume {where} steps={2 * steps}", "go on for as many steps again"),
        (f"{etude} demo agent agent.strategy=shm", "the same with runners as threads of one process"),
        (f"{etude} train grpo agent.path=my_agent.py:solve model.path=… data.train=[…]", "yours"),
    ):
        console.print(Text.assemble(f"  {command}", (f"   # {why}", "dim")), soft_wrap=True)
