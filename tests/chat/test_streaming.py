"""Parsed piece by piece or at once, an answer is the same message; and no delta comes too early or too late."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.chat import ChatRenderer, ContentDelta, MessageDelta, ReasoningDelta, Tokenizer, ToolCallDelta
from etude.chat.streaming import TextStreamParser, TokenStreamParser
from etude.chat.tool_parsers import TOOL_MARKERS, TOOL_PARSERS
from etude.records import Message, SamplingParams, ToolCall
from tests.chat.conversations import WEATHER
from tests.chat.families import FAMILIES, FAMILY_ENDS
from tests.chat.made import byte_level, ends_of, published, save
from tests.chat.test_tool_parsers import scribbles

TEMPLATES = {
    **{name: published()[name] for name in ("qwen3", "qwen3_6", "llama3_1", "lfm2_2_5", "phi3")},
    **FAMILIES,
}
"""One example of each form; the form of Phi is not known here."""
TAGS = ["", "<think>", "</think>", "<think>\n", "\n</think>\n\n", "<thi", "hm\n"]
answers = st.builds(
    "".join, st.tuples(st.sampled_from(TAGS), st.just("") | scribbles, st.sampled_from(TAGS), scribbles)
)


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ChatRenderer]:
    made = {}
    for name, template in TEMPLATES.items():
        ends = FAMILY_ENDS.get(name) or ends_of(name)
        inner = byte_level(template, [*ends, *TOOL_MARKERS, "<think>", "</think>"])
        made[name] = ChatRenderer(Tokenizer.load(save(tmp_path_factory.mktemp(name), inner, template, ends)))
    return made


def message(pieces: list[MessageDelta]) -> Message:
    """Return the message that the deltas form."""
    calls = [piece for piece in pieces if isinstance(piece, ToolCallDelta)]
    assert [call.index for call in calls] == list(range(len(calls)))
    return Message(
        "assistant",
        "".join(piece.text for piece in pieces if isinstance(piece, ContentDelta)),
        reasoning="".join(piece.text for piece in pieces if isinstance(piece, ReasoningDelta)),
        tool_calls=tuple(call.call for call in calls),
    )


@pytest.mark.parametrize("form", [*TOOL_PARSERS, None])
@given(text=answers, opened=st.sampled_from([True, False, None]), reasons=st.booleans(), data=st.data())
def test_pieces_of_any_size_parse_as_the_whole(
    form: str | None, text: str, opened: bool | None, reasons: bool, data: st.DataObject
) -> None:
    def parser() -> TextStreamParser:
        return TextStreamParser(
            TOOL_PARSERS[form] if form else None,
            [WEATHER],
            supports_reasoning=reasons,
            reasoning_opened=opened,
            seed=b"asked",
        )

    whole, letters, bits = parser(), parser(), parser()
    at_once = whole.push(text)
    assert message(at_once + whole.finish()) == whole.message
    deltas = [piece for letter in text for piece in letters.push(letter)] + letters.finish()
    assert message(deltas) == letters.message == whole.message
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    deltas = [piece for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True) for piece in bits.push(text[a:b])]
    assert message(deltas + bits.finish()) == whole.message
    # A piece is never split further, and no piece is empty.
    for one, other in pairwise(at_once):
        assert type(one) is not type(other) or isinstance(one, ToolCallDelta)
    assert all(isinstance(piece, ToolCallDelta) or piece.text for piece in at_once + deltas)


@pytest.mark.parametrize("name", TEMPLATES)
@given(text=answers, ends=st.booleans(), opens=st.booleans(), stop=st.sampled_from([(), ("f",), ("1\n", "}")]))
def test_streamed_ids_parse_as_the_renderer_parses_them(
    name: str, text: str, ends: bool, opens: bool, stop: tuple[str, ...], chats: dict[str, ChatRenderer]
) -> None:
    chat = chats[name]
    prompt = chat.tokenizer.encode("?<think>\n" if opens else "?")
    ids = chat.tokenizer.encode(text + (next(iter(chat.tokenizer.eos_tokens)) if ends else ""))
    sampling = SamplingParams(stop=stop, stop_ids=(int(chat.tokenizer.encode("g")[0]),))
    parser = chat.stream_parser(prompt, [WEATHER], sampling)
    deltas = [piece for id in ids for piece in parser.push([id])] + parser.finish()
    assert message(deltas) == parser.message == chat.parse(ids, prompt, [WEATHER], sampling)


@given(ids=st.lists(st.integers(0, 400), max_size=40))
def test_garbage_streams_as_it_is_parsed(ids: list[int], chats: dict[str, ChatRenderer]) -> None:
    chat = chats["qwen3"]
    parser = chat.stream_parser(None)
    deltas = [piece for id in ids for piece in parser.push([id])] + parser.finish()
    assert message(deltas) == chat.parse(np.array(ids, np.int32))


def parse_letters(form: str | None, text: str, **how: Any) -> tuple[str, str]:
    """Return the reasoning and the content of a text parsed letter by letter."""
    parser = TextStreamParser(TOOL_PARSERS[form] if form else None, **how)
    parsed = message([piece for letter in text for piece in parser.push(letter)])
    return parsed.reasoning, str(parsed.content)


@pytest.mark.parametrize(
    ("form", "text", "content"),
    [
        (None, "a <tool_call>", "a <tool_call>"),
        ("hermes", "a <b", "a <b"),
        ("hermes", "a <", "a "),
        ("hermes", "a <tool_cal", "a "),
        ("hermes", "a <tool_can", "a <tool_can"),
        ("hermes", "a\n", "a"),
        ("hermes", "a\n\n", "a\n"),
        ("hermes", 'a\n<tool_call>{"name": "f"', "a"),
        ("hermes", 'a\n<tool_call>{"name": x', 'a\n<tool_call>{"name": x'),
        ("hermes", 'a\n<tool_call>{"name": "f"}', 'a\n<tool_call>{"name": "f"}'),
        ("hermes", 'a\n<tool_call>{"name": "f", "arguments": {"a": "\\u12', "a"),
        ("hermes", 'a\n<tool_call>{"name": "f", "arguments": {}}<', "a"),
        ("hermes", 'a\n<tool_call>{"name": "f", "arguments": {}}.', 'a\n<tool_call>{"name": "f", "arguments": {}}.'),
        ("hermes", " \n", ""),
        ("qwen_xml", "<tool_call>\n<function=f>\n<par", ""),
        ("qwen_xml", "<tool_call>\n<function=f>\n<parts", "<tool_call>\n<function=f>\n<parts"),
        ("llama3", '{"name": "f", "parameters": {}} ', ""),
        ("llama3", '{"name": "f", "parameters": {}} .', '{"name": "f", "parameters": {}} .'),
        ("llama3", "{a", "{a"),
        ("llama3", "<|python", ""),
        ("mistral", "a [TOOL", "a "),
        ("mistral", "a [TOOL_CALLS]f[ARGS]", "a "),
        ("mistral", "a [TOOL_CALLS]f{", "a [TOOL_CALLS]f{"),
        ("pythonic", "[f(a=1", ""),
        ("pythonic", "[f(1", "[f(1"),
        ("pythonic", "[1", "[1"),
        ("lfm2", "a <|tool_call_start|>[f()]<|tool_call_end|", "a "),
        ("lfm2", "a <|tool_call_start|>f", "a <|tool_call_start|>f"),
    ],
)
def test_content_is_held_back_while_it_may_be_a_call_and_no_longer(form: str | None, text: str, content: str) -> None:
    assert parse_letters(form, text) == ("", content)


@pytest.mark.parametrize(
    ("text", "opened", "parts"),
    [
        ("<thi", False, ("", "")),
        ("<the", False, ("", "<the")),
        ("<the", True, ("<the", "")),
        ("<think>\nhm\n\n", False, ("hm", "")),
        ("hm </thi", True, ("hm ", "")),
        ("hm</think>\n\n", True, ("hm", "")),
        ("hm</think>\n\na", True, ("hm", "a")),
    ],
)
def test_reasoning_is_streamed_without_delay(text: str, opened: bool, parts: tuple[str, str]) -> None:
    assert parse_letters("hermes", text, supports_reasoning=True, reasoning_opened=opened) == parts


def test_calls_are_emitted_whole_at_their_last_character() -> None:
    parser = TextStreamParser(TOOL_PARSERS["mistral"])
    text = 'Look.[TOOL_CALLS]f[ARGS]{"a": [1, {}]}[TOOL_CALLS]g[ARGS]{}'
    calls = [[piece for piece in parser.push(letter) if isinstance(piece, ToolCallDelta)] for letter in text]
    assert [(at, piece.call.name, piece.call.arguments) for at, new in enumerate(calls) for piece in new] == [
        (text.index("[TOOL_CALLS]g") - 1, "f", '{"a": [1, {}]}'),
        (len(text) - 1, "g", "{}"),
    ]


def test_calls_of_other_prompts_and_after_other_thoughts_have_other_ids(chats: dict[str, ChatRenderer]) -> None:
    chat = chats["qwen3"]
    block = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'

    def ids(text: str, prompt: str) -> list[str]:
        calls = chat.parse(chat.tokenizer.encode(text), chat.tokenizer.encode(prompt)).tool_calls
        return [call.id for call in calls]

    one, two = ids(block + block, "?"), ids(f"<think>hm</think>{block}", "?")
    assert len({*one, *two, *ids(block, "!")}) == 4 and ids(block, "?") == one[:1] == ids(block + " and", "?")
    assert all(len(id) == 9 and id.isalnum() and id.isascii() for id in one), "as the templates of Mistral want them"


def test_a_stop_token_is_no_text(chats: dict[str, ChatRenderer]) -> None:
    chat = chats["qwen3"]
    ids = chat.tokenizer.encode("one two STOP")

    def parsed_text(**how: object) -> str:
        return str(chat.parse(ids, chat.tokenizer.encode("?"), (), SamplingParams(**how)).content)  # type: ignore[arg-type]

    assert parsed_text() == "one two STOP"
    assert parsed_text(stop=(" STOP", "never")) == "one two"
    assert parsed_text(stop=("one",), min_tokens=len(ids) - 1) == "one two STOP", "it stood within the least tokens"
    assert parsed_text(stop_ids=(int(ids[-1]),)) == chat.tokenizer.decode(ids[:-1])


def test_a_parser_knows_the_prefill(chats: dict[str, ChatRenderer]) -> None:
    chat = chats["qwen3_6"]
    prompt = chat.render([Message("user", "Hi")]).ids
    parser = chat.stream_parser(prompt)
    assert isinstance(parser, TokenStreamParser)
    assert parser.push(chat.tokenizer.encode("hm")) == [ReasoningDelta("hm")]
    assert parser.push(chat.tokenizer.encode("\n</think>\n\nHello<|im_end|>")) == [ContentDelta("Hello")]
    assert parser.finish() == []
    assert parser.message == Message("assistant", "Hello", reasoning="hm")


WORDS = " ".join(f"word{index}" for index in range(2000))
CODE = json.dumps({"code": WORDS.replace(" ", "\n"), "lines": [1, 2]})


@pytest.mark.parametrize(
    ("form", "text"),
    [
        pytest.param("hermes", WORDS, id="words"),
        pytest.param("hermes", f"<think>{WORDS}</think>", id="thinking"),
        pytest.param("hermes", f'<tool_call>{{"name": "f", "arguments": {CODE}}}</tool_call>', id="hermes"),
        pytest.param(
            "qwen_xml", f"<tool_call><function=f><parameter=a>{WORDS}</parameter></function></tool_call>", id="qwen_xml"
        ),
        pytest.param("llama3", f'{{"name": "f", "parameters": {CODE}}}', id="llama3"),
        pytest.param("mistral", f"[TOOL_CALLS]f[ARGS]{CODE}", id="mistral"),
        pytest.param("pythonic", f'[f(code="{WORDS}")]', id="pythonic"),
    ],
)
def test_the_cost_of_parsing_grows_linearly_with_the_answer(form: str, text: str) -> None:
    bits = [text[at * len(text) // 4000 : (at + 1) * len(text) // 4000] for at in range(4000)]

    def seconds(count: int) -> float:
        parser = TextStreamParser(TOOL_PARSERS[form], supports_reasoning=True, reasoning_opened=False)
        start = time.thread_time()
        for bit in bits[:count]:
            parser.push(bit)
        parser.finish()
        return time.thread_time() - start

    whole, part = (min(seconds(count) for _ in range(3)) for count in (4000, 250))
    assert whole < 64 * part, "sixteen times the length: the square is 256"


def round_trip(chat: ChatRenderer, answer: Message) -> Message:
    """Parse the answer as the model would write it."""
    messages = [Message("user", "Hi")]
    ids = chat.encode_answer(messages, answer, [WEATHER])
    return chat.parse(ids, chat.render(messages, [WEATHER]).ids, [WEATHER])


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name != "phi3"])
@given(
    city=st.text(alphabet="aé🎉 ,:=()[]{}<>\n/", max_size=8),
    days=st.integers(),
    twice=st.booleans(),
    has_content=st.booleans(),
)
def test_calls_go_through_templates_and_come_back(
    name: str, city: str, days: int, twice: bool, has_content: bool, chats: dict[str, ChatRenderer]
) -> None:
    call = ToolCall("call00001", "weather", json.dumps({"city": city, "days": days}))
    single = name == "llama3_1"  # its template takes one call, in place of an answer
    calls = (call, ToolCall("call00002", "time", "{}")) if twice and not single else (call,)
    content = "Look." if has_content and name not in ("llama3_1", "llama4", "mistral_list") else ""
    read = round_trip(chats[name], Message("assistant", content, tool_calls=calls))
    assert str(read.content).strip() == content
    assert [(call.name, json.loads(call.arguments)) for call in read.tool_calls] == [
        (call.name, json.loads(call.arguments)) for call in calls
    ]
    again = Message("assistant", read.content, tool_calls=read.tool_calls)
    assert [call.arguments for call in round_trip(chats[name], again).tool_calls], "its ids are fine with the template"


def test_built_in_tools_of_llama_are_parsed_back(chats: dict[str, ChatRenderer]) -> None:
    chat = ChatRenderer(chats["llama3_1"].tokenizer, template_kwargs={"builtin_tools": ["brave_search"]})
    call = ToolCall("c", "brave_search", '{"query": "Zürich, (now)"}')
    ids = chat.encode_answer([Message("user", "Hi")], Message("assistant", "", tool_calls=(call,)), [WEATHER])
    assert chat.tokenizer.decode(ids, keep_special_tokens=True).startswith("<|python_tag|>brave_search.call(")
    (read,) = chat.parse(ids).tool_calls
    assert (read.name, json.loads(read.arguments)) == (call.name, json.loads(call.arguments))


def test_a_conversation_of_mistral_continues_with_the_ids_of_its_calls(
    chats: dict[str, ChatRenderer], tmp_path: Path
) -> None:
    chat = chats["mistral_args"]
    messages = [Message("user", "Hi")]
    prompt = chat.render(messages, [WEATHER]).ids
    ids = chat.tokenizer.encode('[TOOL_CALLS]weather[ARGS]{"city":  "Bern"}</s>')
    conversation = chat.start_conversation()
    answer = chat.parse(ids, prompt, [WEATHER])
    conversation.remember_answer(messages, [WEATHER], prompt, ids, answer)
    result = Message("tool", "rain", tool_call_id=answer.tool_calls[0].id)
    shown = conversation.render([*messages, answer, result], [WEATHER]).ids
    assert shown[: len(prompt) + len(ids)].tolist() == [*prompt.tolist(), *ids.tolist()]
    assert chat.tokenizer.decode(shown, keep_special_tokens=True).endswith(
        '"Bern"}</s>[TOOL_RESULTS]rain[/TOOL_RESULTS]'
    )
