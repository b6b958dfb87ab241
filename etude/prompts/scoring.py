"""The score of a prompt, and the description of its rollouts for the writer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from etude.chat import Tokenizer
from etude.recipes.collect.rollouts import PlayedRollout
from etude.records import Task, Turn

MAX_CHARACTERS = 4000
"""The most characters of one text that the writer is shown. Of a longer one, its middle is left out."""


@dataclass(frozen=True)
class PromptScore:
    """The score of a prompt on some tasks."""

    value: float | None
    """The mean reward of the rollouts that have one; None if more than half have none."""
    rollouts: int
    failed: int
    failure: str = ""
    """The last line of the error of the last rollout that failed."""

    @classmethod
    def of(cls, played: Sequence[PlayedRollout]) -> PromptScore:
        """Return the score of these rollouts."""
        rewards = [rollout.total for rollout in played if rollout.succeeded]
        failures = [rollout.verdict.error for rollout in played if not rollout.succeeded]
        is_known = bool(rewards) and len(rewards) >= len(failures)
        last = failures[-1].strip().rpartition("\n")[2] if failures else ""
        return cls(fmean(rewards) if is_known else None, len(played), len(failures), last)


def describe_rollout(task: Task, played: PlayedRollout, tokenizer: Tokenizer) -> str:
    """Return what happened in a rollout: the task, the conversations, the rewards, the error."""
    fields = {name: value for name, value in task.fields.items() if name != "row" and value not in (None, "", {}, [])}
    lines = [f"Task: {_shorten(json.dumps(fields, ensure_ascii=False, default=str))}"]
    for turn in _last_turns(played.turns):
        lines.append(f"The model was asked:\n{_shorten(tokenizer.decode(turn.prompt))}")
        lines.append(f"It answered:\n{_shorten(turn.completion.text)}")
    if played.succeeded:
        parts = "".join(f", {name} {value:g}" for name, value in played.verdict.parts.items())
        lines.append(f"Reward: {played.total:g}{parts}")
    else:
        lines.append(f"It failed: {_shorten(played.verdict.error)}")
    return "\n".join(lines)


def _last_turns(turns: Sequence[Turn]) -> list[Turn]:
    """Return the turns that no later turn continues: the last of each conversation."""
    return [turn for place, turn in enumerate(turns) if not any(_continues(turn, each) for each in turns[place + 1 :])]


def _continues(turn: Turn, later: Turn) -> bool:
    """Return whether the prompt of a later turn begins with the prompt of this one."""
    length = len(turn.prompt)
    return len(later.prompt) > length and bool((later.prompt[:length] == turn.prompt).all())


def _shorten(text: str) -> str:
    if len(text) <= MAX_CHARACTERS:
        return text
    half = MAX_CHARACTERS // 2
    return f"{text[:half]}\n… ({len(text) - 2 * half} characters left out) …\n{text[-half:]}"
