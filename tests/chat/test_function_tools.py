"""Functions as tools: their schemas for the model, and the arguments of calls."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from etude.chat.function_tools import FunctionTool, InvalidToolCallError, format_result
from etude.errors import PluginError
from etude.records import Task

TASK = Task(7, {"prompt": "?"})


def search(
    query: str,
    task: Task,
    kinds: list[Literal["old", "new"]] = ["new"],  # noqa: B006
    schema: int | None = None,
    *,
    title: Annotated[float, Field(description="how sure", ge=0)] = 1.0,
) -> dict[str, Any]:
    """Search for things.

    It takes a while: be patient.

    Args:
        query: what to look for,
            over two lines
        kinds (list): which of them
        schema: a name that pydantic has itself

    Returns:
        query: no parameter, though it reads like one
    """
    return {"query": query, "task": task.ordinal, "kinds": kinds, "schema": schema, "title": title}


def test_the_schema_is_the_signature_and_the_docstring() -> None:
    schema = FunctionTool(search).schema
    assert schema["type"] == "function" and json.loads(json.dumps(schema)) == schema
    function = schema["function"]
    assert (
        function["name"] == "search"
        and function["description"] == "Search for things.\n\nIt takes a while: be patient."
    )
    assert function["parameters"]["type"] == "object" and function["parameters"]["required"] == ["query"]
    assert function["parameters"]["properties"] == {
        "query": {"type": "string", "description": "what to look for, over two lines"},
        "kinds": {
            "type": "array",
            "items": {"type": "string", "enum": ["old", "new"]},
            "default": ["new"],
            "description": "which of them",
        },
        "schema": {
            "anyOf": [{"type": "integer"}, {"type": "null"}],
            "default": None,
            "description": "a name that pydantic has itself",
        },
        "title": {"type": "number", "default": 1.0, "description": "how sure", "minimum": 0},
    }


@pytest.mark.parametrize(
    ("text", "given"),
    [
        ('{"query": "a"}', {"query": "a", "kinds": ["new"], "schema": None, "title": 1.0}),
        ('{"query": 3, "schema": "4"}', {"query": "3", "kinds": ["new"], "schema": 4, "title": 1.0}),
        (
            ' {"title": 0, "query": "é", "kinds": []}',
            {"query": "é", "kinds": [], "schema": None, "title": 0.0},
        ),
    ],
)
def test_a_call_passes_its_arguments_and_the_task(text: str, given: dict[str, Any]) -> None:
    tool = FunctionTool(search)
    assert tool.parse_arguments(text, TASK) == given | {"task": TASK}
    assert tool.function(**tool.parse_arguments(text, TASK))["task"] == 7


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("{}", "query: Field required"),
        ("", "query: Field required"),
        ("[1]", "valid dictionary|object"),
        ("{query: 1}", "Invalid JSON"),
        ('{"query": "a", "task": 3}', "task: Extra inputs"),
        ('{"query": "a", "more": 3}', "more: Extra inputs"),
        ('{"query": "a", "schema": "four"}', "schema: .*integer"),
        ('{"query": "a", "kinds": ["odd"]}', r"kinds\.0: .*'old' or 'new'"),
        ('{"query": "a", "title": -1}', "title: .*greater than or equal to 0"),
        ('{"query": "\\ud800"}', "query|Invalid JSON"),
        ("[" * 5000, "Invalid JSON"),
    ],
)
def test_an_invalid_call_gets_the_reason(text: str, what: str) -> None:
    with pytest.raises(InvalidToolCallError, match=f"`search` cannot be called with .*({what})"):
        FunctionTool(search).parse_arguments(text, TASK)


def sphinx(name: str, count: int) -> None:
    """Count.

    :param name: whose
    :param int count: how many
    :returns: nothing
    """


class Shop:
    """A tool with state."""

    def __init__(self) -> None:
        self.bought: list[str] = []

    def buy(self, thing: str) -> int:
        """Buy a thing."""
        self.bought.append(thing)
        return len(self.bought)

    async def __call__(self) -> None:
        """Wait."""


async def waits() -> None:
    """Wait."""


def test_other_forms_of_functions_are_tools() -> None:
    properties = FunctionTool(sphinx).schema["function"]["parameters"]["properties"]
    assert properties["name"]["description"] == "whose" and properties["count"]["description"] == "how many"
    shop = Shop()
    method = FunctionTool(shop.buy)
    assert method.name == "buy" and list(method.schema["function"]["parameters"]["properties"]) == ["thing"]
    assert method.function(**method.parse_arguments('{"thing": "a"}', None)) == 1 and shop.bought == ["a"]
    assert FunctionTool(waits).is_async and not method.is_async
    assert FunctionTool(waits).schema["function"]["parameters"] == {"type": "object", "properties": {}}


def undocumented(a: int) -> None: ...


def untyped(a) -> None:  # type: ignore[no-untyped-def]
    """Something."""


def variadic(*a: int) -> None:
    """Something."""


def positional(a: int, /) -> None:
    """Something."""


def unknown(a: Nowhere) -> None:  # type: ignore[name-defined]  # noqa: F821
    """Something."""


def unwritable(a: Shop) -> None:
    """Something."""


def calls_back(a: Callable[[], int]) -> None:
    """Something."""


@pytest.mark.parametrize(
    ("function", "what"),
    [
        (undocumented, "`undocumented` has no docstring"),
        (untyped, "has no type for `a`.*`a: int`"),
        (variadic, "takes `a` as variadic positional"),
        (positional, "takes `a` as positional-only"),
        (unknown, "types of the tool `unknown` cannot be read: .*Nowhere"),
        (unwritable, "`unwritable` has a type that no JSON can be"),
        (calls_back, "`calls_back` has a type that no JSON can be"),
        (lambda: 0, "has no name that a model can call"),
        (partial(sphinx, "a"), "has no name that a model can call"),
    ],
)
def test_a_function_that_cannot_be_described_is_refused(function: Callable[..., Any], what: str) -> None:
    with pytest.raises(PluginError, match=what):
        FunctionTool(function)


@dataclass
class Found:
    """The result of a tool."""

    names: tuple[str, ...]
    odd: object = None


def test_results_are_shown_as_text_or_json() -> None:
    assert [format_result(value) for value in ("a\nb", 3, None, True, [1.5, "é"])] == [
        "a\nb",
        "3",
        "null",
        "true",
        '[1.5,"é"]',
    ]
    assert format_result(Found(("a", "b"))) == '{"names":["a","b"],"odd":null}'
    assert str(format_result("half \ud800")).encode() and "names" in format_result(Found((), odd=object()))
