"""`etude answers RUN`: print the tasks that a step was trained on, and the answers to each.

The answers come from the run's journal, which may be read during the run. The observations of a rollout with several
turns are decoded from its recorded tokens. Failed rollouts are listed too, with outcome and cause. Answers to held-out
tasks are in `evaluations/` of the run directory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from math import inf
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from etude.chat import PromptReader, Tokenizer
from etude.errors import ConfigError
from etude.observe import format_number, get_logger, make_console
from etude.recipes.collect.failure_messages import describe_failure
from etude.recipes.collect.player import end_reason
from etude.recipes.run.directory import OPTIONS, read_options
from etude.recipes.run.resume.session_log import describe_wait
from etude.records import Outcome, Turn
from etude.store import Journal, RolloutState
from etude.tools.rollout_reader import (
    has_failed,
    make_prompt_reader,
    messages_text,
    open_journal,
    read_first_prompt,
    read_step_rollouts,
    reward_getter,
)
from etude.tools.step_index import StepIndex

LONGEST = 300
"""The characters of an answer that are printed without `--whole`."""


def show(
    directory: Path,
    *,
    step: int | None = None,
    tasks: int | None = None,
    whole: bool = False,
) -> None:
    """Print some tasks of a training step, by default of the last one, with the best answers first."""
    count = 3 if tasks is None else _check_count(tasks)
    step, answers = load_answers(directory, step)
    console = make_console()
    groups: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for answer in answers:
        groups[answer["task"]].append(answer)
    failed = sum(answer["outcome"] != Outcome.SUCCEEDED for answer in answers)
    remark = f" {failed} of these rollouts failed; each has its cause." if failed else ""
    console.print(Text(f"Step {step}: {len(answers)} answers to {len(groups)} tasks.{remark}"), soft_wrap=True)
    for group in list(groups.values())[:count]:
        console.print()
        prompt: list[dict[str, str]] = next((answer["prompt"] for answer in group if answer["prompt"]), [])
        console.print(Text(messages_text(prompt) or f"Task {group[0]['task']}", "bold"), soft_wrap=True)
        best_first = sorted(
            group, key=lambda answer: -inf if answer["reward"] is None else answer["reward"], reverse=True
        )
        console.print(_table(best_first, whole))
    if len(groups) > count:
        console.print(Text(f"{len(groups) - count} more tasks: -n {len(groups)} shows all, --json prints them."))


def _check_count(tasks: int) -> int:
    if tasks < 1:
        raise ConfigError(f"-n {tasks} asks for no task. Ask for 1 or more.")
    return tasks


def load_answers(
    directory: Path, step: int | None = None, tasks: int | None = None
) -> tuple[int, list[dict[str, Any]]]:
    """Return a step and its rollouts as plain data, task by task, with the failed ones.

    step: None is the last collected step. tasks: the number of tasks; None is all.
    """
    limit = None if tasks is None else _check_count(tasks)
    with open_journal(directory) as store:
        index = StepIndex(store)
        steps = index.steps
        if not steps:
            advice = describe_wait(directory)
            raise ConfigError(f"The run in {directory} has not collected its first step yet. {advice}")
        chosen = max(steps) if step is None else step
        if chosen not in steps:
            raise ConfigError(
                f"The run in {directory} has no step {chosen}; it has collected steps {min(steps)} to "
                f"{max(steps)}. Give one of them with --step."
            )
        admitted = index.get(chosen)
        trained = [] if admitted is None else admitted.rollouts.tolist()
        rollouts = read_step_rollouts(store, trained, index.dropped(chosen))
        answers = list(_answer_records(store, chosen, rollouts, directory))
        selected = list(dict.fromkeys(answer["task"] for answer in answers))[:limit]
        return chosen, [answer for answer in answers if answer["task"] in selected]


@cache
def _prompt_reader(directory: Path) -> PromptReader | None:
    """Return the reader of a run's prompts; None if the run's tokenizer is no longer at its path."""
    if not (directory / OPTIONS).exists():
        return None
    options = read_options(directory)
    model = options.get("model") or {}
    path = model.get("tokenizer") or model.get("path")
    if path is None:
        return None
    try:
        return make_prompt_reader(Tokenizer.load(Path(path)), options)
    except ConfigError as error:
        get_logger("tools").warning(
            "The prompts and the observations between answers cannot be decoded. The prompts of the tasks are shown, "
            "and no observations. %s",
            error,
        )
        return None


def _answer_records(
    store: Journal, step: int, rollouts: Sequence[RolloutState], directory: Path
) -> Iterator[dict[str, Any]]:
    reward_of = reward_getter(directory)
    limits = _TurnLimits(directory)
    prompts = _prompt_reader(directory)
    for rollout in rollouts:
        task, attempt = store.task(rollout.task), rollout.last
        turns = store.turns(rollout.id) if attempt is not None else []
        reward = reward_of(rollout)
        max_turns = limits.of_source(task.source)
        yield {
            "step": step,
            "task": task.id,
            "source": task.source,
            "prompt": read_first_prompt(prompts, turns, task.fields.get("prompt")),
            "ground_truth": task.fields.get("ground_truth"),
            "answer": turns[-1].completion.text if turns else "",
            "grammar": turns[-1].grammar if turns else None,
            "reward": reward,
            "parts": dict(attempt.parts)
            if attempt is not None and reward is not None and reward == attempt.total
            else {},
            "tokens": sum(len(turn.completion.ids) for turn in turns),
            "finish": end_reason(turns, attempt is not None and attempt.truncated, max_turns) or "stop",
            "outcome": str(rollout.status),
            "error": describe_failure(store, rollout) if has_failed(rollout) else "",
        } | ({"conversation": _conversation(prompts, turns)} if len(turns) > 1 else {})


class _TurnLimits:
    """The most turns of a rollout in each environment of a run."""

    def __init__(self, directory: Path) -> None:
        options = read_options(directory) if (directory / OPTIONS).exists() else {}
        agent = options.get("agent", {})
        self._has_agent = bool(agent.get("path") or agent.get("sources"))
        self._env = options.get("env", {})

    def of_source(self, source: str) -> int | None:
        """Return the most turns for a data source; None for an agent, which has its own limit."""
        if self._has_agent:
            return None
        section = (self._env.get("sources") or {}).get(source, {})
        limit: int | None = section.get("max_turns") or self._env.get("max_turns")
        return limit


def _conversation(prompts: PromptReader | None, turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """Return the messages of the turns, with the turns' own rewards."""
    messages: list[dict[str, Any]]
    if prompts is None:
        messages = [{"by": "model", "text": turn.completion.text} for turn in turns]
    else:
        messages = [*prompts.read_rest(turns)]
    for message, turn in zip((m for m in messages if m["by"] == "model"), turns, strict=True):
        if turn.reward is not None:
            message["reward"] = turn.reward
    return messages


