"""A rollout as one JSON object, with all that is known of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from etude.chat import Tokenizer
from etude.records import Turn
from etude.store import AttemptState
from etude.tools.rollouts.reader import AttemptRecord, RolloutRecord, task_columns

__all__ = ["rollout_to_dict"]


def rollout_to_dict(story: RolloutRecord, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """The rollout; with what the model was shown as text, where there is a tokenizer."""
    state = story.state
    told: dict[str, Any] = {
        "rollout": state.id,
        "split": state.use,
        "sample": state.sample,
        "status": str(state.status),
    }
    told |= {"settled": state.settled and str(state.settled), "step": story.task.step, "why": state.why}
    told |= task_columns(story.task) | {"fields": dict(story.task.fields), "dropped": story.task.cause}
    told |= {"limits": state.limits and state.limits.to_dict()}
    pairs = zip(state.attempts, story.attempts, strict=True)
    return told | {"attempts": [_attempt(index, *pair, tokenizer) for index, pair in enumerate(pairs)]}


def _attempt(index: int, state: AttemptState, tried: AttemptRecord, tokenizer: Tokenizer | None) -> dict[str, Any]:
    names = ("error", "reward", "paid", "total", "truncated", "role", "runner", "watched")
    told: dict[str, Any] = {"attempt": index, "status": str(state.status)}
    told |= {name: getattr(state, name) for name in names} | {"parts": dict(state.parts)}
    told |= {"late": None if state.late is None else dict(state.late), "began": tried.began, "ended": tried.ended}
    turns = [_turn(turn, at, tokenizer) for turn, at in zip(tried.turns, tried.times, strict=True)]
    return told | {"turns": turns, "events": [{"name": note.name, "data": note.data} for note in tried.notes]}


def _turn(turn: Turn, at: float, tokenizer: Tokenizer | None) -> dict[str, Any]:
    said = turn.completion
    names = ("index", "model", "reward", "anchor", "observed", "opened")
    told: Mapping[str, Any] = {name: getattr(turn, name) for name in names}
    shown = {} if tokenizer is None else {"prompt": tokenizer.decode(turn.prompt, keep_special_tokens=True)}
    tokens = {"prompt_ids": turn.prompt.tolist(), "ids": said.ids.tolist(), "versions": said.version.tolist()}
    tokens["logp"] = floats_to_json(said.logp)
    if said.raw_logp is not None:
        tokens["raw_logp"] = floats_to_json(said.raw_logp)
    return {
        **told,
        "tags": list(turn.tags),
        "at": at,
        **shown,
        "text": said.text,
        "finish": said.finish_reason,
        **tokens,
    }


def floats_to_json(values: NDArray[np.float32]) -> list[float | None]:
    """As many digits as single precision has, and nothing for what is no number in JSON."""
    return [float(f"{value:.9g}") if np.isfinite(value) else None for value in values.tolist()]
