"""A search over the rollouts of a run, from the newest back. It stops after some time or some finds, and says where.

Conditions on the state of a rollout are checked first, since its events are several times as large. The answers of the
rollouts that remain are read together, without their tokens. A `step` leads straight to the rollouts of these steps,
and a `rollout` to its place. A rollout whose record is damaged is counted, and left out; the answers of a rollout are
compared with their checksums once it is found.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, TypeAlias

from etude.errors import ConfigError, StoreError
from etude.recipes.collect.evaluation_player import task_prompt
from etude.recipes.collect.failure_messages import describe_failure
from etude.records import Turn
from etude.store import Journal, Phase, RolloutState, TaskState, TurnRecorded
from etude.store.queue.rollout_limits import RolloutPurpose
from etude.tools.rollout_reader import has_failed, prompt_text
from etude.view.images import split_images
from etude.view.queries.search_syntax import PART, TEXTS, VALUES, Condition, parse_search
from etude.view.queries.step import explain_absence, step_rollouts
from etude.view.replies import Table
from etude.view.run_reader import RunReader

SEARCH_S = 1.5
"""Seconds after which a search stops, unless others are asked for. Other queries of the run wait meanwhile."""
MOST_SECONDS = 10.0
MOST_FOUND = 100
"""Rollouts that one search returns."""
PAGE = 64
"""Rollouts whose answers are read together at most, and ids that are tried one by one behind a damaged state."""
BATCH_CHARACTERS = 2**24
"""Characters of answers that are read together, as far as the batch before tells."""
LAST_ID = 2**63 - 1
"""The largest id."""
AROUND = 60
"""Characters shown before and after a text that was found."""
TOOL_NAME = re.compile(
    r"\"name\"\s*:\s*\"([^\"\n]+)\"|<function=([^<>\n]{1,200})>|<tool_call>\s*([\w.:/-]+)\s*<arg_key>"
    r"|\[TOOL_CALLS\]\s*([\w.:/-]+)\[|[\[,]\s*([A-Za-z_]\w*)\((?:\w+=|\))"
)
"""The name of a tool in the formats in which models call tools."""


@dataclass(frozen=True)
class SearchPage:
    """The rollouts that one search found."""

    looked: int
    """Rollouts that were looked at."""
    reached: int | None
    """The rollout that was looked at last."""
    newest: int | None
    """The newest rollout of the run, or of its evaluations if only these are searched; None is unknown."""
    damaged: int
    """Rollouts that cannot be read."""
    next: str
    """The place where the search goes on, for the parameter `from`; empty if it is complete."""
    partial: str
    """A sentence about the bound at which the search ended; empty if it is complete."""
    rollouts: Table

    @property
    def table(self) -> Table:
        """The rollouts, and a last row with the sentence if the search is not complete."""
        if not self.partial:
            return self.rollouts
        columns = self.rollouts.columns.items()
        return Table({name: [*column, self.partial if name == "text" else None] for name, column in columns})


class Batch:
    """Rollouts whose answers are read together, when one of them is needed."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self.rollouts: list[int] = []
        self.characters = 0
        """The length of the answers that were read together."""

    def answers(self, rollout: int) -> list[tuple[str, list[str]]]:
        """Return the text and the tags of each turn of a rollout, the newest attempt first. They may be damaged."""
        try:
            turns = sorted(map(json.loads, self._bodies(rollout)), key=lambda turn: -turn["attempt"])
            return [(str(turn["completion"]["text"]), [*map(str, turn["turn"]["tags"])]) for turn in turns]
        except (ValueError, TypeError, KeyError) as error:
            raise StoreError(f"A turn of rollout {rollout} cannot be read ({error}).") from error

    def _bodies(self, rollout: int) -> list[str]:
        if rollout in self._found:
            return self._found[rollout]
        return self._journal.turn_bodies([rollout])[rollout]

    @cached_property
    def _found(self) -> dict[int, list[str]]:
        try:
            found = self._journal.turn_bodies(self.rollouts)
        except StoreError:  # then each is read alone
            return {}
        self.characters = sum(len(body) for bodies in found.values() for body in bodies)
        return found