def _table(group: Sequence[Mapping[str, Any]], whole: bool) -> Table:
    """Return a table with a row for each answer; equal answers with equal rewards share a row."""
    parts = list(dict.fromkeys(name for answer in group for name in answer["parts"]))
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("times", "reward", *parts, "tokens"):
        table.add_column(name, justify="right")
    table.add_column("answer")
    same: dict[tuple[Any, ...], list[Mapping[str, Any]]] = defaultdict(list)
    for answer in group:
        key = (answer_text(answer), answer["reward"], answer["finish"], answer["outcome"], answer["error"])
        same[*key, answer["grammar"]].append(answer)
    for (full, *_), (answer, *others) in same.items():
        text = full if whole or len(full) <= LONGEST else full[: LONGEST - 1] + "…"
        ending = "" if answer["finish"] == "stop" else f"  [{answer['finish']}]"
        ending += _grammar_text(answer["grammar"], whole)
        numbers = [answer["reward"], *(answer["parts"].get(name, float("nan")) for name in parts)]
        formatted = ["–" if number is None else format_number(number) for number in numbers]
        cells = [str(1 + len(others)), *formatted, str(answer["tokens"])]
        table.add_row(
            *map(Text, cells), Text.assemble(text, (ending, "dim"), (_failure_text(answer, whole, bool(text)), "red"))
        )
    return table


def _grammar_text(grammar: str | None, whole: bool) -> str:
    """Return the grammar of an answer, or that it has one."""
    if grammar is None:
        return ""
    return f"\n[held to the grammar\n{grammar.strip()}]" if whole else "  [held to a grammar]"


def _failure_text(answer: Mapping[str, Any], whole: bool, after_answer: bool) -> str:
    """Return the outcome and the cause of a failed rollout. Of a long cause, the beginning and the end are printed.

    after_answer: True if the text follows the answer.
    """
    if answer["outcome"] == Outcome.SUCCEEDED:
        return ""
    error = answer["error"]
    if not whole and len(error) > LONGEST:
        error = f"{error[: LONGEST // 3]} … {error[-2 * LONGEST // 3 :]}"
    return ("\n" if after_answer else "") + f"{answer['outcome']}: {error}"


def answer_text(answer: Mapping[str, Any]) -> str:
    """Return the text of an answer. Of several turns: each with its reward, and the observations after a bar."""
    if "conversation" not in answer:
        return str(answer["answer"])
    return "\n".join(
        message["text"] + (f"  [reward {format_number(message['reward'])}]" if "reward" in message else "")
        if message["by"] == "model"
        else "\n".join(f"│ {line}" for line in message["text"].strip().splitlines())
        for message in answer["conversation"]
    )
