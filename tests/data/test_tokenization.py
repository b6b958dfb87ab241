"""The trained tokens of a conversation: its answers, each after the ids that the model would have been served."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from etude.chat import ChatRenderer, message_from_dict
from etude.chat.conversation import History
from etude.data.tokenization import tokenize_answer, tokenize_completion, tokenize_messages, tokenize_text, tools_of
from etude.errors import ChatError, DataError
from tests.chat.conversations import CONVERSATIONS, WEATHER, by
from tests.data.chats import chat_of, shown

TALK = [by("system", "Be brief."), by("user", "Hi"), by("assistant", "Hello."), by("user", "2?"), by("assistant", "4")]
OPEN, CLOSE = "<|im_start|>", "<|im_end|>"


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    """A ChatML renderer."""
    return chat_of(tmp_path_factory.mktemp("chatml"))


def test_only_answers_and_their_ends_are_trained(chat: ChatRenderer) -> None:
    (text,) = shown(chat, tokenize_messages(chat, TALK))
    assert text == (
        f"{OPEN}system\nBe brief.{CLOSE}\n{OPEN}user\nHi{CLOSE}\n{OPEN}assistant\n[Hello.{CLOSE}]\n"
        f"{OPEN}user\n2?{CLOSE}\n{OPEN}assistant\n[4{CLOSE}]"
    )


def test_the_ids_are_those_of_the_template(chat: ChatRenderer) -> None:
    (row,) = tokenize_messages(chat, TALK)
    whole = chat.tokenizer.encode(chat.render_text([message_from_dict(form) for form in [*TALK, by("user", "?")]]))
    assert np.array_equal(row.ids, whole[: len(row.ids)]) and row.turn[row.action].tolist()[0] == 0


def test_only_the_last_answer_is_trained_with_that_option(chat: ChatRenderer) -> None:
    (text,) = shown(chat, tokenize_messages(chat, TALK, last_only=True))
    assert "Hello.<|im_end|>\n" in text and text.endswith(f"[4{CLOSE}]") and text.count("[") == 1


def test_answers_after_the_first_counted_message_are_trained(chat: ChatRenderer) -> None:
    (text,) = shown(chat, tokenize_messages(chat, TALK, first=3))
    assert text.count("[") == 1 and "[4" in text


def test_an_answer_of_weight_0_is_context(chat: ChatRenderer) -> None:
    forms = [*TALK[:2], {**TALK[2], "weight": 0}, TALK[3], {**TALK[4], "weight": 1}]
    (text,) = shown(chat, tokenize_messages(chat, forms))
    assert text.count("[") == 1 and "[4" in text


def test_an_empty_answer_is_not_trained(chat: ChatRenderer) -> None:
    assert tokenize_messages(chat, [by("user", "Hi"), by("assistant", "")]) == ()
    assert tokenize_messages(chat, [by("user", "Hi")]) == ()
    assert tokenize_messages(chat, [by("assistant", "Hi")]) == (), "nothing comes before it"
    assert tokenize_completion(chat, "2+2=", "") == () == tokenize_text(chat, "")


@pytest.mark.parametrize(("history", "rows"), [("served", 1), ("template", 2)])
def test_earlier_thinking_is_kept_or_dropped_as_for_the_sampler(history: History, rows: int, tmp_path: Path) -> None:
    chat = chat_of(tmp_path, "qwen3", history)
    texts = shown(chat, tokenize_messages(chat, CONVERSATIONS["thought"][0]))
    assert len(texts) == rows and sum(text.count("[") for text in texts) == 2
    assert "[<think>\nTwo and two\n\nis four.\n</think>\n\n4<|im_end|>]" in texts[0]
    assert texts[-1].endswith("[<think>\nHm.\n</think>\n\nYes.<|im_end|>]")
    assert ("Two and two" in texts[-1]) is (history == "served")


def test_tool_calls_are_trained_and_their_results_are_not(tmp_path: Path) -> None:
    chat = chat_of(tmp_path, "qwen2_5")
    forms, tools = CONVERSATIONS["answer"]
    (text,) = shown(chat, tokenize_messages(chat, forms, tools))
    assert text.count("[<tool_call>") == 1 and "[Rain.<|im_end|>]" in text and "\nrain\n" in text


def test_a_completion_continues_its_prompt_and_ends(chat: ChatRenderer) -> None:
    assert shown(chat, tokenize_completion(chat, "What is 2 + 2?", " It is 4.")) == [
        f"What is 2 + 2?[ It is 4.{CLOSE}]"
    ]
    assert shown(chat, tokenize_completion(chat, "a", f"b{CLOSE}")) == [f"a[b{CLOSE}]"], (
        "an end that is there is the end"
    )


def test_a_text_is_trained_from_its_second_token_on(chat: ChatRenderer) -> None:
    (row,) = tokenize_text(chat, "What is 2 + 2?")
    assert row.action.tolist() == [False] + [True] * (len(row.ids) - 1)
    assert row.ids[-1] == chat.tokenizer.eos_ids[0]


def test_an_answer_may_have_the_form_of_text_or_of_a_message(chat: ChatRenderer) -> None:
    prompt, answer = [by("user", "Hi")], [by("assistant", "Hello.")]
    one, other = (shown(chat, tokenize_answer(chat, prompt, form, (), "row 0")) for form in ("Hello.", answer))
    assert one == other == [f"{OPEN}user\nHi{CLOSE}\n{OPEN}assistant\n[Hello.{CLOSE}]"]
    with pytest.raises(DataError, match="row 0 has a prompt of text and an answer of messages"):
        tokenize_answer(chat, "Hi", answer, (), "row 0")
    with pytest.raises(ChatError, match="row 0: Message 0 of the conversation has the role 'robot'"):
        tokenize_answer(chat, [by("robot", "beep")], "?", (), "row 0")


def test_answers_in_the_prompt_are_context(chat: ChatRenderer) -> None:
    (text,) = shown(chat, tokenize_answer(chat, TALK[:4], "4", (), "row 0"))
    assert text.count("[") == 1 and text.endswith(f"[4{CLOSE}]")


def test_tools_are_a_list_or_its_json() -> None:
    nulls = {"type": "function", "function": {"name": "f", "parameters": None}}
    assert tools_of(None, "row 0") == tools_of("", "row 0") == []
    assert tools_of('[{"type": "function"}]', "row 0") == [{"type": "function"}]
    assert tools_of([nulls, WEATHER], "row 0") == [{"type": "function", "function": {"name": "f"}}, WEATHER]
    for value, message in (
        ("{", "not JSON"),
        ({"a": 1}, "a value of type dict for its tools"),
        ([1], "a value of type list for its tools"),
    ):
        with pytest.raises(DataError, match=f"row 0 has .*{message}"):
            tools_of(value, "row 0")