class Candidate:
    """A rollout that is looked at. What is not needed is not read."""

    excerpt = ""
    """The text that was found, if one was searched."""
    passes = False
    """True if the conditions on its state hold."""

    def __init__(
        self, reader: RunReader, state: RolloutState, task: TaskState, reward: float | None, batch: Batch
    ) -> None:
        self._reader = reader
        self.state = state
        self.task = task
        self.reward = reward
        self._batch = batch

    @property
    def _journal(self) -> Journal:
        return self._reader.journal

    @cached_property
    def turns(self) -> list[Turn]:
        """The turns of all attempts, the newest attempt first."""
        events = (event for _, event in self._journal.read(kinds=(TurnRecorded,), rollout=self.state.id))
        found = [(event.attempt, event.turn) for event in events if isinstance(event, TurnRecorded)]
        return [turn for _, turn in sorted(found, key=lambda pair: -pair[0])]

    @cached_property
    def tokens(self) -> int:
        """The number of sampled tokens."""
        return sum(turn.tokens for turn in self._journal.turn_shapes([self.state.id])[self.state.id])

    @property
    def prompt(self) -> str:
        """The prompt of the task."""
        return prompt_text(task_prompt(split_images(self.task)[0]))

    @cached_property
    def _answers(self) -> list[tuple[str, list[str]]]:
        return self._batch.answers(self.state.id)

    @property
    def answers(self) -> list[str]:
        """The answers of the model in all attempts, the newest attempt first."""
        return [text for text, _ in self._answers]

    @property
    def errors(self) -> list[str]:
        """The errors of all attempts, the newest first."""
        errors = [self.state.why, *(attempt.error for attempt in reversed(self.state.attempts))]
        cause = describe_failure(self._journal, self.state) if has_failed(self.state) else ""
        return list(dict.fromkeys(filter(None, [cause, *errors])))

    @property
    def observations(self) -> list[str]:
        """The texts between the answers of the last attempt, such as results of tools."""
        prompts = self._reader.prompts
        if prompts is None:
            raise ConfigError("`observation:` reads tokens, and the run's tokenizer is no longer at its path.")
        last = self.turns[: 0 if self.state.last is None else self.state.last.turns]
        messages = prompts.read_rest(last) if len(last) > 1 else []
        return [message["text"] for message in messages if message["by"] != "model"]

    @property
    def tools(self) -> list[str]:
        """The tools that the model called."""
        return [name for text in self.answers for found in TOOL_NAME.findall(text) for name in found if name]

    @property
    def tags(self) -> list[str]:
        """The tags of all turns."""
        return [tag for _, tags in self._answers for tag in tags]

    def number(self, name: str) -> float | None:
        """Return a number by its name in a search."""
        last = self.state.last
        if name.startswith(PART):
            return None if last is None else last.parts.get(name.removeprefix(PART))
        return _NUMBERS[name](self)

    def holds(self, conditions: Sequence[Condition]) -> bool:
        """Return True if all conditions hold."""
        for condition in conditions:
            name = condition.name
            if name in TEXTS:
                found = next((text for text in _TEXTS[name](self) if condition.text in text.lower()), None)
                holds = found is not None
                if found is not None and name in SHOWN:
                    self.excerpt = self.excerpt or _excerpt(found, condition.text)
            elif name in VALUES:
                holds = _VALUES[name](self.state) == condition.text
            else:
                holds = condition.holds_for(self.number(name))
            if holds is condition.negated:
                return False
        return True

    def row(self) -> dict[str, Any]:
        """Return the rollout as a row of a table. Its turns are now compared with their checksums."""
        texts = [*self.errors, *(turn.completion.text for turn in self.turns)]
        return {
            "rollout": self.state.id,
            "task": self.state.task,
            "step": self.task.step,
            "status": str(self.state.status),
            "reward": self.reward,
            "turns": _count_turns(self),
            "tokens": self.tokens,
            "attempts": len(self.state.attempts),
            "text": self.excerpt or _excerpt(next(iter(texts), ""), ""),
            "why": explain_absence(self.state, self.task),
        }


def _count_turns(candidate: Candidate) -> int:
    return 0 if candidate.state.last is None else candidate.state.last.turns


