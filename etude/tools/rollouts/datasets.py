"""Rollouts as examples to learn from: demonstrations of what earned enough, pairs of the best and the worst of a group.

As `ids`, a row is the very tokens that were read and written, and which of them were the model's own: nothing is lost,
and nothing is tokenised again. As `text`, it is what those tokens say, for another model, or for people.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from etude.chat import Tokenizer
from etude.chat.tokenizer import Ids
from etude.data.preferences import CHOSEN_TOKENS, REJECTED_TOKENS
from etude.data.pretokenized import ASSISTANT_MASKS, INPUT_IDS, VOCABULARY_COLUMN
from etude.data.samples import build_samples
from etude.records import Sample, Turn
from etude.store import Status
from etude.tools.rollouts.reader import RolloutRecord, task_columns

__all__ = ["DatasetBuilder", "Form", "Row", "dataset_schema", "demonstration_rows", "preference_rows"]

Row = dict[str, Any]
Form = Literal["ids", "text"]
TOKENS = {INPUT_IDS: pa.list_(pa.int32()), ASSISTANT_MASKS: pa.list_(pa.int8())}
VOCABULARY_SCHEMA = {VOCABULARY_COLUMN: pa.string()}
TASK_SCHEMA = {"task": pa.int64(), "row": pa.int64(), "data_source": pa.string(), "step": pa.int64()}


@dataclass
class DatasetBuilder:
    """Which rollouts are wanted, how they are written; and what was left out, by its reason."""

    form: Form
    tokenizer: Tokenizer
    min_reward: float | None = None
    min_gap: float = 0.0
    tags: tuple[str, ...] = ()
    skipped: Counter[str] = field(default_factory=Counter)
    changed: int = 0
    """Rows of text that are other tokens when they are read again."""

    def context_columns(self, story: RolloutRecord) -> Row:
        """What is told of the task and its step."""
        return task_columns(story.task) | {"step": story.task.step}

    def samples(self, story: RolloutRecord) -> list[Sample]:
        """The rows of a rollout that have something to learn."""
        return [row for row in build_samples(story.turns, story.state.id, self.tags) if row.action.any()]

    def turns(self, story: RolloutRecord) -> list[Turn]:
        """The turns of a rollout that have something to learn."""
        tagged = (turn for turn in story.turns if not self.tags or set(turn.tags) & set(self.tags))
        return [turn for turn in tagged if len(turn.completion.ids)]

    def turn_text(self, turn: Turn) -> tuple[str, str]:
        """What a turn was shown and what it said, without the token that ends it; counted where they are other tokens
        when they are read again."""
        prompt, said = self._without_bos(turn.prompt), turn.completion.ids
        if len(said) and int(said[-1]) in self.tokenizer.eos_ids:
            said = said[:-1]
        asked, answer = (self.tokenizer.decode(ids, keep_special_tokens=True) for ids in (prompt, said))
        known = self.tokenizer.encode(asked, add_special_tokens=True)
        again = self.tokenizer.encode_after_text(asked, answer, add_special_tokens=True, before_ids=known)
        self.changed += not (np.array_equal(known, turn.prompt) and np.array_equal(again, said))
        return asked, answer

    def _without_bos(self, prompt: Ids) -> Ids:
        """Without the token that the tokenizer puts before every text."""
        begins = self.tokenizer.adds_bos and len(prompt) and int(prompt[0]) == self.tokenizer.bos_id
        return prompt[1:] if begins else prompt

    def token_columns(self, sample: Sample) -> Row:
        """A row of tokens."""
        return {INPUT_IDS: sample.ids.tolist(), ASSISTANT_MASKS: sample.action.astype(np.int8).tolist()}

    def meets_min_reward(self, earned: float) -> bool:
        """Whether a rollout earned what is asked for."""
        return self.min_reward is None or earned >= self.min_reward


def dataset_schema(kind: str, form: Form) -> pa.Schema:
    """The columns of a set."""
    text = form == "text"
    if kind == "sft":
        told = {"prompt": pa.string(), "completion": pa.string()} if text else TOKENS | VOCABULARY_SCHEMA
        more = {"rollout": pa.int64(), "reward": pa.float64()}
    else:
        rows = pa.list_(pa.struct(list(TOKENS.items())))
        told = dict.fromkeys(("prompt", "chosen", "rejected"), pa.string())
        told = told if text else {CHOSEN_TOKENS: rows, REJECTED_TOKENS: rows, **VOCABULARY_SCHEMA}
        more = {f"{side}_{name}": kind for name, kind in _SIDE_COLUMNS.items() for side in ("chosen", "rejected")}
    return pa.schema([*told.items(), *TASK_SCHEMA.items(), *more.items()])


_SIDE_COLUMNS = {"rollout": pa.int64(), "reward": pa.float64()}


def demonstration_rows(found: Iterable[RolloutRecord], builder: DatasetBuilder) -> Iterator[Row]:
    """A row for each token sequence, or as text for each turn, of rollouts that succeeded and earned enough."""
    for story in found:
        earned = story.reward
        if story.state.status is not Status.SUCCEEDED:
            builder.skipped[f"ended {story.state.status}".replace("_", " ")] += 1
        elif earned is None:
            builder.skipped["had no reward"] += 1
        elif not builder.meets_min_reward(earned):
            builder.skipped[f"earned less than {builder.min_reward:g}"] += 1
        elif not builder.turns(story):
            builder.skipped["had no turn to learn from"] += 1
        else:
            about = builder.context_columns(story) | {"rollout": story.state.id, "reward": earned}
            yield from (row | about for row in _example_rows(story, builder))


def _example_rows(story: RolloutRecord, builder: DatasetBuilder) -> Iterator[Row]:
    if builder.form == "text":
        for turn in builder.turns(story):
            asked, said = builder.turn_text(turn)
            yield {"prompt": asked, "completion": said}
        return
    for sample in builder.samples(story):
        yield builder.token_columns(sample) | {VOCABULARY_COLUMN: builder.tokenizer.vocab_hash}


def preference_rows(groups: Iterable[Sequence[RolloutRecord]], builder: DatasetBuilder) -> Iterator[Row]:
    """The best and the worst try at each task, of those that were asked the same to the token."""
    for group in groups:
        judged = [story for story in group if story.reward is not None and builder.turns(story)]
        if builder.form == "text":
            several = [story for story in judged if len(story.turns) > 1]
            builder.skipped["had several turns, which pairs of text have no place for"] += len(several)
            judged = [story for story in judged if len(story.turns) == 1]
        alike: defaultdict[bytes, list[RolloutRecord]] = defaultdict(list)
        for story in judged:
            alike[story.turns[0].prompt.tobytes()].append(story)
        for tries in alike.values():
            row = _pair(tries, builder)
            if row is not None:
                yield row
        if not alike:
            builder.skipped["were tasks that nothing was earned at"] += 1


def _pair(tries: Sequence[RolloutRecord], builder: DatasetBuilder) -> Row | None:
    """What was best, of those that came to their end, and what was worst, if they differ enough."""
    if len(tries) == 1:
        builder.skipped["had no other try that was asked the same"] += 1
        return None
    good = [story for story in tries if story.state.status is Status.SUCCEEDED]
    best, worst = max(good, key=_reward_of, default=None), min(tries, key=_reward_of)
    if best is None or not _reward_of(best) - _reward_of(worst) > 0:
        builder.skipped["were groups in which all earned the same"] += 1
        return None
    if _reward_of(best) - _reward_of(worst) < builder.min_gap:
        builder.skipped[f"were pairs that differ by less than {builder.min_gap:g}"] += 1
        return None
    if not builder.meets_min_reward(_reward_of(best)):
        builder.skipped[f"were groups whose best earned less than {builder.min_reward:g}"] += 1
        return None
    row = builder.context_columns(best)
    for side, story in (("chosen", best), ("rejected", worst)):
        row |= {f"{side}_rollout": story.state.id, f"{side}_reward": _reward_of(story)}
    if builder.form == "text":
        (asked, said), (_, other) = (builder.turn_text(story.turns[0]) for story in (best, worst))
        return row | {"prompt": asked, "chosen": said, "rejected": other}
    sides = {
        name: [builder.token_columns(s) for s in builder.samples(each)]
        for name, each in ((CHOSEN_TOKENS, best), (REJECTED_TOKENS, worst))
    }
    return row | sides | {VOCABULARY_COLUMN: builder.tokenizer.vocab_hash}


def _reward_of(story: RolloutRecord) -> float:
    assert story.reward is not None, "what has no reward is in no pair"
    return story.reward
