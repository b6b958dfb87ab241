from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from etude.chat import ChatConfig, ChatRenderer, Tokenizer
from etude.errors import ChatError, ConfigError
from etude.records import Message, ToolCall
from tests.chat.conversations import WEATHER
from tests.chat.made import CHATML, beginning, byte_level, ends_of, published, save

HI = [Message("user", "Hi")]
MALFORMED = "<tool_call>\n{weather}\n</tool_call>"


def chat_of(directory: Path, template: str | None, name: str = "") -> ChatRenderer:
    ends = ends_of(name)
    inner = byte_level(template, [*ends, "<think>", "</think>", "<tool_call>", "</tool_call>", "<|python_tag|>"])
    return ChatRenderer(Tokenizer.load(save(directory, inner, template, ends)))


def test_messages_become_ids_by_the_template(tmp_path: Path) -> None:
    chat = chat_of(tmp_path, CHATML)
    ids = chat.render(HI).ids
    assert (
        chat.tokenizer.decode(ids, keep_special_tokens=True)
        == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert np.array_equal(chat.prompt_ids(HI), ids)
    assert np.array_equal(chat.prompt_ids([{"role": "user", "content": "Hi"}]), ids)


def test_a_plain_prompt_is_encoded_as_it_is(tmp_path: Path) -> None:
    save(tmp_path, beginning(byte_level()), None, ["<|im_end|>"])
    chat = ChatRenderer(Tokenizer.load(tmp_path))
    assert chat.prompt_ids("2 + 2 =").tolist() == [chat.tokenizer.bos_id, *chat.tokenizer.encode("2 + 2 =")]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("qwen2_5", "4<|im_end|>", Message("assistant", "4")),
        ("qwen2_5", "<think>hm</think>4<|im_end|>", Message("assistant", "<think>hm</think>4")),
        ("qwen3", "<think>\nhm\n</think>\n\n4<|im_end|>", Message("assistant", "4", reasoning="hm")),
        ("qwen3", "<think>\nhm and", Message("assistant", "", reasoning="hm and")),
        ("llama3_1", " 4 <|eot_id|>", Message("assistant", " 4 ")),
        ("qwen3", f"{MALFORMED}<|im_end|>", Message("assistant", MALFORMED)),
    ],
)
def test_ids_become_a_message(tmp_path: Path, name: str, text: str, message: Message) -> None:
    chat = chat_of(tmp_path, published()[name], name)
    assert chat.parse(chat.tokenizer.encode(text)) == message


@pytest.mark.parametrize(
    ("name", "text", "content", "reasoning"),
    [
        (
            "qwen2_5",
            'Look.\n<tool_call>\n{"name": "weather", "arguments": {"a":1}}\n</tool_call><|im_end|>',
            "Look.",
            "",
        ),
        ("qwen3", '<think>\nhm\n</think>\n\n<tool_call>{"name":"weather","arguments":{"a":1}}</tool_call>', "", "hm"),
        ("llama3_1", '<|python_tag|>{"name": "weather", "parameters": {"a":1}}<|eom_id|>', "", ""),
    ],
)
def test_calls_are_read_with_ids(tmp_path: Path, name: str, text: str, content: str, reasoning: str) -> None:
    chat = chat_of(tmp_path, published()[name], name)
    ids = chat.tokenizer.encode(text)
    message = chat.parse(ids)
    (call,) = message.tool_calls
    assert (message.content, message.reasoning, call.name, call.arguments) == (content, reasoning, "weather", '{"a":1}')
    assert len(call.id) == 9 and call.id.isalnum()
    assert chat.parse(ids) == message
    others = {chat.parse(ids, prompt).tool_calls[0].id for prompt in (chat.render(HI).ids, chat.render(HI * 2).ids)}
    assert len(others | {call.id}) == 3


def test_several_calls_have_different_ids(tmp_path: Path) -> None:
    chat = chat_of(tmp_path, published()["qwen3"])
    block = '<tool_call>\n{"name": "a", "arguments": {}}\n</tool_call>\n'
    calls = chat.parse(chat.tokenizer.encode(block * 20)).tool_calls
    assert len({call.id for call in calls}) == 20


def test_reasoning_that_the_prompt_opened_is_known_by_the_prompt(tmp_path: Path) -> None:
    chat = chat_of(tmp_path, published()["qwen3_6"])
    prompt = chat.render(HI).ids
    assert chat.tokenizer.decode(prompt).endswith("<think>\n")
    cut_off = chat.tokenizer.encode("I should")
    assert chat.parse(cut_off, prompt) == Message("assistant", "", reasoning="I should")
    assert chat.parse(cut_off) == Message("assistant", "I should")
    whole = chat.tokenizer.encode("I should\n</think>\n\nHello<|im_end|>")
    assert chat.parse(whole, prompt) == chat.parse(whole) == Message("assistant", "Hello", reasoning="I should")