_NUMBERS: Mapping[str, Callable[[Candidate], float | None]] = {
    "reward": lambda candidate: candidate.reward,
    "tokens": lambda candidate: candidate.tokens,
    "turns": _count_turns,
    "attempts": lambda candidate: len(candidate.state.attempts),
    "step": lambda candidate: candidate.task.step,
    "task": lambda candidate: candidate.state.task,
    "row": lambda candidate: candidate.task.row,
    "rollout": lambda candidate: candidate.state.id,
}
_TEXTS: Mapping[str, Callable[[Candidate], Iterable[str]]] = {
    "text": lambda candidate: [candidate.prompt, *candidate.answers],
    "prompt": lambda candidate: [candidate.prompt],
    "answer": lambda candidate: candidate.answers,
    "observation": lambda candidate: candidate.observations,
    "error": lambda candidate: candidate.errors,
    "tool": lambda candidate: candidate.tools,
    "tag": lambda candidate: candidate.tags,
    "source": lambda candidate: [candidate.task.source],
}
_VALUES: Mapping[str, Callable[[RolloutState], str]] = {
    "outcome": lambda state: str(state.status),
    "batch": lambda state: "yes" if state.phase is Phase.ADMITTED else "no",
    "truncated": lambda state: "yes" if state.last is not None and state.last.truncated else "no",
    "use": lambda state: "evaluation" if state.use == "val" else "training",
}
_COSTLY = ("tokens", "tool", "tag", "answer", "text", "observation")
"""Conditions that read a rollout's events, the cheapest first; others read states."""
Found: TypeAlias = tuple[int, RolloutState | None]
"""The id of a rollout, and its state; None if that is damaged."""
Placed: TypeAlias = tuple[str, int, RolloutState | None]
"""The same with its place, where another search may continue."""
COLUMNS = ("rollout", "task", "step", "status", "reward", "turns", "tokens", "attempts", "text", "why")
SHOWN = ("text", "prompt", "answer", "observation", "error")
"""Conditions whose text is shown where it was found."""


def search_rollouts(
    reader: RunReader, query: str, start: str = "", *, most: int = MOST_FOUND, seconds: float = SEARCH_S
) -> SearchPage:
    """Search the rollouts of a run. start: the place where an earlier search stopped."""
    conditions = sorted(parse_search(query), key=_cost)
    looked = damaged = 0
    reached: int | None = None
    following = ""
    rows: list[dict[str, Any]] = []
    end: float | None = None
    found = _candidates(reader, conditions, start)
    size = 1
    while not following and (page := [*islice(found, size)]):
        began, batch = time.monotonic(), Batch(reader.journal)
        end = began + seconds if end is None else end  # reading the first step takes none of the time
        for place, id, candidate in _screen(reader, page, [word for word in conditions if not _cost(word)], batch):
            looked, reached = looked + 1, id
            try:
                if candidate is None:
                    damaged += 1
                elif candidate.passes and candidate.holds([word for word in conditions if _cost(word)]):
                    rows.append(candidate.row())
            except StoreError:
                damaged += 1
            if len(rows) >= most or time.monotonic() >= end:
                following = place
                break
        size = _next_size(size, time.monotonic() - began, end - time.monotonic(), batch.characters)
    table = Table({name: [row[name] for row in rows] for name in COLUMNS})
    partial = ""
    if following:
        bound = f"most={most}" if len(rows) >= most else f"seconds={seconds:g}"
        partial = f"The search reached `{bound}` at rollout {reached}. Continue with `from={following}`."
    newest = _newest(reader, _use_of(conditions))
    return SearchPage(looked, reached, newest, damaged, following, partial, table)


def _next_size(size: int, spent: float, left: float, characters: int) -> int:
    """Return the size of the batch after one of `size`: at most twice as large, for half of the time that is left."""
    growth = min(2.0, left / max(2 * spent, 1e-9), BATCH_CHARACTERS / max(characters, 1))
    return max(1, min(PAGE, int(size * growth)))


def _cost(condition: Condition) -> int:
    return 1 + _COSTLY.index(condition.name) if condition.name in _COSTLY else 0


def _screen(
    reader: RunReader, page: Iterable[Placed], conditions: Sequence[Condition], batch: Batch
) -> list[tuple[str, int, Candidate | None]]:
    """Check the conditions on states; None in place of a candidate is a damaged one.

    batch: it gets the rollouts that pass, whose answers are read together.
    """
    reward_of, task = reader.reward_of, None
    screened: list[tuple[str, int, Candidate | None]] = []
    for place, id, state in page:
        candidate = None
        with suppress(StoreError):
            if state is not None:
                if task is None or task.id != state.task:
                    task = reader.journal.task(state.task)
                candidate = Candidate(reader, state, task, reward_of(state), batch)
                candidate.passes = candidate.holds(conditions)
                batch.rollouts += [id] * candidate.passes
        screened.append((place, id, candidate))
    return screened


