"""The prompts of a rollout of several turns are exact: answers keep their ids, and only new text is rendered."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.chat import ChatRenderer, Tokenizer, Transcript
from etude.chat.transcript import check_observation
from etude.data.samples import build_samples
from etude.errors import ChatError
from etude.records import Completion, Message, ToolCall, Turn
from tests.chat.made import CHATML, byte_level, save, sentencepiece
from tests.learn.games import TEMPLATE

WEATHER = {"type": "function", "function": {"name": "weather", "description": "…", "parameters": {}}}


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    """A chat of ChatML, with a vocabulary in which texts have several spellings."""
    return ChatRenderer(Tokenizer.load(save(tmp_path_factory.mktemp("c"), byte_level(CHATML), CHATML, ["<|im_end|>"])))


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    """A chat without a template, whose tokenizer begins every text with a space."""
    return ChatRenderer(Tokenizer.load(save(tmp_path_factory.mktemp("p"), sentencepiece(), None, ["</s>"])))


def completion(chat: ChatRenderer, ids: list[int], end: bool) -> Completion:
    """Return a completion, closed by its end or cut off."""
    written = np.array([*ids, *([chat.tokenizer.eos_ids[0]] if end else [])], np.int32)
    text = chat.tokenizer.decode(written)
    return Completion(
        written, np.zeros(len(written), np.float32), np.zeros(len(written), np.int32), "stop" if end else "length", text
    )


texts = st.text(st.sampled_from("ab é\n1"), max_size=6)
plays = st.lists(st.tuples(st.lists(st.integers(3, 300), max_size=6), st.booleans(), texts), min_size=1, max_size=4)


def played(
    chat: ChatRenderer, first: str | tuple[Message, ...], script: list[tuple[list[int], bool, str]]
) -> list[Turn]:
    """Turns in which the model writes ids as a script has them."""
    transcript, turns = Transcript(chat, first), []
    for index, (ids, end, shown) in enumerate(script):
        prompt = transcript.prompt
        sampled = completion(chat, ids, end)
        answer = transcript.add_answer(prompt, sampled)
        assert answer.role == "assistant"
        turns.append(Turn(prompt.ids, sampled, index))
        transcript.add_observation(shown)
    return turns


def goes_on(turns: list[Turn]) -> None:
    """Every prompt begins with all that came before it, so that the rollout is one row."""
    for before, after in pairwise(turns):
        whole = np.concatenate([before.prompt, before.completion.ids])
        assert np.array_equal(after.prompt[: len(whole)], whole)
    (row,) = build_samples(turns, 0)
    assert int(row.action.sum()) == sum(len(turn.completion.ids) for turn in turns)


@given(texts, plays)
def test_a_conversation_keeps_the_written_ids(
    chat: ChatRenderer, first: str, script: list[tuple[list[int], bool, str]]
) -> None:
    turns = played(chat, (Message("user", first),), script)
    goes_on(turns)
    end = chat.tokenizer.eos_ids[0]
    for (_, ended, shown), before, after in zip(script, turns, turns[1:], strict=False):
        new = after.prompt[len(before.prompt) + len(before.completion.ids) :]
        text = chat.tokenizer.decode(new, keep_special_tokens=True)
        close = "\n" if ended else "<|im_end|>\n"
        assert text == f"{close}<|im_start|>user\n{shown}<|im_end|>\n<|im_start|>assistant\n"
        assert end in after.prompt


@given(st.text(st.sampled_from("abt "), min_size=1, max_size=5), plays)
def test_text_is_continued_unchanged(chat: ChatRenderer, first: str, script: list[tuple[list[int], bool, str]]) -> None:
    turns = played(chat, first, script)
    goes_on(turns)
    assert chat.tokenizer.decode(turns[0].prompt) == first
    for (_, _, shown), before, after in zip(script, turns, turns[1:], strict=False):
        assert chat.tokenizer.decode(after.prompt[len(before.prompt) + len(before.completion.ids) :]) == shown


def test_text_after_an_end_gets_no_space_of_its_own(pieces: ChatRenderer) -> None:
    first, second = played(pieces, "a", [([280], True, "b"), ([280], True, "")])
    new = second.prompt[len(first.prompt) + 2 :]
    assert [pieces.tokenizer.id_to_token(int(id)) for id in new][-1] == "b"
    assert np.array_equal(pieces.tokenizer.encode("</s>b")[-len(new) :], new)
    goes_on([first, second])


def test_a_call_and_its_result_continue_the_conversation(tmp_path: Path) -> None:
    chat = ChatRenderer(Tokenizer.load(save(tmp_path / "t", byte_level(TEMPLATE, ["<end>"]), TEMPLATE, ["<end>"])))
    transcript = Transcript(chat, (Message("user", "?"),), [WEATHER])
    prompt = transcript.prompt
    written = chat.tokenizer.encode('<tool_call>\n{"name": "weather", "arguments": {"a":  1}}\n</tool_call>')
    answer = transcript.add_answer(prompt, completion(chat, written.tolist(), end=True))
    assert answer.content == "" and [(call.name, call.arguments) for call in answer.tool_calls] == [
        ("weather", '{"a":  1}')
    ]
    transcript.add_observation((Message("tool", "rain", tool_call_id=answer.tool_calls[0].id),))
    ids = transcript.prompt.ids
    assert np.array_equal(ids[: len(prompt.ids) + len(written)], np.concatenate([prompt.ids, written]))
    assert (
        chat.tokenizer.decode(ids[len(prompt.ids) + len(written) :], keep_special_tokens=True)
        == "<end><tool>rain<end><model>"
    )


def test_content_that_does_not_fit_is_refused(chat: ChatRenderer) -> None:
    with pytest.raises(ChatError, match="A rollout that began with text got messages"):
        Transcript(chat, "a").add_observation((Message("user", "b"),))
    with pytest.raises(ChatError, match="A rollout that begins with text has tools"):
        Transcript(chat, "a", [WEATHER])


def test_observations_are_text_or_messages() -> None:
    call = ToolCall("1", "f", "{}")
    assert check_observation("a") == "a" and check_observation([]) == ()
    assert check_observation([{"role": "user", "content": "a"}, Message("assistant", "", tool_calls=(call,))]) == (
        Message("user", "a"),
        Message("assistant", "", tool_calls=(call,)),
    )
    for wrong, described in (
        (None, "a value of type NoneType"),
        ({"role": "user", "content": "a"}, "a value of type dict"),
        (["a"], "a list of texts alone"),
        (["a", 3], "a list whose entry 1 is of type int"),
        ([Message("user", "a"), "b"], "a list of messages and of texts or images beside them"),
    ):
        with pytest.raises(ChatError, match=f"{described} was given"):
            check_observation(wrong)
    with pytest.raises(ChatError, match="unpaired surrogate"):
        check_observation([{"role": "user", "content": "\ud800"}])
    with pytest.raises(ChatError, match="unpaired surrogate"):
        check_observation("\ud800")
