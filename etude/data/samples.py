"""The conversion of recorded turns to rows: token sequences to train on.

A turn whose prompt begins with the whole row before it continues that row. So a long conversation is one row, and every
action token in it counts once. A rewritten history starts a new row, with the whole prompt as its context. Ids are only
compared and joined, never decoded.

Prompts are compared by their keys (`etude.images.keyed_ids`): the ids, with numbers of the images in place of image
tokens. So two prompts with equal ids and other images are not joined.

The observation tokens of each prompt are found before any row is built, so that they do not depend on the rows.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from etude.images import ImageSpan, keyed_ids
from etude.records import Completion, Sample, Turn
from etude.support import Support
from etude.token_routes import blank_routes


def build_samples(turns: Sequence[Turn], rollout: int, tags: Collection[str] = ()) -> list[Sample]:
    """Build the rows of one attempt, in the order of its turns.

    tags: train only turns with one of these tags. Other turns are context, if a later turn's prompt contains them.

    A turn's reward is at its last action token. A turn without an action, or one that is not trained, has no such
    token. Its reward is then at the last action before it, the newest one that could have caused it. Without an earlier
    action the reward trains nothing.

    A turn is joined only with the row directly before it. Parallel conversations are separate rows, because rows are in
    order of time, by which credit is assigned.
    """
    rows: list[_SampleBuilder] = []
    all_routes = _find_routes(turns)
    for turn, observation_start, routes in zip(turns, find_observation_starts(turns), all_routes, strict=True):
        if not tags or set(tags) & set(turn.tags):
            if not rows or not rows[-1].is_continued_by(turn):
                rows.append(_SampleBuilder(turn.model))
            rows[-1].add(turn, observation_start)
            rows[-1].routes = routes
        if turn.reward is not None:
            row_with_action = next((row for row in reversed(rows) if row.last_action >= 0), None)
            if row_with_action is not None:
                row_with_action.rewards[row_with_action.last_action] = (
                    row_with_action.rewards.get(row_with_action.last_action, 0.0) + turn.reward
                )
    return [row.build(rollout) for row in rows]


def find_observation_starts(turns: Sequence[Turn]) -> list[int]:
    """Return the start of the observation in each turn's prompt: the tokens from the environment since the last answer.

    The observation ends where the answer's opening begins. An empty observation starts there too.

    If a turn records the length of its observation, that length counts. Otherwise the prompt continues the longest
    earlier prompt, or prompt with answer, that it begins with. The tokens after it are the observation, if an answer is
    before them. A token that was in an earlier prompt, at the same position after the same tokens, is not observed
    again. This holds also where the two prompts differ after it.
    """
    starts: list[int] = []
    contexts_by_model: dict[
        str, list[tuple[NDArray[np.int32], bool]]
    ] = {}  # of each model, the longest first: ids, answered
    prompts_by_model: dict[str, list[NDArray[np.int32]]] = {}
    for turn in turns:
        prompt = _prompt_keys(turn)
        completion_ids = turn.completion.ids
        end = len(turn.prompt) - turn.opened
        earlier_contexts, earlier_prompts = (
            contexts_by_model.setdefault(turn.model, []),
            prompts_by_model.setdefault(turn.model, []),
        )
        before, answered = next(
            ((len(ids), acted) for ids, acted in earlier_contexts if _starts_with(prompt, ids)), (0, False)
        )
        if turn.observed is not None:
            answered = turn.observed > 0
            before = max(before, end - turn.observed)
        for earlier_prompt in earlier_prompts if answered else ():
            before = _common_prefix_length(prompt, earlier_prompt, before)
        starts.append(min(before, end) if answered else end)
        earlier_prompts.append(prompt)
        earlier_contexts += [
            (prompt, answered),
            (np.concatenate([prompt, completion_ids]), answered or len(completion_ids) > 0),
        ]
        earlier_contexts.sort(key=lambda context: -len(context[0]))
    return starts


def _find_routes(turns: Sequence[Turn]) -> list[NDArray[Any] | None]:
    """Return for each turn the experts of all tokens of its prompt and answer; None if neither it nor an earlier turn
    that it continues has them.

    A turn has those of the tokens that its engine computed anew. The others are in the turn that it continues.
    """
    if all(turn.completion.routes is None for turn in turns):
        return [None] * len(turns)
    found: list[NDArray[Any] | None] = []
    for turn, parent in zip(turns, find_parents(turns), strict=True):
        before = None if parent is None else found[parent]
        tokens = len(turn.prompt) + len(turn.completion.ids)
        if turn.completion.routes is not None:
            before = turn.completion.routes.spread(tokens, before)
        elif before is not None:
            added = blank_routes(tokens - len(before), before.shape[1], before.dtype)
            before = np.concatenate([before, added])
        found.append(before)
    return found


def _common_prefix_length(one: NDArray[np.int32], other: NDArray[np.int32], least: int) -> int:
    """Return the number of equal ids at the start of both, but at least `least`."""
    length = min(len(one), len(other))
    if length <= least or one[least] != other[least]:  # the common case: one ends before, or they differ there
        return least
    differences = np.flatnonzero(one[:length] != other[:length])
    return max(least, int(differences[0]) if len(differences) else length)


def _starts_with(ids: NDArray[np.int32], prefix: NDArray[np.int32]) -> bool:
    length = len(prefix)
    if length > len(ids) or (length and ids[length - 1] != prefix[-1]):  # the common difference is at the end
        return False
    return np.array_equal(ids[:length], prefix)


def find_parents(turns: Sequence[Turn]) -> list[int | None]:
    """Return for each turn the place of the earlier one that it continues: its prompt begins with that turn's prompt
    and answer, the longest such. None if it continues none."""
    prompts = [_prompt_keys(turn) for turn in turns]
    contexts = [np.concatenate([keys, turn.completion.ids]) for keys, turn in zip(prompts, turns, strict=True)]
    parents: list[int | None] = []
    for place, turn in enumerate(turns):
        earlier = (
            other
            for other in reversed(range(place))
            if turns[other].model == turn.model and _starts_with(prompts[place], contexts[other])
        )
        parents.append(max(earlier, key=lambda other: len(contexts[other]), default=None))
    return parents


def count_joined_rows(turns: Sequence[Turn]) -> tuple[int, int]:
    """Return the number of rows that turns join to, and the number of their prompt tokens in the row before.

    Those tokens are not computed and not trained again.
    """
    rows = num_known_tokens = 0
    row_keys = np.empty(0, np.int32)
    model = ""
    for turn in turns:
        length = len(row_keys)
        keys = _prompt_keys(turn)
        if rows and turn.model == model and np.array_equal(keys[:length], row_keys):
            num_known_tokens += length
        else:
            rows += 1
        row_keys = np.concatenate([keys, turn.completion.ids])
        model = turn.model
    return rows, num_known_tokens


def _prompt_keys(turn: Turn) -> NDArray[np.int32]:
    """Return the ids of a turn's prompt, with a number of the image at each image token."""
    return keyed_ids(turn.prompt, turn.images)


