"""One rollout to its tokens, and one group: the rollouts of a task beside each other."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from etude.chat.prompt_reader import MODEL, image_name
from etude.data.samples import find_parents
from etude.errors import NotFoundError
from etude.images import ImageSpan, keyed_ids
from etude.recipes.collect.failure_messages import describe_failure
from etude.records import Completion, Turn
from etude.store import AttemptState, Phase, RolloutState, TaskState
from etude.store.queue.rollout_limits import RolloutPurpose
from etude.tools.rollout_reader import (
    AttemptRecord,
    RolloutRecord,
    has_failed,
    read_first_prompt,
    read_records,
    read_rollout,
)
from etude.tools.rollouts.otlp import is_span
from etude.view.images import image_addresses, split_images, stored_addresses
from etude.view.queries.replay import StepReplays, group_replay, step_replays, token_signals
from etude.view.queries.spans import read_spans
from etude.view.queries.step import explain_absence
from etude.view.replies import Table, pack_columns
from etude.view.run_reader import RunReader

Pick: TypeAlias = Literal["best", "worst", "random"]


@dataclass(frozen=True)
class TurnText:
    """One call to the model, without its tokens."""

    index: int
    text: str
    prompt_tokens: int
    tokens: int
    finish: str
    reward: float | None
    began: float
    ended: float
    """Wall-clock times; 0 is unknown."""
    model: str
    tags: list[str]
    parent: int | None
    """The index of the turn that it continues."""


@dataclass(frozen=True)
class AttemptPage:
    """One attempt at a rollout."""

    status: str
    error: str
    reward: float | None
    parts: dict[str, float]
    truncated: bool
    runner: str
    began: float
    ended: float
    turns: list[TurnText]
    notes: list[dict[str, Any]]
    spans: Table
    """The first spans of the agent."""
    span_count: int


@dataclass(frozen=True)
class RolloutPage:
    """The page of one rollout."""

    rollout: int
    task: int
    sample: int
    use: RolloutPurpose
    status: str
    reward: float | None
    advantage: float | None
    """The mean advantage of its tokens, once a step has trained on it."""
    step: int | None
    """The step that trained on its group, or dropped it."""
    why: str
    """The reason for which it is not in the batch; empty if it is."""
    cause: str
    """The cause of a failure, as far as the journal has it."""
    fields: dict[str, Any]
    images: list[str]
    """The addresses of the task's images, which the fields only name."""
    attempts: list[AttemptPage]
    conversation: list[dict[str, Any]]
    """The messages of the last attempt, from the first prompt on. Of each, `by` is `model`, or the role that the model
    saw: `system`, `tools`, `user`, `tool` or `assistant`. A text without roles is a `prompt` or an `observation`.
    `images` has the hashes of the images that the text names, as in `[image 9f86d081]`, with spaces between them."""
    pictures: dict[str, str]
    """The addresses of these images, by their hashes."""
    before: int | None = None
    after: int | None = None
    """The rollouts with the next smaller and the next larger id, of the same use."""
    replays: StepReplays | None = None
    """The replays of the step that trained on it."""


@dataclass(frozen=True)
class GroupPage:
    """The rollouts of one task."""

    task: int
    row: int
    source: str
    step: int | None
    cause: str
    prompt: list[dict[str, str]]
    """The messages that the best rollout's model saw first, by role."""
    same_prompt: bool
    """False if the model saw other messages in some of the rollouts."""
    fields: dict[str, Any]
    images: list[str]
    pictures: dict[str, str]
    common: int
    """The sampled tokens with which all first answers begin."""
    rollouts: list[RolloutPage]
    replays: StepReplays | None
    """The replays of the step that trained on it."""
    replayed: Table
    """The advantage and other numbers of each rollout in the newest replay."""


def read_rollout_page(reader: RunReader, rollout: int) -> RolloutPage:
    """Return the page of a rollout."""
    record = _record(reader, reader.journal.rollout(rollout))
    page = _page(reader, record, _advantages(reader, record.task))
    before, after = (_neighbour(reader, page, backwards) for backwards in (True, False))
    return replace(page, before=before, after=after, replays=step_replays(reader, None if page.why else page.step))


