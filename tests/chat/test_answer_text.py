"""The text that a model has to write for a given answer, by the template of each model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, reject, settings

from etude.chat import ChatRenderer, Tokenizer, message_from_dict
from etude.chat.answer_text import strip_turn_end
from etude.errors import ChatError
from etude.records import Message
from tests.chat.conversations import CONVERSATIONS, Form, by, exchanges
from tests.chat.made import CHATML, beginning, byte_level, ends_of, published, save, sentencepiece

NAMES = [name for name in sorted(published()) if not name.endswith("_training")]
PARSED = [n for n in NAMES if not n.startswith(("gptoss", "gemma4", "diffusion_gemma", "muse_glimmer", "cohere2"))]
"""The templates whose answers are plain text, or thinking as Qwen and DeepSeek write it."""
HELLO = [by("user", "Hi"), by("assistant", "Hello.")]
THOUGHT = CONVERSATIONS["thought"][0][:2]


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ChatRenderer]:
    """The published templates, each with a tokenizer that has its tokens."""
    made = {}
    for name, template in published().items():
        ends = ends_of(name)
        inner = byte_level(template, ["<|endoftext|>", *ends])
        made[name] = ChatRenderer(Tokenizer.load(save(tmp_path_factory.mktemp(name), inner, template, list(ends))))
    return made


def answer_text_of(chat: ChatRenderer, forms: list[Form], tools: list[Form] | None = None) -> str:
    """Return the text that the model has to write to give the last of these messages."""
    messages = [message_from_dict(form) for form in forms]
    ids = chat.encode_answer(messages[:-1], messages[-1], tools or [])
    assert int(ids[-1]) in chat.tokenizer.eos_ids, "an answer ends"
    assert not np.isin(ids[:-1], chat.tokenizer.eos_ids).any(), "and ends once"
    return chat.tokenizer.decode(ids[:-1], keep_special_tokens=True)


@pytest.mark.parametrize("name", NAMES)
def test_every_published_template_gives_the_answer_text(name: str, chats: dict[str, ChatRenderer]) -> None:
    chat = chats[name]
    answer = answer_text_of(chat, HELLO)
    assert answer.strip().endswith("Hello.") or name == "cohere2", answer
    prompt = chat.render_text([message_from_dict(HELLO[0])])
    shown = chat._select_template(()).render([message_from_dict(form) for form in HELLO], add_generation_prompt=False)
    if shown.startswith(prompt):
        assert shown.startswith(prompt + answer), "what is learned is what the template shows after the question"


@pytest.mark.parametrize("name", PARSED)
def test_answer_text_is_parsed_back_to_the_answer(name: str, chats: dict[str, ChatRenderer]) -> None:
    """The answer text parses back to the answer, also to its reasoning if the template shows it."""
    chat, messages = chats[name], [message_from_dict(form) for form in THOUGHT]
    ids = chat.encode_answer(messages[:1], messages[1])
    parsed = chat.parse(ids, chat.render(messages[:1]).ids)
    assert str(parsed.content).strip() == "4"
    if parsed.reasoning:
        assert parsed.reasoning == messages[1].reasoning and chat.shows_reasoning()


@pytest.mark.parametrize("name", ["qwen3", "qwen2_5", "llama3_1", "glm4moe", "lfm2_2_5"])
@given(exchange=exchanges())
@settings(max_examples=10)
def test_an_answer_continues_its_question_as_the_template_renders(
    name: str, exchange: tuple[list[Form], list[Form]], chats: dict[str, ChatRenderer]
) -> None:
    chat, (forms, tools) = chats[name], exchange
    messages = [message_from_dict(form) for form in forms]
    # Text that looks like a template's own markers is read as such, by the template itself.
    assume(not any("<" in str(message.content) + message.reasoning for message in messages))
    try:
        ids = chat.encode_answer(messages[:-1], messages[-1], tools)
        whole = chat._select_template(tools).render(messages, tools, add_generation_prompt=False)
    except ChatError:
        reject()
    answer = chat.tokenizer.decode(ids[:-1], keep_special_tokens=True)
    assert whole.startswith(chat.render_text(messages[:-1], tools) + answer)


@pytest.mark.parametrize(
    ("name", "forms", "wanted"),
    [
        ("qwen2_5", HELLO, "Hello."),
        ("qwen3", HELLO, "<think>\n\n</think>\n\nHello."),
        ("qwen3", THOUGHT, "<think>\nTwo and two\n\nis four.\n</think>\n\n4"),
        ("qwen3_5_think", HELLO, "\n</think>\n\nHello."),
        ("qwen3_5_nothink", THOUGHT, "4"),  # the template has closed the thinking already
        ("deepseek_r1_distill", HELLO, "\n</think>\n\nHello."),
        ("deepseek_r1_distill", THOUGHT, "Two and two\n\nis four.\n</think>\n\n4"),
        ("deepseek_r1_distill", CONVERSATIONS["thought in text"][0][:2], "hm\n</think>\n\n4"),
        ("nemotron_3_super", HELLO, "\n</think>\nHello."),
        ("phi3", HELLO, "Hello."),
    ],
)
def test_thinking_is_written_at_the_place_of_the_template(
    name: str, forms: list[Form], wanted: str, chats: dict[str, ChatRenderer]
) -> None:
    assert answer_text_of(chats[name], forms) == wanted


def test_the_end_that_shows_only_before_the_next_speaker_is_found(chats: dict[str, ChatRenderer]) -> None:
    chat = chats["glm4moe"]
    forms, tools = CONVERSATIONS["call"]
    for conversation, offered, end in ((HELLO, [], "<|user|>"), (forms, tools, "<|observation|>")):
        messages = [message_from_dict(form) for form in conversation]
        assert chat.encode_answer(messages[:-1], messages[-1], offered)[-1] == chat.tokenizer.token_to_id(end)


def test_an_end_token_in_the_text_is_not_the_end() -> None:
    answer = Message("assistant", "say </s> twice")
    assert strip_turn_end("say </s> twice</s>\n", answer, ["</s>"]) == ("say </s> twice", "</s>")
    assert strip_turn_end("no end", Message("assistant", "no end"), ["</s>"]) == ("no end", None)
    assert strip_turn_end("e<|end|><|end|>", Message("assistant", "e"), ["<|end|>"]) == ("e", "<|end|>")


def test_a_template_that_hides_tool_calls_is_refused(chats: dict[str, ChatRenderer]) -> None:
    forms, tools = CONVERSATIONS["call"]
    with pytest.raises(ChatError, match=r"leaves out a tool call of an answer \(weather\)"):
        answer_text_of(chats["llama3"], forms, tools)


def test_a_template_whose_prompt_is_no_prefix_is_refused(tmp_path: Path) -> None:
    odd = CHATML.replace("<|im_start|>assistant\\n' }}{% endif %}", "Now you:' }}{% endif %}")
    chat = ChatRenderer(Tokenizer.load(save(tmp_path, byte_level(odd), odd, ["<|im_end|>"])))
    with pytest.raises(ChatError, match="shows an answer differently from the prompt that asks for it"):
        answer_text_of(chat, HELLO)


def test_a_template_that_shows_no_reasoning_is_recognised(chats: dict[str, ChatRenderer]) -> None:
    shown = {name for name in NAMES if chats[name].shows_reasoning()}
    assert {"qwen3", "deepseek_r1_distill", "gptoss"} <= shown and not {"qwen2_5", "llama3_1", "phi3"} & shown


def test_a_continued_text_has_the_tokens_of_both_texts_together(tmp_path: Path) -> None:
    plain = Tokenizer.load(save(tmp_path / "bytes", beginning(byte_level()), None, ["</s>"], eos_token="<|im_end|>"))
    pieces = Tokenizer.load(save(tmp_path / "pieces", sentencepiece(), None, ["</s>"]))
    for tokenizer, before, after in (
        (plain, "What is 2 + 2?", " The answer"),
        (pieces, "the", " th in"),
        (plain, "", "a"),
    ):
        ids = tokenizer.encode_after_text(before, after, add_special_tokens=True)
        whole = tokenizer.encode(before + after, add_special_tokens=True)
        assert tokenizer.encode(before, add_special_tokens=True).tolist() + ids.tolist() == whole.tolist()
    assert len(plain.encode("answ")) and plain.decode(plain.encode_after_text("answ", "er")) == "er"
