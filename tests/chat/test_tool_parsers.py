"""Calls are read to the letter in every form, and what is not a call to the letter stays text."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.chat.parsing import ParseBuffer, ParsedCalls
from etude.chat.streaming import TextStreamParser
from etude.chat.tool_parsers import TOOL_MARKERS, TOOL_PARSERS, Tools, detect_tool_format
from tests.chat.conversations import TIME, WEATHER, texts, values
from tests.chat.families import LLAMA4, MISTRAL_ARGS, MISTRAL_LIST
from tests.chat.made import published

Read = tuple[str, list[tuple[str, str]]]
WORDS = [
    *TOOL_MARKERS, "<tool_call", "\n", " ", "{", "}", "[", "]", "(", ")", ",", ":", "=", '"', "'", "\\", "1", "-", "e",
    "True", "null", '"name"', '"arguments"', '"parameters"', '{"name": "f", "arguments": {}}',
    '{"name": "f", "parameters": {}',
    "[f(a=1)]", "f", ".call", "<function=f>", "</function>", "<parameter=a>", "</parameter>", "é🎉", "\\u00", "\\ud800",
    '<tool_call>{"name": "f", "arguments": {}}</tool_call>', '[TOOL_CALLS]f[ARGS]{"a": "',
    '[TOOL_CALLS][{"name": "f", "arguments": {}}]',
    "\n<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n", "<|tool_call_start|>[f(a='",
]  # fmt: skip
scribbles = st.lists(st.sampled_from(WORDS) | st.text(max_size=3), max_size=12).map("".join)
"""Texts that look like calls, of which few are."""


def read(form: str, text: str, tools: Tools = ()) -> Read:
    """The content of a text and its calls."""
    parser = TextStreamParser(TOOL_PARSERS[form], tools)
    parser.push(text)
    parser.finish()
    return str(parser.message.content), [(call.name, call.arguments) for call in parser.message.tool_calls]


def hermes(text: str) -> Read:
    return read("hermes", text)


def llama3(text: str) -> Read:
    return read("llama3", text)


def qwen_xml(text: str, tools: Tools = ()) -> Read:
    return read("qwen_xml", text, tools)


class Recorder:
    """Records the kind of each character of a text."""

    def __init__(self) -> None:
        self.written, self.rest = "", ""
        self.parsed_calls: list[tuple[str, str]] = []

    def content(self, text: str) -> None:
        """Kept until it is clear on which side of a call it stands."""
        self.rest += text

    def reasoning(self, text: str) -> None:
        """There is none in these."""
        raise AssertionError(text)

    def calls(self, calls: ParsedCalls, text: str) -> None:
        """All up to here is accounted for, the content before it in its place."""
        assert text.startswith(self.rest)
        self.written, self.rest = self.written + text, ""
        self.parsed_calls += calls


@pytest.mark.parametrize("form", TOOL_PARSERS)
@given(text=scribbles)
def test_every_character_is_part_of_text_or_of_a_call(form: str, text: str) -> None:
    recorder = Recorder()
    feed = ParseBuffer(recorder)
    feed.text, feed.is_complete = text, True
    assert not list(TOOL_PARSERS[form](feed, [WEATHER]))
    assert recorder.written + recorder.rest == text and not feed.text
    for name, arguments in recorder.parsed_calls:
        assert name and isinstance(json.loads(arguments), dict)
        assert (name + arguments).encode()
    if not recorder.parsed_calls:
        assert read(form, text) == (text, [])


@given(text=scribbles)
def test_hermes_equals_a_parser_of_whole_texts(text: str) -> None:
    """Restated without streaming: at each mark, the value that json reads, up to the closing mark."""
    content, calls, rest = "", [], text
    while (at := rest.find("<tool_call>")) >= 0:
        inner = rest[at + len("<tool_call>") :]
        call = read_by_json(inner)
        if call is None:
            content, rest = content + rest[: at + len("<tool_call>")], inner
            continue
        content += rest[:at].removesuffix("\n")
        calls.append(call[:2])
        rest = call[2]
    content += rest
    assert hermes(text) == ("" if calls and not content.strip() else content, calls)


def read_by_json(text: str) -> tuple[str, str, str] | None:
    """The name, the arguments' text and what comes after the block."""
    text = text.lstrip()
    try:
        call, end = json.JSONDecoder().raw_decode(text)
        fine = isinstance(call, dict) and call["name"].encode() and isinstance(call["arguments"], dict)
    except (ValueError, KeyError, AttributeError):
        return None
    after = text[end:].lstrip()
    if not fine or not after.startswith("</tool_call>"):
        return None
    arguments = text[:end].rpartition('"arguments"')[2].partition(":")[2].strip()
    return call["name"], arguments.removesuffix("}").strip(), after.removeprefix("</tool_call>")