def test_calls_have_the_types_of_the_tools_that_were_offered(tmp_path: Path) -> None:
    chat = chat_of(tmp_path, published()["qwen3_6"])
    call = ToolCall("c", "weather", '{"city": "12", "days": 3}')
    messages = [*HI, Message("assistant", "", reasoning="hm", tool_calls=(call,))]
    written = chat.render_text(messages, [WEATHER]).rpartition("</think>")[2].partition("<|im_end|>")[0]
    (read,) = chat.parse(chat.tokenizer.encode(written), tools=[WEATHER]).tool_calls
    assert (read.name, read.arguments) == (call.name, call.arguments)


def test_a_models_separate_template_for_tools_is_used(tmp_path: Path) -> None:
    save(tmp_path, byte_level(), "plain", ["<|im_end|>"])
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    chat = ChatRenderer(Tokenizer.load(tmp_path))
    assert (chat.render_text(HI), chat.render_text(HI, [WEATHER])) == ("plain", "tools")


def test_the_configuration_builds_a_renderer(tmp_path: Path) -> None:
    tokenizer = chat_of(tmp_path, CHATML).tokenizer
    own = tmp_path / "own.jinja"
    own.write_text("{{ mood }}: {{ messages[0].content }}")
    chat = ChatConfig(template=own, template_kwargs={"mood": "glad"}, history="template").build_renderer(tokenizer)
    assert (chat.render_text(HI), chat.history) == ("glad: Hi", "template")
    assert ChatConfig().build_renderer(tokenizer).render_text(HI) == ChatRenderer(tokenizer).render_text(HI)
    with pytest.raises(ConfigError, match=r"chat template .*gone\.jinja does not exist"):
        ChatConfig(template=tmp_path / "gone.jinja").build_renderer(tokenizer)


def test_a_variable_that_no_template_reads_is_refused(tmp_path: Path) -> None:
    tokenizer = chat_of(tmp_path / "qwen", published()["qwen3"]).tokenizer
    ChatConfig(template_kwargs={"enable_thinking": False}).build_renderer(tokenizer)
    with pytest.raises(ConfigError, match=r"`chat\.template_kwargs\.nonsense` .* It reads .*enable_thinking.* Correct"):
        ChatConfig(template_kwargs={"nonsense": 1, "enable_thinking": False}).build_renderer(tokenizer)
    nothing, sets = "has no chat template. Write one", "It reads no variable but those of a conversation"
    for template, problem in ((None, nothing), ("{% set mood = 1 %}{{ mood }}{{ messages[0].content }}", sets)):
        without = chat_of(tmp_path / "plain", template).tokenizer
        with pytest.raises(ConfigError, match=problem):
            ChatConfig(template_kwargs={"mood": "glad"}).build_renderer(without)


def test_a_model_without_a_template_gets_instructions(tmp_path: Path) -> None:
    chat = chat_of(tmp_path, None)
    with pytest.raises(ConfigError, match=r"no chat template, so .* write one into chat_template\.jinja there"):
        chat.render(HI)
    assert chat.parse(chat.tokenizer.encode("<think>a</think>")) == Message("assistant", "<think>a</think>")
    named = save(
        tmp_path / "named", byte_level(), None, ["<|im_end|>"], chat_template=[{"name": "rag", "template": ""}]
    )
    with pytest.raises(ConfigError, match=r"no chat template named default \(only rag\)"):
        ChatRenderer(Tokenizer.load(named)).render(HI)


def test_conversations_that_cannot_be_rendered_are_reported(tmp_path: Path) -> None:
    chat = chat_of(tmp_path, published()["gemma"], "gemma")
    with pytest.raises(ChatError, match="without messages"):
        chat.render([])
    with pytest.raises(ChatError, match="Message 0 of the conversation has the role 'robot'"):
        chat.render([Message("robot", "beep")])
    with pytest.raises(ChatError, match="System role not supported"):
        chat.render([Message("system", "x"), *HI])


def test_a_malformed_call_is_rendered_as_text(tmp_path: Path) -> None:
    chat = chat_of(tmp_path, published()["qwen3"])
    call = ToolCall("c", "weather", "{oops")
    assert "{oops" in chat.render_text([*HI, Message("assistant", "", tool_calls=(call,))], [WEATHER])
