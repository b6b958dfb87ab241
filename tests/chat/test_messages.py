from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.chat.messages import (
    check_roles,
    content_text,
    is_same_message,
    message_from_dict,
    message_to_dict,
    same_tools,
)
from etude.errors import ChatError
from etude.records import ContentPart, Message, ToolCall
from tests.chat.conversations import CONVERSATIONS, TIME, WEATHER, values

CALL = ToolCall("c1", "weather", '{"city": "Bern", "days": 2}')
SAID = Message("assistant", "Rain. ", reasoning="Hm.\n", tool_calls=(CALL,))


def with_arguments(arguments: str) -> Message:
    return replace(SAID, tool_calls=(replace(CALL, arguments=arguments),))


def test_every_conversation_survives_its_json_form() -> None:
    for forms, _ in CONVERSATIONS.values():
        for form in forms:
            message = message_from_dict(form)
            assert message_from_dict(json.loads(json.dumps(message_to_dict(message)))) == message


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"role": "user", "content": None}, Message("user", "")),
        ({"role": "assistant", "content": "4", "reasoning": "2+2"}, Message("assistant", "4", reasoning="2+2")),
        ({"role": "assistant", "content": "4", "thinking": "2+2"}, Message("assistant", "4", reasoning="2+2")),
        (
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "u"}}],
            },
            Message("user", (ContentPart("text", "a"), ContentPart("image", url="u"))),
        ),
        (
            {"role": "user", "content": [{"type": "image", "url": "u"}]},
            Message("user", (ContentPart("image", url="u"),)),
        ),
        (
            {"role": "assistant", "tool_calls": [{"name": "f", "arguments": '{"a":1}'}]},
            Message("assistant", "", tool_calls=(ToolCall("", "f", '{"a":1}'),)),
        ),
    ],
)
def test_the_usual_forms_of_a_message_are_read(form: dict[str, object], message: Message) -> None:
    assert message_from_dict(form) == message


@pytest.mark.parametrize(
    ("form", "problem"),
    [
        ({"content": "x"}, "needs a string under 'role'; this one has the keys content"),
        ({"role": "user", "content": 4}, "a string or a list of parts; a value of type int was given"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "needs the function's name"),
    ],
)
def test_an_invalid_message_is_reported(form: dict[str, object], problem: str) -> None:
    with pytest.raises(ChatError, match=problem):
        message_from_dict(form)


def test_an_unknown_role_is_reported() -> None:
    with pytest.raises(ChatError, match="Message 1 of the conversation has the role 'robot'; it must be one of sys"):
        check_roles([Message("user", ""), Message("robot", "")])


@pytest.mark.parametrize(
    "given",
    [
        SAID,
        replace(SAID, reasoning=""),
        replace(SAID, reasoning="Hm."),
        replace(SAID, reasoning=" H m\n\n."),
        replace(SAID, reasoning="m.\n"),
        replace(SAID, content=(ContentPart("text", "Rain. "),)),
        replace(SAID, content=(ContentPart("text", "Ra"), ContentPart("text", "in. "))),
        with_arguments('{"days":2,\n "city":"Bern"}'),
        with_arguments('{"city": "\\u0042ern", "days": 2}'),
    ],
)
def test_fields_that_the_model_never_saw_make_no_difference(given: Message) -> None:
    assert is_same_message(SAID, given)


@pytest.mark.parametrize(
    "given",
    [
        replace(SAID, role="user"),
        replace(SAID, content="Rain."),
        replace(SAID, content="rain. "),
        replace(SAID, content=(ContentPart("image", url="u"),)),
        replace(SAID, reasoning="Hmm."),
        replace(SAID, name="me"),
        replace(SAID, tool_call_id="c1"),
        replace(SAID, tool_calls=()),
        replace(SAID, tool_calls=(CALL, CALL)),
        replace(SAID, tool_calls=(replace(CALL, id="c2"),)),
        replace(SAID, tool_calls=(replace(CALL, name="time"),)),
        with_arguments('{"city": "Bern", "days": 2.0}'),
        with_arguments('{"city": "Bern", "days": "2"}'),
        with_arguments('{"city": "Bern"}'),
        with_arguments('{"city": "Bern", "days": 2'),
    ],
)
def test_different_content_is_different(given: Message) -> None:
    assert not is_same_message(SAID, given)


def test_true_is_not_one_and_malformed_arguments_are_text() -> None:
    assert not is_same_message(with_arguments('{"a": 1}'), with_arguments('{"a": true}'))
    assert not is_same_message(with_arguments('{"a": [1]}'), with_arguments('{"a": [1.0]}'))
    assert is_same_message(with_arguments("{broken"), with_arguments("{broken"))
    assert not is_same_message(with_arguments("{broken"), with_arguments("{broken "))
    assert not is_same_message(replace(SAID, reasoning=""), SAID)  # reasoning may be left out, not put in


@given(values, st.integers(0, 4), st.booleans())
def test_arguments_are_equal_however_they_are_written(value: object, indent: int, sort: bool) -> None:
    one, other = json.dumps({"v": value}), json.dumps({"v": value}, indent=indent, sort_keys=sort, ensure_ascii=False)
    assert is_same_message(with_arguments(one), with_arguments(other))
    assert not is_same_message(with_arguments(one), with_arguments(json.dumps({"v": [value]})))


def test_tools_are_compared_as_values_in_order() -> None:
    assert same_tools([WEATHER, TIME], json.loads(json.dumps([WEATHER, TIME], sort_keys=True)))
    assert not same_tools([WEATHER, TIME], [TIME, WEATHER])
    assert not same_tools([WEATHER], [])


def test_a_template_gets_the_fields_that_it_reads() -> None:
    message = with_arguments('{"a": 1}')
    assert message_to_dict(message)["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"a": 1}}
    assert message_to_dict(message, arguments_as_text=True)["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'
    assert message_to_dict(with_arguments("{x"))["tool_calls"][0]["function"]["arguments"] == "{x"
    assert message_to_dict(Message("user", "a"), parts=True) == {
        "role": "user",
        "content": [{"type": "text", "text": "a"}],
    }
    assert message_to_dict(Message("user", (ContentPart("text", "a"), ContentPart("image", url="u"))))["content"] == [
        {"type": "text", "text": "a"},
        {"type": "image", "url": "u"},
    ]
    assert set(message_to_dict(Message("user", "a"))) == {"role", "content"}
    assert content_text((ContentPart("text", "a"), ContentPart("text", "b"))) == "ab"