def test_hermes_calls_are_read_exactly() -> None:
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
def test_any_call_is_read_back(name: str, arguments: dict[str, object], content: str) -> None:
    written = json.dumps(arguments)
    block = '<tool_call>\n{"name": ' + json.dumps(name) + ', "arguments": ' + written + "}\n</tool_call>"
    rest, calls = hermes(content + "\n" + block)
    assert calls == [(name, written)]
    assert rest == (content if content.strip() else "")


def test_a_call_after_one_that_is_not_closed_is_read() -> None:
    one = '<tool_call>\n{"name": "a", "arguments": {}}\n'
    assert hermes(one + one + "</tool_call>") == (one.removesuffix("\n"), [("a", "{}")])


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "01", "1.", "9" * 5000, ".5"])
def test_a_number_that_json_lacks_is_no_call(number: str) -> None:
    text = f'<tool_call>{{"name": "a", "arguments": {{"x": {number}}}}}</tool_call>'
    assert hermes(text) == (text, [])


def test_a_name_with_half_a_character_is_no_call() -> None:
    text = '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'
    assert hermes(text) == (text, [])
    half = '<tool_call>{"name": "a", "arguments": {"x": "\\ud800"}}</tool_call>'
    assert hermes(half) == (half, []), "it cannot be encoded"
    whole = '<tool_call>{"name": "a", "arguments": {"x": "\\ud83d\\ude00"}}</tool_call>'
    assert hermes(whole) == ("", [("a", '{"x": "\\ud83d\\ude00"}')])


def test_llama3_calls_built_in_tools() -> None:
    assert llama3('<|python_tag|>brave_search.call(query="Zürich")') == ("", [("brave_search", '{"query": "Zürich"}')])
    for text in ('brave_search.call(query="x")', '<|python_tag|>print("x")', "<|python_tag|>.call()", "<|python_tag|>"):
        assert llama3(text) == (text, [])


