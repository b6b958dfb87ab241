"""A reward for following verifiable instructions: a number of words, keywords, no comma (`etude.rewards.constraints`).

The instructions of a task are in its columns `instruction_id_list` and `kwargs`, as in IFEval. They can also be its
right answer, as an object or as JSON text:

    {"instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
     "kwargs": [{}, {"num_words": 20, "relation": "at least"}]}
    [{"name": "no_comma"}, {"name": "number_words", "num_words": 20, "relation": "at least"}]
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from difflib import get_close_matches
from functools import lru_cache
from typing import Any, ClassVar, Literal, NoReturn

from pydantic import Field

from etude.errors import DataError
from etude.records import Task
from etude.rewards.base import RewardFunction, describe_task
from etude.rewards.constraints import (
    CONSTRAINTS,
    LIST_ARGUMENTS,
    UNVERIFIABLE,
    is_satisfied,
    list_arguments,
    make_loose_variants,
)

Instruction = tuple[str, Mapping[str, Any]]
_LISTS = ("instruction_id_list", "instruction_id")


class Instructions(RewardFunction):
    """1 if an answer follows every instruction of its task, or the share of the instructions that it follows."""

    score: Literal["all", "share"] = Field(
        "all", description="`all`: 1 if all instructions are followed, else 0; `share`: the share of them followed"
    )
    loose: bool = Field(
        False, description="forgive a first line, a last line and asterisks, as in IFEval's loose accuracy"
    )
    after: str = Field("", description="judge only the text after the last occurrence of this, such as </think>")

    quick: ClassVar[bool] = True

    def check(self, task: Task) -> None:
        for name, arguments in read_instructions(task):
            try:
                is_satisfied(name, arguments, "A text.")
            except (TypeError, ValueError, AttributeError) as error:
                raise DataError(
                    f"The instruction `{name}` of {describe_task(task)} cannot be verified: {error}."
                ) from error

    def __call__(self, task: Task, answer: str) -> float:
        text = answer.rpartition(self.after)[2] if self.after else answer
        texts = make_loose_variants(text) if self.loose else [text]
        instructions = read_instructions(task)
        followed = sum(
            any(is_satisfied(name, arguments, variant) for variant in texts) for name, arguments in instructions
        )
        return followed / len(instructions) if self.score == "share" else float(followed == len(instructions))


def read_instructions(task: Task) -> tuple[Instruction, ...]:
    """Return the instructions of a task, each a name with arguments. Raises `DataError` if they cannot be read."""
    content: Any = task.fields.get("ground_truth")
    if content is None:
        content = {name: task.fields.get(name) for name in (*_LISTS, "kwargs") if task.fields.get(name)}
    try:
        return _parse_instructions(content if isinstance(content, str) else json.dumps(content))
    except _UnreadableError as error:
        raise DataError(
            f"The instructions of {describe_task(task)} cannot be used: {error}. Put them in the columns "
            f"`instruction_id_list` and `kwargs`, or in the right answer; `data.columns.answer=…` names its column."
        ) from None


class _UnreadableError(Exception):
    """A list of instructions that cannot be read. The message is the end of a sentence."""


@lru_cache(maxsize=1024)
def _parse_instructions(text: str) -> tuple[Instruction, ...]:
    """Parse the instructions in a JSON text. The cache serves all answers to one task."""
    try:
        content = json.loads(text)
    except ValueError:
        _refuse("the right answer is text, and not JSON")
    instructions = tuple(
        instruction
        for part in (content if isinstance(content, list) else [content])
        for instruction in _collect_instructions(part)
    )
    if not instructions:
        _refuse("there are none")
    return instructions


def _collect_instructions(content: Any) -> list[Instruction]:
    if isinstance(content, str):
        return [_make_instruction(content, {})]
    if not isinstance(content, Mapping):
        _refuse(f"the value is of type {type(content).__name__}")
    listed = next((content[name] for name in _LISTS if content.get(name)), None)
    if listed is None:
        if not isinstance(name := content.get("name"), str):
            _refuse("one has no name")
        return [_make_instruction(name, {key: value for key, value in content.items() if key != "name"})]
    names = listed if isinstance(listed, list) else [listed]
    arguments_list = content.get("kwargs") or [None] * len(names)
    arguments_list = json.loads(arguments_list) if isinstance(arguments_list, str) else arguments_list
    if not isinstance(arguments_list, list) or len(arguments_list) != len(names):
        _refuse(f"there are {len(names)} names, and `kwargs` is no list of as many")
    return [_make_instruction(name, arguments or {}) for name, arguments in zip(names, arguments_list, strict=True)]


def _make_instruction(name: str, kwargs: Mapping[str, Any]) -> Instruction:
    """Check one instruction and return it under the last part of IFEval's name. Null arguments are left out."""
    short = str(name).rpartition(":")[2]
    if short in UNVERIFIABLE:
        _refuse(f"`{name}` cannot be verified: {UNVERIFIABLE[short]}")
    if short not in CONSTRAINTS:
        suggestions = get_close_matches(short, CONSTRAINTS, n=1)
        _refuse(
            f"there is no `{name}`"
            + (f"; did you mean {suggestions[0]}?" if suggestions else f"; there are {', '.join(CONSTRAINTS)}")
        )
    arguments = {key: value for key, value in kwargs.items() if value is not None}
    known = list_arguments(CONSTRAINTS[short])
    if unknown := sorted(arguments.keys() - known.keys()):
        _refuse(f"`{name}` has the arguments {', '.join(unknown)}, and takes {', '.join(known) or 'nothing'}")
    if missing := [key for key, needed in known.items() if needed and key not in arguments]:
        _refuse(f"`{name}` lacks {', '.join(missing)}")
    if single := [key for key in LIST_ARGUMENTS if key in arguments and not isinstance(arguments[key], list)]:
        _refuse(f"`{single[0]}` of `{name}` must be a list")
    return short, arguments


def _refuse(why: str) -> NoReturn:
    raise _UnreadableError(why)
