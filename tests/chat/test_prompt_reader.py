"""Recorded prompts as messages: the templates of published models, plain texts, and the turns of an attempt."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pytest

from etude.chat import ChatRenderer, PromptReader, Tokenizer
from etude.errors import ChatError
from etude.protocols import Ids
from etude.records import Completion, Message, ToolCall, Turn
from tests.chat.made import COMMON, byte_level, common_first, ends_of, published, save

WEATHER: dict[str, object] = {
    "name": "weather",
    "description": "Tell",
    "parameters": {"type": "object", "properties": {}},
}
TOOL: dict[str, object] = {"type": "function", "function": WEATHER}
ASKED = [
    Message("system", "Be brief."),
    Message("user", "One?\n\nOr two?"),
    Message("assistant", "Two."),
    Message("user", "Why?"),
]
CALLED = [
    Message("user", "Rain?"),
    Message("assistant", "I look.", tool_calls=(ToolCall("call00000", "weather", "{}"),)),
    Message("tool", "sunny", tool_call_id="call00000", name="weather"),
]


def renderer(directory: Path, name: str, template: str | None = None) -> ChatRenderer:
    source = published()[name] if template is None else template
    return ChatRenderer(Tokenizer.load(save(directory, byte_level(source), source, ends_of(name))))


def read(chat: ChatRenderer, prompt: Sequence[Message], tools: Sequence[dict[str, object]] = ()) -> list[list[str]]:
    return [list(entry.values()) for entry in PromptReader(chat).read_prompt(chat.render(prompt, tools).ids)]


def turn(prompt: Iterable[int], answer: Sequence[int] | Ids, index: int, text: str) -> Turn:
    size = len(answer)
    completion = Completion(np.array(answer), np.zeros(size, np.float32), np.zeros(size, np.int32), "stop", text)
    return Turn(np.array([*prompt], np.int32), completion, index)


@pytest.mark.parametrize("name", common_first(published()))
def test_the_messages_of_a_prompt_are_read_by_role(tmp_path: Path, name: str) -> None:
    chat = renderer(tmp_path, name)
    with_system = [["system", "Be brief."], ["user", "One?\n\nOr two?"], ["assistant", "Two."], ["user", "Why?"]]
    if name.startswith("gemma3"):  # writes the system's message as a part of the user's
        with_system = [["user", "Be brief.\n\nOne?\n\nOr two?"], *with_system[2:]]
    try:
        assert read(chat, ASKED) == with_system
    except ChatError:  # a template without a system role
        assert name.startswith("gemma") or "system" not in published()[name]
        assert read(chat, ASKED[1:]) == with_system[1:]


@pytest.mark.parametrize("name", [name for name in COMMON if name[:5] not in ("gptos", "gemma", "deeps", "idefi")])
def test_the_tools_that_are_offered_and_their_results_are_messages(tmp_path: Path, name: str) -> None:
    entries = read(renderer(tmp_path, name), CALLED, [TOOL, TOOL])
    by = [role for role, _ in entries if role != "system"]
    assert by == ["tools", "user", "assistant", "tool"]
    texts = dict(entries)
    assert json.loads(texts["tools"].splitlines()[0] if name != "llama3_1" else json.dumps(TOOL)) == TOOL
    assert texts["user"] == "Rain?" and texts["tool"] == "sunny" and "weather" in texts["assistant"]


def test_a_text_without_a_template_is_one_prompt(tmp_path: Path) -> None:
    plain = ChatRenderer(Tokenizer.load(save(tmp_path, byte_level(), None, ("<|im_end|>",))))
    reader, ids = PromptReader(plain), plain.tokenizer.encode
    assert reader.read_prompt(ids("2 + 2 =")) == [{"by": "prompt", "text": "2 + 2 ="}]
    first = turn(ids("2 + 2 ="), ids(" 4"), 0, " 4")
    second = turn([*first.prompt, *first.completion.ids, *ids(" no:")], ids(" 5"), 1, " 5")
    assert [list(entry.values()) for entry in reader.read_rest([first, second])] == [
        ["model", " 4"],
        ["observation", " no:"],
        ["model", " 5"],
    ]


def test_what_follows_an_answer_is_read_by_role_and_a_rewritten_history_whole(tmp_path: Path) -> None:
    chat = renderer(tmp_path, "qwen3")
    reader, asked = PromptReader(chat), [Message("user", "Rain?")]
    conversation = chat.start_conversation()
    prompt = conversation.render(asked, [TOOL]).ids
    answer = chat.encode_answer(asked, CALLED[1], [TOOL])
    conversation.remember_answer(asked, [TOOL], prompt, answer, chat.parse(answer, prompt, [TOOL]))
    history = [*asked, chat.parse(answer, prompt, [TOOL])]
    after = conversation.render(
        [*history, Message("tool", "sunny", tool_call_id="call"), Message("user", "So?")], [TOOL]
    ).ids
    turns = [turn(prompt, answer, 0, "I look."), turn(after, answer[:1], 1, "Go.")]
    assert [list(entry.values()) for entry in reader.read_rest(turns)] == [
        ["model", "I look."],
        ["tool", "sunny"],
        ["user", "So?"],
        ["model", "Go."],
    ]
    anew = turn(chat.render(ASKED).ids, answer[:1], 1, "Yes.")
    assert [entry["by"] for entry in reader.read_rest([turns[0], anew])] == [
        "model",
        "system",
        "user",
        "assistant",
        "user",
        "model",
    ]
    assert reader.read_rest([]) == []


def test_a_template_with_a_date_is_read_on_another_day(tmp_path: Path) -> None:
    template = "{{ strftime_now('%s') }}".join(["<|im_start|>system\n", "\n"]) + (
        "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}<|im_end|>\n"
        "{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    )
    chat = renderer(tmp_path, "dated", template)
    prompt = chat.tokenizer.encode(chat.render_text(ASKED).replace("system\n", "system\n9", 1))
    entries = PromptReader(chat).read_prompt(prompt)
    assert [entry["by"] for entry in entries] == ["system", "user", "assistant", "user"]
    assert entries[0]["text"].endswith("Be brief.")
