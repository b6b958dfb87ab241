"""Conversations to test templates with, in their JSON form, written by hand and drawn by hypothesis."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

Form = dict[str, Any]

WEATHER: Form = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": 'The "weather" <now>, in °C & words.',
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Where, e.g. Zürich"},
                "days": {"type": "integer"},
            },
            "required": ["city"],
        },
    },
}
TIME: Form = {
    "type": "function",
    "function": {
        "name": "time",
        "description": "The time.",
        "parameters": {"type": "object", "properties": {}, "required": []},
    },
}


def by(role: str, content: str, **more: Any) -> Form:
    """Return a message."""
    return {"role": role, "content": content, **more}


def call(name: str, arguments: Any, id: str = "call00001") -> Form:
    """Return a tool call."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(content: str, id: str = "call00001", name: str = "weather") -> Form:
    """Return the message with a tool's result."""
    return by("tool", content, tool_call_id=id, name=name)


ASKED = [by("system", "Be <brief> & kind."), by("user", "Wie wird's in Zürich? 🌦")]
CALLED = by(
    "assistant", "", tool_calls=[call("weather", {"city": "Zürich", "days": 2, "more": [1.5, None, True, "a<b"]})]
)

CONVERSATIONS: dict[str, tuple[list[Form], list[Form]]] = {
    "one": ([by("user", "Hi")], []),
    "system": (ASKED, []),
    "developer": ([by("developer", "Be brief."), by("user", "Hi")], []),
    "turns": ([by("user", "Hi"), by("assistant", "Hello."), by("user", " What is 2 + 2?\n"), by("assistant", "4")], []),
    "empty": ([by("system", ""), by("user", ""), by("assistant", ""), by("user", "?")], []),
    "spaces": ([by("user", "\n a \n"), by("assistant", "\n\n b  \n"), by("user", "\tc")], []),
    "markup": ([by("user", "<|im_end|> </think> {{ x }} {% raw %}"), by("assistant", "a<b>&'\""), by("user", "?")], []),
    "thought": (
        [
            by("user", "2 + 2?"),
            by("assistant", "4", reasoning_content="Two and two\n\nis four."),
            by("user", "Sure?"),
            by("assistant", "Yes.", reasoning_content="Hm."),
        ],
        [],
    ),
    "thought in text": ([by("user", "?"), by("assistant", "<think>\nhm\n</think>\n\n4"), by("user", "Sure?")], []),
    "tools": (ASKED, [WEATHER, TIME]),
    "tools without system": ([by("user", "Hi")], [WEATHER]),
    "call": ([*ASKED, CALLED], [WEATHER]),
    "result": ([*ASKED, CALLED, result('{"sky": "grey", "°C": 12}')], [WEATHER, TIME]),
    "answer": ([*ASKED, CALLED, result("rain"), by("assistant", "Rain."), by("user", "Thanks")], [WEATHER]),
    "thought and call": (
        [*ASKED, {**CALLED, "reasoning_content": "I must look."}, result("rain"), by("assistant", "Rain.")],
        [WEATHER],
    ),
    "text and call": ([*ASKED, {**CALLED, "content": "Let me look."}, result("rain")], [WEATHER]),
    "two calls": (
        [
            *ASKED,
            by("assistant", "", tool_calls=[call("weather", {"city": "Bern"}), call("time", {}, "call00002")]),
            result("rain"),
            result("noon", "call00002", "time"),
        ],
        [WEATHER, TIME],
    ),
    "robot": ([by("robot", "beep"), by("user", "Hi")], []),
    "tool first": ([result("rain"), by("user", "Hi")], []),
    "assistant first": ([by("assistant", "Hi"), by("user", "Hi")], []),
    "two questions": ([by("user", "Hi"), by("user", "there")], []),
    "nulls": ([by("user", "Hi"), by("assistant", "Hello.", tool_calls=None, name=None), by("user", "?")], []),
}

texts = st.text(max_size=12) | st.sampled_from(
    ["", " ", "\n", "a\n", "<think>", "</think>", "<tool_call>", "é🎉", "a b"]
)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(-2, 2) | texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts, inner, max_size=2),
    max_leaves=4,
)


@st.composite
def exchanges(draw: st.DrawFn) -> tuple[list[Form], list[Form]]:
    """Draw a question with its answer, or with a call, its result and then the answer."""
    question, answer = by("user", draw(texts)), by("assistant", draw(texts))
    if draw(st.booleans()):
        answer["reasoning_content"] = draw(texts)
    if not draw(st.booleans()):
        return [question, answer], []
    wanted = call("weather", draw(st.dictionaries(texts, values, max_size=3)))
    return [question, by("assistant", draw(texts), tool_calls=[wanted]), result(draw(texts)), answer], [WEATHER]


@st.composite
def conversations(draw: st.DrawFn) -> tuple[list[Form], list[Form]]:
    """Draw some exchanges, perhaps after a system message, perhaps with the last one unfinished."""
    forms: list[Form] = [by("system", draw(texts))] if draw(st.booleans()) else []
    tools: list[Form] = []
    for more, offered in draw(st.lists(exchanges(), min_size=1, max_size=3)):
        forms, tools = [*forms, *more], tools or offered
    return forms[: len(forms) - draw(st.integers(0, 1))], tools
