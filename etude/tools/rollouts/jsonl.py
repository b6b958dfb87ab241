"""A rollout as one JSON object, with everything recorded about it."""

from __future__ import annotations

from base64 import b64encode
from dataclasses import asdict
from math import isfinite
from typing import Any

import numpy as np
from numpy.typing import NDArray

from etude.chat import Tokenizer
from etude.images.addresses import find_refs
from etude.records import Completion, Turn
from etude.store import AttemptState
from etude.support import SetKind, Support
from etude.tools.rollout_reader import AttemptRecord, RolloutRecord, task_columns
from etude.tools.run_images import ImageFiles


def rollout_to_dict(rollout: RolloutRecord, tokenizer: Tokenizer | None, images: ImageFiles) -> dict[str, Any]:
    """Return a rollout as a JSON object; with a tokenizer, prompts are included as text too. images: writes those that
    it names, to which the object refers."""
    state, task = rollout.state, rollout.task
    attempts = enumerate(zip(state.attempts, rollout.attempts, strict=True))
    of_task = images.write(ref.digest for ref in find_refs(task.fields))
    return {
        "rollout": state.id,
        "split": state.use,
        "sample": state.sample,
        "status": str(state.status),
        "closed": state.closed and str(state.closed),
        "step": task.step,
        "why": state.why,
        **task_columns(task),
        "fields": dict(task.fields),
        **({"images": of_task} if of_task else {}),
        "dropped": task.cause,
        "limits": state.limits and state.limits.to_dict(),
        "attempts": [_attempt(index, *pair, tokenizer, images) for index, pair in attempts],
    }


def _attempt(
    index: int, state: AttemptState, attempt: AttemptRecord, tokenizer: Tokenizer | None, images: ImageFiles
) -> dict[str, Any]:
    names = ("error", "reward", "paid", "total", "truncated", "role", "runner", "ended_by_queue")
    turns = zip(attempt.turns, attempt.times, strict=True)
    return {
        "attempt": index,
        "status": str(state.status),
        **{name: getattr(state, name) for name in names},
        "parts": dict(state.parts),
        "late": None if state.late is None else dict(state.late),
        "began": attempt.began,
        "ended": attempt.ended,
        "turns": [_turn(turn, at, tokenizer, images) for turn, at in turns],
        "events": [{"name": note.name, "data": note.data} for note in attempt.notes],
    }


def _turn(turn: Turn, at: float, tokenizer: Tokenizer | None, images: ImageFiles) -> dict[str, Any]:
    files = images.write(span.digest for span in turn.images)
    completion, raw_logp = turn.completion, turn.completion.raw_logp
    names = ("index", "model", "reward", "anchor", "observed", "opened")
    return {
        **{name: getattr(turn, name) for name in names},
        "tags": list(turn.tags),
        "at": at,
        **({} if tokenizer is None else {"prompt": tokenizer.decode(turn.prompt, keep_special_tokens=True)}),
        "text": completion.text,
        "finish": completion.finish_reason,
        "prompt_ids": turn.prompt.tolist(),
        **({"images": [asdict(span) | {"file": files[span.digest]} for span in turn.images]} if files else {}),
        "ids": completion.ids.tolist(),
        "versions": completion.version.tolist(),
        "logp": floats_to_json(completion.logp),
        **({} if raw_logp is None else {"raw_logp": floats_to_json(raw_logp)}),
        **({} if turn.grammar is None else {"grammar": turn.grammar}),
        **({} if completion.support is None else {"support": _support(completion.support)}),
        **_alternatives(completion),
    }


def _support(support: Support) -> dict[str, Any]:
    """Return the sets of tokens that could be drawn: the table of different sets, and each token's place in it.

    The place is -1 for the whole vocabulary. A set has the ids that are `kept`, or the ids that are `banned`, or `bits`
    in base64: one for each id, the lowest of a byte first.
    """
    sets = [support.get_set(place) for place in range(len(support.kind))]
    return {"index": support.index.tolist(), "sets": [_set(*encoded) for encoded in sets]}


def _set(kind: SetKind, data: NDArray[np.int32]) -> dict[str, Any]:
    if kind is SetKind.BITS:
        return {"bits": b64encode(data.astype("<i4").tobytes()).decode()}
    return {kind.name.lower(): data.tolist()}


def _alternatives(completion: Completion) -> dict[str, Any]:
    """Return the alternatives to each token, as rows of ids and of log-probs; nothing if they were not recorded."""
    ids, logp = completion.alternative_ids, completion.alternative_logp
    if ids is None or logp is None:
        return {}
    return {"alternative_ids": ids.tolist(), "alternative_logp": [floats_to_json(row) for row in logp]}


def floats_to_json(values: NDArray[np.float32]) -> list[float | None]:
    """Return floats with the digits of single precision, and None for values that JSON does not have."""
    return [float(f"{value:.9g}") if isfinite(value) else None for value in values.tolist()]