def _excerpt(text: str, found: str) -> str:
    """Return a text around the place where another was found."""
    at = text.lower().find(found)
    first, last = max(0, at - AROUND), at + len(found) + AROUND
    return f"{'…' if first else ''}{text[first:last]}{'…' if last < len(text) else ''}"


def _candidates(reader: RunReader, conditions: Sequence[Condition], start: str) -> Iterator[Placed]:
    """Yield the rollouts that may match, the newest first, each with its place and its id. One without a state is
    damaged."""
    step, before = _parse_place(start)
    lowest, highest = _rollout_range(conditions)
    use = _use_of(conditions)
    of_step = [condition for condition in conditions if condition.name == "step" and not condition.negated]
    if of_step and use == "train":
        for wanted in reversed(reader.index.steps):
            if (step is None or wanted <= step) and all(condition.holds_for(wanted) for condition in of_step):
                yield from _of_step(reader, wanted, before if wanted == step else None)
        return
    if before is None and use == "train":
        newest = _newest(reader, use)
        before = 0 if newest is None else newest + 1
    before = min(LAST_ID if before is None else before, highest + 1)
    for id, state in _newest_first(reader, before, use):
        if id < lowest:
            return
        yield str(id), id, state


def _rollout_range(conditions: Sequence[Condition]) -> tuple[int, int]:
    """Return bounds of the ids that the conditions on `rollout` allow."""
    lowest, highest = 0, LAST_ID - 1
    for condition in conditions:
        if condition.name == "rollout" and not condition.negated and math.isfinite(condition.number):
            if condition.operator in (">", ">=", "="):
                lowest = max(lowest, math.floor(condition.number))
            if condition.operator in ("<", "<=", "="):
                highest = min(highest, max(-1, math.ceil(condition.number)))
    return lowest, highest


def _use_of(conditions: Sequence[Condition]) -> RolloutPurpose | None:
    """Return the use of the rollouts that are searched: those for training, unless the conditions name another use or
    the number of a rollout, which may have any."""
    for condition in conditions:
        if condition.name == "use" and (condition.text == "evaluation") is not condition.negated:
            return "val"
        if condition.name == "rollout" and condition.operator == "=" and not condition.negated:
            return None
    return "train"


def _of_step(reader: RunReader, step: int, before: int | None) -> Iterator[Placed]:
    """Yield the rollouts of a step; if a state is damaged, those that it trained on."""
    found: Mapping[int, RolloutState | None]
    try:
        _, found = step_rollouts(reader, step)
    except StoreError:
        admitted = reader.index.get(step)
        ids = [] if admitted is None else admitted.rollouts.tolist()
        found = {id: state for id in ids for state in _load_each(reader, id)}
    for id in sorted(found, reverse=True):
        if before is None or id < before:
            yield f"{step}:{id}", id, found[id]


def _newest_first(reader: RunReader, before: int, use: RolloutPurpose | None) -> Iterator[Found]:
    """Yield the rollouts of a use before an id, the newest first. A page with a damaged state is read id by id."""
    journal = reader.journal
    while True:
        try:
            for state in journal.iter_states(RolloutState, before, backwards=True, use=use):
                before = state.id
                yield before, state
            return
        except StoreError:
            tried = range(before - 1, max(-1, before - 1 - PAGE), -1)
            found = [(id, state) for id in tried for state in _load_each(reader, id)]
            if not found:
                raise
        yield from found
        before = tried[-1]


def _load_each(reader: RunReader, id: int) -> list[RolloutState | None]:
    """Return the state of a rollout: none if it does not exist, None if it is damaged."""
    try:
        return list(reader.journal.load_states(RolloutState, [id]).values())
    except StoreError:
        return [None]


def _parse_place(start: str) -> tuple[int | None, int | None]:
    """Return the step and the rollout of a place."""
    if not start:
        return None, None
    found = re.fullmatch(r"(?:(\d+):)?(\d+)", start)
    if found is None or int(found[2]) >= 2**63:
        raise ConfigError(f"`from={start}` is no place of a search. Take `next` of an earlier answer.")
    return None if found[1] is None else int(found[1]), int(found[2])


def _newest(reader: RunReader, use: RolloutPurpose | None) -> int | None:
    """Return the newest rollout of a use. If the state of one for training is damaged, it is the newest one that a step
    trained on."""
    states = reader.journal.iter_states(RolloutState, backwards=True, use=use)
    try:
        return next((state.id for state in states), None)
    except StoreError:
        if use != "train":
            return None
        return max((int(step.rollouts.max()) for step in reader.index.admitted if len(step.rollouts)), default=None)