LISTED = '[{"name": "f", "arguments": {"a":  1}}, {"arguments": {}, "name": "g", "id": "123456789"}]'


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"[TOOL_CALLS] {LISTED}", "", [("f", '{"a":  1}'), ("g", "{}")]),
        (f"Look.[TOOL_CALLS]{LISTED}\n", "Look.\n", [("f", '{"a":  1}'), ("g", "{}")]),
        ('[TOOL_CALLS]f[ARGS]{"a":  1}[TOOL_CALLS]g.h-1[ARGS] {}', "", [("f", '{"a":  1}'), ("g.h-1", "{}")]),
        ("Look.[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{}", "Look.", [("f", "{}")]),
        ("[TOOL_CALLS]oops[TOOL_CALLS]f[ARGS]{}", "[TOOL_CALLS]oops", [("f", "{}")]),
    ],
)
def test_mistral_calls_in_a_list_and_by_their_names(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert read("mistral", text) == (content, calls)


@pytest.mark.parametrize(
    "text",
    [
        "[TOOL_CALLS]",
        "[TOOL_CALLS] []",
        "[TOOL_CALLS] [{}]",
        '[TOOL_CALLS] [{"name": "f", "arguments": {}}',
        '[TOOL_CALLS] [{"name": "f", "arguments": {}} {"name": "f", "arguments": {}}]',
        '[TOOL_CALLS] [{"name": "f", "arguments": "{}"}]',
        "[TOOL_CALLS]f{}",
        "[TOOL_CALLS]f[ARGS]",
        "[TOOL_CALLS]f[ARGS][]",
        "[TOOL_CALLS]f[ARGS]{oops}",
        "[TOOL_CALLS][ARGS]{}",
        '[TOOL_CALLS]f[ARGS]{"a": ' + "[" * 5000 + "]" * 5000 + "}",
    ],
)
def test_malformed_calls_of_mistral_stay_text(text: str) -> None:
    assert read("mistral", text) == (text, [])


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("1", 1), ("-1.5e3", -1500.0), ("+1", 1), (".5", 0.5), ("1.", 1.0), ("01", 1), ("True", True), ("false", False),
        ("None", None), ("null", None), ("'a'", "a"), ('"a"', "a"), ('"it\'s"', "it's"), ("'it\\'s'", "it's"),
        ("'a\nb'", "a\nb"), (r"'a\nb'", "a\nb"), (r"'\d\x41\u00e9\101\q'", r"\dAéA\q"), ("'a\\\nb'", "ab"), ("''", ""),
        ('"""a"b"""', 'a"b'), ("[]", []), ("{}", {}), ("[1, 'a', [None,],]", [1, "a", [None]]), (r"'\x4'", r"\x4"),
        ("{'a': {\"b\": 2}, 'c': [],}", {"a": {"b": 2}, "c": []}), (" \n1 ", 1), ("'é🎉'", "é🎉"),
        (r"'\U0010ffff\U00110000'", "\U0010ffff\\U00110000"), ("+1" + 400 * "0", 10**400),
    ],
)  # fmt: skip
def test_python_calls_have_the_values_of_python_literals(written: str, meant: Any) -> None:
    content, ((name, arguments),) = read("pythonic", f"[f(a={written}, b=2)]")
    assert (content, name, json.loads(arguments)) == ("", "f", {"a": meant, "b": 2})


@given(arguments=st.dictionaries(st.from_regex(r"[a-z_]\w{0,5}", fullmatch=True), values, max_size=3))
def test_values_written_by_python_are_read_back(arguments: dict[str, Any]) -> None:
    """Any value as Python's own `repr` writes it."""
    written = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    for form, text in (
        ("pythonic", f"[f({written}), g()]"),
        ("lfm2", f"<|tool_call_start|>[f({written}), g()]<|tool_call_end|>"),
    ):
        content, calls = read(form, text)
        assert (content, [name for name, _ in calls], calls[1][1]) == ("", ["f", "g"], "{}")
        assert json.loads(calls[0][1]) == arguments


def test_pythonic_calls_are_all_of_the_text() -> None:
    assert read("pythonic", ' [f(a=1), g.h(b="x",)]\n') == ("", [("f", '{"a": 1}'), ("g.h", '{"b": "x"}')])
    assert read("pythonic", "<|python_start|>[f()]<|python_end|>") == ("", [("f", "{}")])
    for text in ("So: [f()]", "[f()] now", "[f()][g()]", "<|python_start|>[f()", "[link](http://a.b)", "[1] says"):
        assert read("pythonic", text) == (text, [])
    assert read("lfm2", "<|tool_call_start|>[f()]<|tool_call_end|>Looking.") == ("Looking.", [("f", "{}")])


@pytest.mark.parametrize(
    "call",
    [
        "", "f", "f(", "f(1)", "f(a)", "f(a=)", "f(a==1)", "f(a=1 b=2)", "f(a=1, a=2)", "f(**a)", "f(a=b)", "f(a=g())",
        "f(a=(1, 2))", "f(a={1})", "f(a={1: 2})", "f(a=b'x')", "f(a=f'x')", "f(a='x)", "f(a=1e999 + 1)", "f(a=+1e999)",
        "f(a=1j)",
        "f(a=1--1)", "f(a=Truely)", "f(,)", "1()", "f()()", "f(a=[,])", "f(a=" + "[1" * 5000 + "]" * 5000 + ")",
        "f(a=+" + "9" * 5000 + ")", "f(a='" + "\\",
    ],
)  # fmt: skip
def test_malformed_python_stays_text(call: str) -> None:
    for form, text in (("pythonic", f"[{call}]"), ("lfm2", f"<|tool_call_start|>[{call}]<|tool_call_end|>")):
        assert read(form, text) == (text, [])


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


