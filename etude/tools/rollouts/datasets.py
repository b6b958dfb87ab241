"""Rollouts as training data: demonstrations with enough reward, and preference pairs of the best and the worst rollout.

With `ids`, a row has the exact token ids, and a mask of the model's own tokens; nothing is tokenized again. With
`text`, a row has the decoded text, for other models or for people.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from etude.chat import Tokenizer
from etude.data.preferences import CHOSEN_TOKENS, REJECTED_TOKENS
from etude.data.pretokenized import ASSISTANT_MASKS, INPUT_IDS, VOCABULARY_COLUMN
from etude.data.samples import build_samples
from etude.records import Sample, Turn
from etude.store import Status
from etude.tools.rollout_reader import RolloutRecord, task_columns
from etude.tools.run_images import has_images

Row = dict[str, Any]
Form = Literal["ids", "text"]
TOKENS = {INPUT_IDS: pa.list_(pa.int32()), ASSISTANT_MASKS: pa.list_(pa.int8())}
ROLLOUT_SCHEMA = {"rollout": pa.int64(), "reward": pa.float64()}
SIDES = ("chosen", "rejected")
SHOWS_IMAGES = "have images, which no data set here holds: `--as jsonl` writes them"
TASK_SCHEMA = {"task": pa.int64(), "row": pa.int64(), "data_source": pa.string(), "step": pa.int64()}


@dataclass
class DatasetBuilder:
    """The selection and the format of rows, and the counts of skipped rollouts by reason."""

    form: Form
    tokenizer: Tokenizer
    min_reward: float | None = None
    min_gap: float = 0.0
    tags: tuple[str, ...] = ()
    skipped: Counter[str] = field(default_factory=Counter)
    changed: int = 0
    """The number of text rows that tokenize differently from the run."""

    def samples(self, rollout: RolloutRecord) -> list[Sample]:
        """Return the token rows of a rollout that have action tokens."""
        return [row for row in build_samples(rollout.turns, rollout.state.id, self.tags) if row.action.any()]

    def turns(self, rollout: RolloutRecord) -> list[Turn]:
        """Return the turns of a rollout that have the tags and a completion."""
        tagged = (turn for turn in rollout.turns if not self.tags or set(turn.tags) & set(self.tags))
        return [turn for turn in tagged if len(turn.completion.ids)]

    def turn_text(self, turn: Turn) -> tuple[str, str]:
        """Return the text of a turn's prompt and answer, without the end token. Count it if it tokenizes
        differently."""
        prompt, answer = turn.prompt, turn.completion.ids
        if self.tokenizer.adds_bos and len(prompt) and int(prompt[0]) == self.tokenizer.bos_id:
            prompt = prompt[1:]
        if len(answer) and int(answer[-1]) in self.tokenizer.eos_ids:
            answer = answer[:-1]
        prompt_text, answer_text = (self.tokenizer.decode(ids, keep_special_tokens=True) for ids in (prompt, answer))
        prompt_ids = self.tokenizer.encode(prompt_text, add_special_tokens=True)
        answer_ids = self.tokenizer.encode_after_text(
            prompt_text, answer_text, add_special_tokens=True, before_ids=prompt_ids
        )
        self.changed += not (np.array_equal(prompt_ids, turn.prompt) and np.array_equal(answer_ids, answer))
        return prompt_text, answer_text

    def token_columns(self, sample: Sample) -> Row:
        """Return the token columns of a sample."""
        return {INPUT_IDS: sample.ids.tolist(), ASSISTANT_MASKS: sample.action.astype(np.int8).tolist()}

    def meets_min_reward(self, reward: float) -> bool:
        """Return True if a reward is at least the minimum."""
        return self.min_reward is None or reward >= self.min_reward


def dataset_schema(kind: str, form: Form) -> pa.Schema:
    """Return the columns of a data set."""
    texts = ["prompt", "completion"]
    tokens = TOKENS
    extra = ROLLOUT_SCHEMA
    if kind == "dpo":
        rows = pa.list_(pa.struct(list(TOKENS.items())))
        texts, tokens = ["prompt", *SIDES], {CHOSEN_TOKENS: rows, REJECTED_TOKENS: rows}
        extra = {f"{side}_{name}": type_ for name, type_ in ROLLOUT_SCHEMA.items() for side in SIDES}
    columns = dict.fromkeys(texts, pa.string()) if form == "text" else {**tokens, VOCABULARY_COLUMN: pa.string()}
    return pa.schema([*columns.items(), *TASK_SCHEMA.items(), *extra.items()])


def demonstration_rows(rollouts: Iterable[RolloutRecord], builder: DatasetBuilder) -> Iterator[Row]:
    """Iterate over the rows of successful rollouts with enough reward: one a token sequence, or as text one a turn."""
    for rollout in rollouts:
        reward = rollout.reward
        if rollout.state.status is not Status.SUCCEEDED:
            builder.skipped[f"ended {rollout.state.status}".replace("_", " ")] += 1
        elif reward is None:
            builder.skipped["had no reward"] += 1
        elif not builder.meets_min_reward(reward):
            builder.skipped[f"had a reward below {builder.min_reward:g}"] += 1
        elif has_images(rollout.turns):
            builder.skipped[SHOWS_IMAGES] += 1
        elif not builder.turns(rollout):
            builder.skipped["had no turn to train on"] += 1
        else:
            context = _context_columns(rollout) | {"rollout": rollout.state.id, "reward": reward}
            yield from (row | context for row in _example_rows(rollout, builder))


def _example_rows(rollout: RolloutRecord, builder: DatasetBuilder) -> Iterator[Row]:
    if builder.form == "text":
        for turn in builder.turns(rollout):
            prompt, answer = builder.turn_text(turn)
            yield {"prompt": prompt, "completion": answer}
        return
    for sample in builder.samples(rollout):
        yield builder.token_columns(sample) | {VOCABULARY_COLUMN: builder.tokenizer.vocab_hash}


def preference_rows(groups: Iterable[Sequence[RolloutRecord]], builder: DatasetBuilder) -> Iterator[Row]:
    """Iterate over pairs of the best and the worst rollout of each task, among rollouts with the same prompt tokens."""
    for group in groups:
        candidates = [rollout for rollout in group if rollout.reward is not None and builder.turns(rollout)]
        blind = [rollout for rollout in candidates if not has_images(rollout.turns)]
        builder.skipped[SHOWS_IMAGES] += len(candidates) - len(blind)
        candidates = blind
        if builder.form == "text":
            multi_turn = [rollout for rollout in candidates if len(rollout.turns) > 1]
            builder.skipped["had several turns, which text pairs cannot represent"] += len(multi_turn)
            candidates = [rollout for rollout in candidates if len(rollout.turns) == 1]
        by_prompt: defaultdict[bytes, list[RolloutRecord]] = defaultdict(list)
        for rollout in candidates:
            by_prompt[rollout.turns[0].prompt.tobytes()].append(rollout)
        for rollouts in by_prompt.values():
            row = _pair(rollouts, builder)
            if row is not None:
                yield row
        if not by_prompt:
            builder.skipped["were tasks without a reward"] += 1


def _pair(rollouts: Sequence[RolloutRecord], builder: DatasetBuilder) -> Row | None:
    """Return the pair of the best successful rollout and the worst rollout, if their rewards differ enough."""
    if len(rollouts) == 1:
        builder.skipped["had no other rollout with the same prompt"] += 1
        return None
    succeeded = [rollout for rollout in rollouts if rollout.state.status is Status.SUCCEEDED]
    best, worst = max(succeeded, key=_reward_of, default=None), min(rollouts, key=_reward_of)
    if best is None or not _reward_of(best) - _reward_of(worst) > 0:
        builder.skipped["were groups with equal rewards"] += 1
        return None
    if _reward_of(best) - _reward_of(worst) < builder.min_gap:
        builder.skipped[f"were pairs that differ by less than {builder.min_gap:g}"] += 1
        return None
    if not builder.meets_min_reward(_reward_of(best)):
        builder.skipped[f"were groups whose best reward was below {builder.min_reward:g}"] += 1
        return None
    row = _context_columns(best)
    for side, rollout in (("chosen", best), ("rejected", worst)):
        row |= {f"{side}_rollout": rollout.state.id, f"{side}_reward": _reward_of(rollout)}
    if builder.form == "text":
        (prompt, chosen), (_, rejected) = (builder.turn_text(rollout.turns[0]) for rollout in (best, worst))
        return row | {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    for name, rollout in ((CHOSEN_TOKENS, best), (REJECTED_TOKENS, worst)):
        row[name] = [builder.token_columns(sample) for sample in builder.samples(rollout)]
    return row | {VOCABULARY_COLUMN: builder.tokenizer.vocab_hash}


def _context_columns(rollout: RolloutRecord) -> Row:
    return task_columns(rollout.task) | {"step": rollout.task.step}


def _reward_of(rollout: RolloutRecord) -> float:
    assert rollout.reward is not None, "a rollout without a reward is in no pair"
    return rollout.reward
