"""A rollout as one JSON object, with everything recorded about it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from etude.chat import Tokenizer
from etude.records import Turn
from etude.store import AttemptState
from etude.tools.rollout_reader import AttemptRecord, RolloutRecord, task_columns


def rollout_to_dict(rollout: RolloutRecord, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Return a rollout as a JSON object; with a tokenizer, prompts are included as text too."""
    state = rollout.state
    record: dict[str, Any] = {
        "rollout": state.id,
        "split": state.use,
        "sample": state.sample,
        "status": str(state.status),
    }
    record |= {"settled": state.settled and str(state.settled), "step": rollout.task.step, "why": state.why}
    record |= task_columns(rollout.task) | {"fields": dict(rollout.task.fields), "dropped": rollout.task.cause}
    record |= {"limits": state.limits and state.limits.to_dict()}
    pairs = zip(state.attempts, rollout.attempts, strict=True)
    return record | {"attempts": [_attempt(index, *pair, tokenizer) for index, pair in enumerate(pairs)]}


def _attempt(index: int, state: AttemptState, attempt: AttemptRecord, tokenizer: Tokenizer | None) -> dict[str, Any]:
    names = ("error", "reward", "paid", "total", "truncated", "role", "runner", "watched")
    record: dict[str, Any] = {"attempt": index, "status": str(state.status)}
    record |= {name: getattr(state, name) for name in names} | {"parts": dict(state.parts)}
    record |= {"late": None if state.late is None else dict(state.late), "began": attempt.began, "ended": attempt.ended}
    turns = [_turn(turn, at, tokenizer) for turn, at in zip(attempt.turns, attempt.times, strict=True)]
    return record | {"turns": turns, "events": [{"name": note.name, "data": note.data} for note in attempt.notes]}


def _turn(turn: Turn, at: float, tokenizer: Tokenizer | None) -> dict[str, Any]:
    completion = turn.completion
    names = ("index", "model", "reward", "anchor", "observed", "opened")
    record: Mapping[str, Any] = {name: getattr(turn, name) for name in names}
    prompt_text = {} if tokenizer is None else {"prompt": tokenizer.decode(turn.prompt, keep_special_tokens=True)}
    tokens = {
        "prompt_ids": turn.prompt.tolist(),
        "ids": completion.ids.tolist(),
        "versions": completion.version.tolist(),
    }
    tokens["logp"] = floats_to_json(completion.logp)
    if completion.raw_logp is not None:
        tokens["raw_logp"] = floats_to_json(completion.raw_logp)
    return {
        **record,
        "tags": list(turn.tags),
        "at": at,
        **prompt_text,
        "text": completion.text,
        "finish": completion.finish_reason,
        **tokens,
    }


def floats_to_json(values: NDArray[np.float32]) -> list[float | None]:
    """Return floats with the digits of single precision, and None for values that JSON does not have."""
    return [float(f"{value:.9g}") if np.isfinite(value) else None for value in values.tolist()]