def pick_rollout(reader: RunReader, pick: Pick, step: int | None = None) -> int:
    """Return a rollout of a step that trained, by default the last one: the best, the worst, or any."""
    admitted = reader.index.admitted
    chosen = reader.index.get(step) if step is not None else max(admitted, key=lambda entry: entry.step, default=None)
    if chosen is None or not len(chosen.rollouts):
        asked = "no step" if step is None else f"no step {step}"
        raise NotFoundError(f"The run '{reader.name}' has {asked} that trained on rollouts, so none can be picked.")
    ids: list[int] = chosen.rollouts.tolist()
    if pick == "random":
        return random.choice(ids)
    states = reader.journal.load_states(RolloutState, ids)
    rewards = dict(zip(states, reader.rewards([*states.values()]), strict=True))
    known = {id: reward for id, reward in rewards.items() if reward is not None}
    return (max if pick == "best" else min)(known or ids, key=lambda id: known.get(id, 0.0))


def _neighbour(reader: RunReader, page: RolloutPage, backwards: bool) -> int | None:
    states = reader.journal.iter_states(RolloutState, page.rollout, backwards=backwards, use=page.use)
    return next((state.id for state in states), None)


def read_group(reader: RunReader, task: int) -> GroupPage:
    """Return the rollouts of a task, the best one first."""
    state = reader.journal.task(task)
    return group_page(reader, state, group_records(reader, state))


def group_records(reader: RunReader, task: TaskState) -> list[RolloutRecord]:
    """Return the rollouts of a task with their events, the best one first."""
    states = reader.journal.load_states(RolloutState, task.rollouts)
    rollouts = [states[id] for id in task.rollouts]
    records = read_records(reader.journal, rollouts, {task.id: task}, reader.reward_of)
    return sorted(records, key=lambda record: np.inf if record.reward is None else -record.reward)


def group_page(reader: RunReader, task: TaskState, records: Sequence[RolloutRecord]) -> GroupPage:
    """Return the page of a task and its rollouts."""
    trained = task.step if task.phase is Phase.ADMITTED else None
    fields, images = split_images(task)
    advantages = _advantages(reader, task)
    firsts = [record.turns[0] for record in records if record.turns]
    prompt = read_first_prompt(reader.prompts, firsts[:1], fields.get("prompt"))
    return GroupPage(
        task.id,
        task.row,
        task.source,
        task.step,
        task.cause,
        prompt,
        all(np.array_equal(_keys(first), _keys(firsts[0])) for first in firsts),
        fields,
        image_addresses(reader.name, task.id, images),
        stored_addresses(reader.name, prompt),
        common_prefix([first.completion.ids for first in firsts]),
        [_page(reader, record, advantages) for record in records],
        step_replays(reader, trained),
        group_replay(reader, trained, [*task.rollouts]),
    )


def read_tokens(
    reader: RunReader, rollout: int, attempt: int, turn: int, replay: str = "", side: str = "recorded"
) -> bytes:
    """Return the tokens of a turn as columns of bytes.

    `prompt` and `ids` are token ids. `logp` is the log-prob under the sampling policy, `version` the policy version.
    `text` is the UTF-8 text of the prompt's tokens and then of the sampled ones; token k ends at byte `ends[k]`. A
    replay adds the signals of one of its algorithms (`side`).

    A turn that was sampled with sets has `set_size`: how many tokens could be drawn at each token. −n is all but n, and
    0 the whole vocabulary. Recorded alternatives are `alternative_ids` and `alternative_logp`, equally many for each
    token. `named` is their different ids, ascending, whose text is in `named_text` and `named_ends`.
    """
    found = reader.journal.turns(rollout, attempt)
    if turn not in range(len(found)):
        raise NotFoundError(f"Attempt {attempt} of rollout {rollout} has {len(found)} turns, and no turn {turn}.")
    chosen = found[turn]
    completion = chosen.completion
    columns: dict[str, Any] = {
        "prompt": chosen.prompt,
        "ids": completion.ids,
        "logp": completion.logp,
        "version": completion.version,
    }
    if completion.raw_logp is not None:
        columns["raw_logp"] = completion.raw_logp
    if completion.support is not None:
        columns["set_size"] = completion.support.signed_sizes()
    columns |= _alternatives(reader, completion)
    if replay:
        columns |= token_signals(reader, replay, side, rollout, turn, completion.ids)
    head = {
        "rollout": rollout,
        "attempt": attempt,
        "turn": turn,
        "observed": chosen.observed,
        "opened": chosen.opened,
        "grammar": chosen.grammar,
    }
    texts = _token_texts(reader, np.concatenate([chosen.prompt, completion.ids]), chosen.images)
    if texts is not None:
        columns["ends"], columns["text"] = texts
    return pack_columns(head, columns)


