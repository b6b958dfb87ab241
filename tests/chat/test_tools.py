from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.chat.tools import FORMATS, format_of, hermes, llama3, qwen_xml
from tests.chat.conversations import TIME, WEATHER, values
from tests.chat.made import published


def test_hermes_calls_are_read_to_the_letter() -> None:
    arguments = '{"days":2,  "city": "Z\\u00fcrich"}'
    text = f'Let me look.\n<tool_call>\n{{"name": "weather", "arguments": {arguments}}}\n</tool_call>'
    assert hermes(text) == ("Let me look.", [("weather", arguments)])


def test_several_calls_are_read_in_their_order() -> None:
    one = '<tool_call>\n{"name": "a", "arguments": {}}\n</tool_call>'
    two = '<tool_call>{"arguments": {"x": "</b>"}, "name": "b"}</tool_call>'
    assert hermes(f"{one}\n{two}\n") == ("", [("a", "{}"), ("b", '{"x": "</b>"}')])
    assert hermes(f"{one} and {two} done") == (" and  done", [("a", "{}"), ("b", '{"x": "</b>"}')])


@pytest.mark.parametrize(
    "block",
    [
        "",
        "weather(Bern)",
        "{}",
        '{"name": "weather"}',
        '{"arguments": {}}',
        '{"name": "weather", "arguments": "{}"}',
        '{"name": "weather", "arguments": [1]}',
        '{"name": "", "arguments": {}}',
        '{"name": 3, "arguments": {}}',
        '{"name": "weather", "arguments": {"city": }}',
        '{"name": "weather", "arguments": {}} and more',
        '{"name": "weather", "arguments": {}',
        '{"name": "weather", "arguments": {},}',
        '{"name": "weather" "arguments": {}}',
        '[{"name": "weather", "arguments": {}}]',
        '{"name": "weather", "arguments": ' + "[" * 5000,
    ],
)
def test_a_malformed_call_stays_text(block: str) -> None:
    text = f"Look:\n<tool_call>\n{block}\n</tool_call>\n"
    assert hermes(text) == (text, [])
    fine = '<tool_call>\n{"name": "a", "arguments": {}}\n</tool_call>'
    assert hermes(text + fine) == (text.removesuffix("\n"), [("a", "{}")])
    assert llama3(block.replace("arguments", "parameters")) == (block.replace("arguments", "parameters"), [])


def test_a_call_that_is_not_closed_stays_text() -> None:
    text = '<tool_call>\n{"name": "a", "arguments": {}}\n'
    assert hermes(text) == (text, [])


def test_llama3_calls_are_all_of_the_text() -> None:
    call = '{"name": "weather", "parameters": {"city": "Bern"}}'
    assert llama3(call) == ("", [("weather", '{"city": "Bern"}')])
    assert llama3(f"<|python_tag|>{call}\n") == ("", [("weather", '{"city": "Bern"}')])
    for text in (f"I call {call}", f"{call} now", call + call, "Hello", ""):
        assert llama3(text) == (text, [])


@given(st.text(min_size=1, max_size=8), st.dictionaries(st.text(max_size=4), values, max_size=3), st.text(max_size=8))
def test_any_call_is_read_back(name: str, arguments: dict[str, object], said: str) -> None:
    written = json.dumps(arguments)
    block = '<tool_call>\n{"name": ' + json.dumps(name) + ', "arguments": ' + written + "}\n</tool_call>"
    if "</tool_call>" not in written + name:
        rest, calls = hermes(said + "\n" + block)
        assert calls == [(name, written)]
        assert rest == (said if said.strip() else "")


def xml(name: str, **parameters: str) -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters.items())
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def test_parameters_have_the_types_that_the_tools_declare() -> None:
    text = "Look.\n\n" + xml("weather", city="12", days="3", more="4")
    assert qwen_xml(text) == ("Look.\n", [("weather", '{"city": "12", "days": "3", "more": "4"}')])
    assert qwen_xml(text, [TIME, WEATHER])[1] == [("weather", '{"city": "12", "days": 3, "more": "4"}')]
    assert qwen_xml(text, [WEATHER["function"]])[1] == [("weather", '{"city": "12", "days": 3, "more": "4"}')]
    for written, value in (("three", '"three"'), ("True", "true"), ("None", "null"), ("[1]", "[1]")):
        assert qwen_xml(xml("weather", days=written), [WEATHER])[1] == [("weather", f'{{"days": {value}}}')]


def test_a_type_may_be_one_of_several() -> None:
    tool = {"name": "f", "parameters": {"properties": {"a": {"type": ["integer", "null"]}, "b": {"type": ["string"]}}}}
    assert qwen_xml(xml("f", a="1", b="1"), [tool])[1] == [("f", '{"a": 1, "b": "1"}')]
    assert qwen_xml(xml("f", a="1"), [{"name": "f"}])[1] == [("f", '{"a": "1"}')]


def test_texts_of_many_lines_are_kept_to_the_letter() -> None:
    code = "\n  if a < b:\n\tprint('<é>')\n"
    (call,) = qwen_xml(xml("run", code=code))[1]
    assert json.loads(call[1]) == {"code": code}
    assert qwen_xml(xml("time") + "\n" + xml("time")) == ("", [("time", "{}"), ("time", "{}")])


@pytest.mark.parametrize(
    "block",
    [
        "",
        "<function=f>",
        "<function=f>\n<parameter=a>\n1\n</function>",
        "<function=>\n</function>",
        "<function=f>x</function>",
    ],
)
def test_a_malformed_function_stays_text(block: str) -> None:
    text = f"Look:\n<tool_call>\n{block}\n</tool_call>"
    assert qwen_xml(text) == (text, [])


def test_the_form_of_call_is_told_by_the_template() -> None:
    known = {name: form for name, source in published().items() if (form := format_of(source))}
    assert set(known.values()) == set(FORMATS)
    assert {name for name, form in known.items() if form == "llama3"} == {"llama3_1", "llama3_2"}
    for name in ("qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_vl"):
        assert known[name] == "hermes"
    for name in ("qwen3_5_think", "qwen3_6", "qwen3_8", "nemotron_3_nano"):
        assert known[name] == "qwen_xml"
    for name in ("glm4moe", "gptoss", "gemma4", "phi3", "deepseekv3"):
        assert name not in known
