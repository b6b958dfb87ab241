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
from etude.data.adapt import samples
from etude.data.exact import IDS, MASKS, VOCABULARY
from etude.data.preferences import CHOSEN, REJECTED
from etude.records import Sample, Turn
from etude.store import Status
from etude.tools.rollouts.reading import Story, told_task

__all__ = ["Chosen", "Form", "Row", "demonstrations", "pairs", "schema"]

Row = dict[str, Any]
Form = Literal["ids", "text"]
TOKENS = {IDS: pa.list_(pa.int32()), MASKS: pa.list_(pa.int8())}
MEANT = {VOCABULARY: pa.string()}
ABOUT = {"task": pa.int64(), "row": pa.int64(), "data_source": pa.string(), "step": pa.int64()}


@dataclass
class Chosen:
    """Which rollouts are wanted, how they are written; and what was left out, by its reason."""

    form: Form
    tokenizer: Tokenizer
    min_reward: float | None = None
    min_gap: float = 0.0
    tags: tuple[str, ...] = ()
    left_out: Counter[str] = field(default_factory=Counter)
    changed: int = 0
    """Rows of text that are other tokens when they are read again."""

    def about(self, story: Story) -> Row:
        """What is told of the task and its step."""
        return told_task(story.task) | {"step": story.task.step}

    def samples(self, story: Story) -> list[Sample]:
        """The rows of a rollout that have something to learn."""
        return [row for row in samples(story.turns, story.state.id, self.tags) if row.action.any()]

    def turns(self, story: Story) -> list[Turn]:
        """The turns of a rollout that have something to learn."""
        tagged = (turn for turn in story.turns if not self.tags or set(turn.tags) & set(self.tags))
        return [turn for turn in tagged if len(turn.completion.ids)]

    def text(self, turn: Turn) -> tuple[str, str]:
        """What a turn was shown and what it said, without the token that ends it; counted where they are other tokens
        when they are read again."""
        prompt, said = self._without_beginning(turn.prompt), turn.completion.ids
        if len(said) and int(said[-1]) in self.tokenizer.eos_ids:
            said = said[:-1]
        asked, answer = (self.tokenizer.decode(ids, special=True) for ids in (prompt, said))
        known = self.tokenizer.encode(asked, special=True)
        again = self.tokenizer.encode_after(asked, answer, special=True, known=known)
        self.changed += not (np.array_equal(known, turn.prompt) and np.array_equal(again, said))
        return asked, answer

    def _without_beginning(self, prompt: Ids) -> Ids:
        """Without the token that the tokenizer puts before every text."""
        begins = self.tokenizer.adds_bos and len(prompt) and int(prompt[0]) == self.tokenizer.bos_id
        return prompt[1:] if begins else prompt

    def tokens(self, sample: Sample) -> Row:
        """A row of tokens."""
        return {IDS: sample.ids.tolist(), MASKS: sample.action.astype(np.int8).tolist()}

    def enough(self, earned: float) -> bool:
        """Whether a rollout earned what is asked for."""
        return self.min_reward is None or earned >= self.min_reward


def schema(kind: str, form: Form) -> pa.Schema:
    """The columns of a set."""
    text = form == "text"
    if kind == "sft":
        told = {"prompt": pa.string(), "completion": pa.string()} if text else TOKENS | MEANT
        more = {"rollout": pa.int64(), "reward": pa.float64()}
    else:
        rows = pa.list_(pa.struct(list(TOKENS.items())))
        told = dict.fromkeys(("prompt", "chosen", "rejected"), pa.string())
        told = told if text else {CHOSEN: rows, REJECTED: rows, **MEANT}
        more = {f"{side}_{name}": kind for name, kind in _OF_A_SIDE.items() for side in ("chosen", "rejected")}
    return pa.schema([*told.items(), *ABOUT.items(), *more.items()])


_OF_A_SIDE = {"rollout": pa.int64(), "reward": pa.float64()}


def demonstrations(found: Iterable[Story], chosen: Chosen) -> Iterator[Row]:
    """A row for each token sequence, or as text for each turn, of rollouts that succeeded and earned enough."""
    for story in found:
        earned = story.earned
        if story.state.status is not Status.SUCCEEDED:
            chosen.left_out[f"ended {story.state.status}".replace("_", " ")] += 1
        elif earned is None:
            chosen.left_out["had no reward"] += 1
        elif not chosen.enough(earned):
            chosen.left_out[f"earned less than {chosen.min_reward:g}"] += 1
        elif not chosen.turns(story):
            chosen.left_out["had no turn to learn from"] += 1
        else:
            about = chosen.about(story) | {"rollout": story.state.id, "reward": earned}
            yield from (row | about for row in _shown(story, chosen))


def _shown(story: Story, chosen: Chosen) -> Iterator[Row]:
    if chosen.form == "text":
        for turn in chosen.turns(story):
            asked, said = chosen.text(turn)
            yield {"prompt": asked, "completion": said}
        return
    for sample in chosen.samples(story):
        yield chosen.tokens(sample) | {VOCABULARY: chosen.tokenizer.vocabulary}


def pairs(groups: Iterable[Sequence[Story]], chosen: Chosen) -> Iterator[Row]:
    """The best and the worst try at each task, of those that were asked the same to the token."""
    for group in groups:
        judged = [story for story in group if story.earned is not None and chosen.turns(story)]
        if chosen.form == "text":
            several = [story for story in judged if len(story.turns) > 1]
            chosen.left_out["had several turns, which pairs of text have no place for"] += len(several)
            judged = [story for story in judged if len(story.turns) == 1]
        alike: defaultdict[bytes, list[Story]] = defaultdict(list)
        for story in judged:
            alike[story.turns[0].prompt.tobytes()].append(story)
        for tries in alike.values():
            row = _pair(tries, chosen)
            if row is not None:
                yield row
        if not alike:
            chosen.left_out["were tasks that nothing was earned at"] += 1


def _pair(tries: Sequence[Story], chosen: Chosen) -> Row | None:
    """What was best, of those that came to their end, and what was worst, if they differ enough."""
    if len(tries) == 1:
        chosen.left_out["had no other try that was asked the same"] += 1
        return None
    good = [story for story in tries if story.state.status is Status.SUCCEEDED]
    best, worst = max(good, key=_earned, default=None), min(tries, key=_earned)
    if best is None or not _earned(best) - _earned(worst) > 0:
        chosen.left_out["were groups in which all earned the same"] += 1
        return None
    if _earned(best) - _earned(worst) < chosen.min_gap:
        chosen.left_out[f"were pairs that differ by less than {chosen.min_gap:g}"] += 1
        return None
    if not chosen.enough(_earned(best)):
        chosen.left_out[f"were groups whose best earned less than {chosen.min_reward:g}"] += 1
        return None
    row = chosen.about(best)
    for side, story in (("chosen", best), ("rejected", worst)):
        row |= {f"{side}_rollout": story.state.id, f"{side}_reward": _earned(story)}
    if chosen.form == "text":
        (asked, said), (_, other) = (chosen.text(story.turns[0]) for story in (best, worst))
        return row | {"prompt": asked, "chosen": said, "rejected": other}
    sides = {
        name: [chosen.tokens(s) for s in chosen.samples(each)] for name, each in ((CHOSEN, best), (REJECTED, worst))
    }
    return row | sides | {VOCABULARY: chosen.tokenizer.vocabulary}


def _earned(story: Story) -> float:
    assert story.earned is not None, "what has no reward is in no pair"
    return story.earned