def _alternatives(reader: RunReader, completion: Completion) -> dict[str, NDArray[Any]]:
    """Return the columns of the alternatives to each token; none if they were not recorded."""
    ids, logp = completion.alternative_ids, completion.alternative_logp
    if ids is None or logp is None:
        return {}
    columns: dict[str, NDArray[Any]] = {"alternative_ids": ids.reshape(-1), "alternative_logp": logp.reshape(-1)}
    columns["named"] = np.unique(ids)
    texts = _token_texts(reader, columns["named"])
    if texts is not None:
        columns["named_ends"], columns["named_text"] = texts
    return columns


def _record(reader: RunReader, state: RolloutState) -> RolloutRecord:
    return read_rollout(reader.journal, state, reader.reward_of)


def _advantages(reader: RunReader, task: TaskState) -> dict[int, float]:
    return {} if task.step is None else reader.index.advantages(task.step)


def _page(reader: RunReader, record: RolloutRecord, advantages: Mapping[int, float]) -> RolloutPage:
    state, task = record.state, record.task
    fields, images = split_images(task)
    attempts = [_attempt(attempt, events) for attempt, events in zip(state.attempts, record.attempts, strict=True)]
    conversation = _conversation(reader, record, fields)
    return RolloutPage(
        state.id,
        state.task,
        state.sample,
        state.use,
        str(state.status),
        record.reward,
        advantages.get(state.id),
        task.step,
        explain_absence(state, task),
        describe_failure(reader.journal, state) if has_failed(state) else "",
        fields,
        image_addresses(reader.name, task.id, images),
        attempts,
        conversation,
        stored_addresses(reader.name, conversation),
    )


def _attempt(state: AttemptState, record: AttemptRecord) -> AttemptPage:
    starts, parents = record.starts, find_parents(record.turns)
    turns = [
        TurnText(
            turn.index,
            turn.completion.text,
            len(turn.prompt),
            len(turn.completion.ids),
            turn.completion.finish_reason,
            turn.reward,
            starts[position],
            record.times[position],
            turn.model,
            list(turn.tags),
            parents[position],
        )
        for position, turn in enumerate(record.turns)
    ]
    return AttemptPage(
        str(state.status),
        state.error,
        state.total,
        dict(state.parts),
        state.truncated,
        state.runner,
        record.began,
        record.ended,
        turns,
        [{"name": note.name, "data": note.data} for note in record.notes if not is_span(note)],
        *read_spans(record.notes, record.began),
    )


def _conversation(reader: RunReader, record: RolloutRecord, fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of the last attempt. Without a tokenizer, they are the task's prompt and the answers."""
    prompts, turns = reader.prompts, record.turns
    first: list[dict[str, Any]] = [*read_first_prompt(prompts, turns, fields.get("prompt"))]
    if prompts is None:
        return first + [{"by": MODEL, "text": turn.completion.text} for turn in turns]
    return first + prompts.read_rest(turns)


def _token_texts(
    reader: RunReader, ids: NDArray[np.int32], images: Sequence[ImageSpan] = ()
) -> tuple[NDArray[np.int32], NDArray[np.uint8]] | None:
    """Return the text of tokens, special ones included, as UTF-8, and the byte at which each ends. None without a
    tokenizer. An image is named at its first token, and its others have no text."""
    tokenizer = reader.tokenizer
    if tokenizer is None:
        return None
    listed = ids.tolist()
    known = {id: tokenizer.decode([id], keep_special_tokens=True).encode() for id in set(listed)}
    texts = [known[id] for id in listed]
    for span in images:
        texts[span.start : span.stop] = [b""] * (span.stop - span.start)
        texts[span.start] = b"" if span.first else image_name(span.digest).encode()
    ends = np.cumsum([len(text) for text in texts], dtype=np.int64).astype(np.int32)
    return ends, np.frombuffer(b"".join(texts), np.uint8)


def _keys(turn: Turn) -> NDArray[np.int32]:
    """Return the ids of a prompt, with numbers that tell its images apart in place of image tokens."""
    return keyed_ids(turn.prompt, turn.images)


def common_prefix(rows: Sequence[Any]) -> int:
    """Return the number of leading tokens that all rows share."""
    if len(rows) < 2:
        return 0
    length = min(map(len, rows))
    equal = np.all([row[:length] == rows[0][:length] for row in rows], axis=0)
    return int(length if equal.all() else equal.argmin())
