"""A stream gives out what the whole answer says, however it is cut, and nothing that is taken back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.agents.proxy.reading import Reading
from etude.chat.messages import text_of
from etude.records import Message
from tests.agents.proxy.world import chat_of
from tests.chat.conversations import WEATHER

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
WORDS = [
    "<think>",
    "</think>",
    "\n",
    " ",
    "a",
    "é🎉",
    "<",
    "<to",
    "</th",
    CALL,
    "<tool_call>",
    "</tool_call>",
    "STOP",
    "ST",
]
texts = st.lists(st.sampled_from(WORDS), max_size=12).map("".join)


def read(
    text: str, *, opened: bool, calls: bool, stops: tuple[str, ...], plain: bool = False
) -> tuple[Message, Message, str, str]:
    """The answer as it was streamed, as it is whole, and the reasoning and the content as they were given out."""
    chat = chat_of("qwen3")
    prompt = chat.tokenizer.encode("<|im_start|>assistant\n" + ("<think>\n" if opened else ""))
    ids = np.concatenate([np.zeros(0, np.int32), *(chat.tokenizer.encode(character) for character in text)])
    reading = Reading(chat, prompt, stops=stops, calls=calls, plain=plain)
    cut = next((n for n in range(len(ids) + 1) if chat.read(ids[:n], stops)[1]), len(ids))
    pieces = [reading.push([id]) for id in ids[: max(cut - 1, 0)]]
    shown, _ = chat.read(ids[:cut], stops)
    answer = chat.parse(ids[:cut], prompt, [WEATHER], stops=stops, calls=calls)
    if plain:
        answer = Message("assistant", shown)
    streamed = reading.whole(answer, shown)
    pieces.append(reading.rest)
    return streamed, answer, "".join(each.reasoning for each in pieces), "".join(each.content for each in pieces)


@settings(max_examples=300, deadline=None)
@given(texts, st.booleans(), st.booleans(), st.sampled_from([(), ("STOP",)]))
def test_pieces_are_the_answer(text: str, opened: bool, calls: bool, stops: tuple[str, ...]) -> None:
    streamed, answer, reasoning, content = read(text, opened=opened, calls=calls, stops=stops)
    assert (streamed.reasoning, text_of(streamed.content)) == (reasoning, content)
    begun = text.lstrip().startswith("<think>") or opened
    if begun or "</think>" not in text:
        assert streamed == answer
    for stop in stops:
        assert stop not in content and stop not in reasoning


@settings(max_examples=50, deadline=None)
@given(texts)
def test_a_plain_text_is_a_text(text: str) -> None:
    _, answer, reasoning, content = read(text, opened=False, calls=True, stops=(), plain=True)
    assert (reasoning, content) == ("", answer.content)


@pytest.mark.parametrize("text", ["<think>\nHm, well\n</think>\n\nIt is so.\n" + CALL, "It is so, I think.\n" + CALL])
def test_pieces_come_early(text: str) -> None:
    """All but what may still become something else is given out at once."""
    chat = chat_of("qwen3")
    reading = Reading(chat, chat.tokenizer.encode("?"), calls=True)
    given_out = ""
    for at, character in enumerate(text[: text.index("<tool_call>")]):
        piece = reading.push(chat.tokenizer.encode(character))
        given_out += piece.reasoning + piece.content
        plain = text[: at + 1].replace("<think>\n", "").replace("\n</think>\n\n", "")
        assert len(plain) - len(given_out) <= len("\n</think>\n\n")
    assert given_out.endswith("so." if "think>" in text else "think.")