def test_texts_of_many_lines_are_kept_exactly() -> None:
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


def test_types_may_have_other_forms() -> None:
    integer = {"anyOf": [{"type": "integer"}, {"type": "null"}]}
    text = {"oneOf": [{"type": "integer"}, {"$ref": "#/x"}]}
    tool = {"name": "f", "parameters": {"properties": {"a": integer, "b": text, "c": True, "d": {"type": 3}}}}
    assert qwen_xml(xml("f", a="1", b="1", c="1", d="1"), [tool])[1] == [
        ("f", '{"a": 1, "b": "1", "c": "1", "d": "1"}')
    ]
    for odd in ({"name": "f", "parameters": 3}, {"name": "f", "parameters": {"properties": []}}, {"function": None}):
        assert qwen_xml(xml("f", a="1"), [odd])[1] == [("f", '{"a": "1"}')]


@pytest.mark.parametrize("written", ["NaN", "[" * 5000, "9" * 5000, "{", '"'])
def test_a_parameter_that_is_not_json_is_a_text(written: str) -> None:
    (call,) = qwen_xml(xml("weather", days=written), [WEATHER])[1]
    assert json.loads(call[1]) == {"days": written}


def test_a_parameter_with_half_a_character_can_be_sent() -> None:
    (call,) = qwen_xml(xml("weather", days='"\\ud800"'), [WEATHER])[1]
    assert call[1].encode() and json.loads(call[1]) == {"days": "\ud800"}


def test_a_block_of_parameters_ends_at_its_first_end() -> None:
    unclosed = "<tool_call>\n<function=f>\n<parameter=a>\n1\n</function>\n</tool_call>\n"
    assert qwen_xml(unclosed + xml("g", b="2")) == (unclosed.removesuffix("\n"), [("g", '{"b": "2"}')])


@given(parameters=st.dictionaries(st.from_regex(r"[^>\n<]+", fullmatch=True), texts, max_size=3))
def test_any_parameters_are_read_back(parameters: dict[str, str]) -> None:
    (call,) = qwen_xml(xml("f", **parameters))[1]
    assert json.loads(call[1]) == parameters


def test_the_tool_format_is_detected_from_the_template() -> None:
    known = {name: form for name, source in published().items() if (form := detect_tool_format(source))}
    assert set(known.values()) | {"mistral", "pythonic"} == set(TOOL_PARSERS)
    assert {name for name, form in known.items() if form == "llama3"} == {"llama3_1", "llama3_2"}
    assert {name for name in known if name.startswith("lfm2")} == {n for n in published() if n.startswith("lfm2")}
    for name in ("qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_vl"):
        assert known[name] == "hermes"
    for name in ("qwen3_5_think", "qwen3_6", "qwen3_8", "nemotron_3_nano"):
        assert known[name] == "qwen_xml"
    for name in ("glm4moe", "gptoss", "gemma4", "phi3", "deepseekv3"):
        assert name not in known
    assert detect_tool_format(MISTRAL_LIST) == detect_tool_format(MISTRAL_ARGS) == "mistral"
    assert detect_tool_format(LLAMA4) == "pythonic"


def test_the_page_shows_every_form_as_it_is_read() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference/chat.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \|[^|]+\| (.*) \|$", page, flags=re.MULTILINE)
    assert [form for form, _ in rows] == list(TOOL_PARSERS)
    for form, cell in rows:
        examples = [example.replace("\\|", "|") for example in re.findall(r"`([^`]+)`", cell)]
        tag = "<|python_tag|>" if "<|python_tag|>" in examples else ""
        for example in examples:
            if example != tag:
                _, calls = read(form, tag + example, [A_NUMBER])
                assert calls == [("f", '{"a": 1}')], example


A_NUMBER = {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}}