@dataclass
class _SampleBuilder:
    """Builds one row: the columns of each segment of context or action."""

    model: str
    length: int = 0
    last_action: int = -1
    segments: list[dict[str, NDArray[Any]]] = field(default_factory=list)
    rewards: dict[int, float] = field(default_factory=dict)
    anchors: list[NDArray[np.int64]] = field(default_factory=list)
    has_anchor: bool = False
    observed: list[tuple[int, int]] = field(default_factory=list)
    supports: list[Support | int] = field(default_factory=list)  # of each segment: its sets, or its length
    alternatives: list[tuple[int, Completion]] = field(default_factory=list)  # each answer, and where it begins
    routes: NDArray[Any] | None = None  # the experts of each token, known with its last turn
    images: tuple[ImageSpan, ...] = ()  # of its last turn, whose prompt has all images before it
    keys: list[NDArray[np.int32]] = field(default_factory=list)  # of each segment, to compare prompts with

    def is_continued_by(self, turn: Turn) -> bool:
        """Return True if a turn's prompt begins with this whole row."""
        if turn.model != self.model or len(turn.prompt) < self.length:
            return False
        return np.array_equal(_prompt_keys(turn)[: self.length], np.concatenate(self.keys))

    def add(self, turn: Turn, observation_start: int) -> None:
        """Add the new part of the prompt, then the answer. observation_start: its position in the prompt."""
        context_ids = turn.prompt[self.length :]
        completion = turn.completion
        self.keys += [_prompt_keys(turn)[self.length :], completion.ids]
        self.images = turn.images
        self.observed.append((max(observation_start, self.length), len(turn.prompt) - turn.opened))
        self._append_segment(context_ids, False, np.full(len(context_ids), np.nan), np.full(len(context_ids), -1), -1)
        self._append_segment(completion.ids, True, completion.logp, completion.version, turn.index, turn.anchor)
        self.supports += [len(context_ids), completion.support or len(completion.ids)]
        self.alternatives.append((self.length - len(completion.ids), completion))
        if len(completion.ids):
            self.last_action = self.length - 1

    def _append_segment(
        self,
        ids: NDArray[np.int32],
        action: bool,
        logp: NDArray[Any],
        version: NDArray[Any],
        turn: int,
        anchor: int | None = None,
    ) -> None:
        columns = {"ids": ids, "logp": logp, "version": version}
        self.segments.append(columns | {"action": np.full(len(ids), action), "turn": np.full(len(ids), turn)})
        self.anchors.append(np.full(len(ids), anchor or 0, np.int64))
        self.has_anchor |= anchor is not None
        self.length += len(ids)

    def build(self, rollout: int) -> Sample:
        """Return the row as a record."""
        reward = None
        if self.rewards:
            reward = np.zeros(self.length)
            reward[list(self.rewards)] = list(self.rewards.values())
        columns: dict[str, Any] = {
            name: np.concatenate([segment[name] for segment in self.segments]) for name in self.segments[0]
        }
        anchor = np.concatenate(self.anchors) if self.has_anchor else None
        return Sample(
            **columns,
            rollout=rollout,
            model=self.model,
            reward=reward,
            anchor=anchor,
            observation=self._observation_mask(),
            support=Support.concat(self.supports),
            routes=self.routes,
            images=self.images,
            **self._alternative_columns(),
        )

    def _alternative_columns(self) -> dict[str, Any]:
        """Return the alternatives to each action token, if any answer has them; elsewhere none could be drawn."""
        widths = {0 if each.alternative_ids is None else each.alternative_ids.shape[1] for _, each in self.alternatives}
        width = max(widths)
        if not width:
            return {}
        ids = np.zeros((self.length, width), np.int32)
        logp = np.full((self.length, width), -np.inf, np.float32)
        for begin, completion in self.alternatives:
            if completion.alternative_ids is not None and completion.alternative_logp is not None:
                end = begin + len(completion.ids)
                ids[begin:end, : completion.alternative_ids.shape[1]] = completion.alternative_ids
                logp[begin:end, : completion.alternative_logp.shape[1]] = completion.alternative_logp
        return {"alternative_ids": ids, "alternative_logp": logp}

    def _observation_mask(self) -> NDArray[np.bool_] | None:
        """Return the mask of observation tokens, or None if there are none.

        Tokens of images are none: their ids say nothing about the image, and no model predicts them.
        """
        mask = np.zeros(self.length, np.bool_)
        for begin, end in self.observed:
            mask[begin:end] = True
        for span in self.images:
            mask[span.start : span.stop] = False
        return mask if mask.any() else None
