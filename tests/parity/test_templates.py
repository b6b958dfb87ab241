"""Published chat templates give, letter by letter and token by token, the same as in transformers."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from etude.chat import ChatTemplate, Tokenizer, message_from_dict
from etude.errors import ChatError
from tests.chat.conversations import CONVERSATIONS, Form, conversations, texts
from tests.chat.made import byte_level, common_first, published, save, sentencepiece

NAMES = sorted(published())


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    every = byte_level("".join(published().values()), ["<|endoftext|>"])
    more = {"pad_token": "<|endoftext|>", "chat_template": "never shown"}
    return save(
        tmp_path_factory.mktemp("every"), every, "{{ bos_token }}{{ messages[0].content }}", ["<|im_end|>"], **more
    )


@pytest.fixture(scope="module")
def theirs(directory: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(directory)


@pytest.fixture(scope="module")
def ours(directory: Path) -> Tokenizer:
    return Tokenizer.load(directory)


@cache
def compiled(name: str) -> ChatTemplate:
    return ChatTemplate(
        published()[name], {"bos_token": "<s>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    )


def expected(
    tokenizer: PreTrainedTokenizerBase, name: str, forms: list[Form], tools: list[Form], **more: Any
) -> str | None:
    """Return the rendering of transformers; None if the template refuses."""
    try:
        tools_or_none: Any = tools or None
        text: Any = tokenizer.apply_chat_template(
            forms, tools=tools_or_none, chat_template=published()[name], tokenize=False, **more
        )
        return str(text)
    except Exception:
        return None


def rendered(template: ChatTemplate, messages: list[Any], tools: list[Form], **more: Any) -> str | None:
    try:
        return template.render(messages, tools, **more)
    except ChatError:
        return None


def shaped(name: str, forms: list[Form]) -> list[Form]:
    """Return a conversation in the form that this template reads: most take text as a string and arguments as a
    value."""
    if name.startswith(("idefics3", "llava_next", "smolvlm")):
        return [{**form, "content": [{"type": "text", "text": form["content"]}]} for form in forms]
    if name == "deepseekv3":
        return [
            {**form, **({"tool_calls": as_text(form["tool_calls"])} if form.get("tool_calls") else {})}
            for form in forms
        ]
    return forms


def as_text(calls: list[Form]) -> list[Form]:
    """Return calls whose arguments are JSON text."""
    written = [json.dumps(call["function"]["arguments"], ensure_ascii=False) for call in calls]
    return [
        {**call, "function": {**call["function"], "arguments": text}} for call, text in zip(calls, written, strict=True)
    ]


@pytest.mark.parametrize("name", common_first(NAMES))
def test_a_published_template_gives_the_same_text_and_ids(
    name: str, theirs: PreTrainedTokenizerBase, ours: Tokenizer
) -> None:
    template, shown = compiled(name), 0
    for plain, tools in CONVERSATIONS.values():
        forms = shaped(name, plain)
        for generate in (True, False):
            text = expected(theirs, name, forms, tools, add_generation_prompt=generate)
            assert rendered(template, forms, tools, add_generation_prompt=generate) == text
            if generate:
                messages = [message_from_dict(form) for form in plain]
                assert rendered(template, messages, tools) == text, "messages are shown in the form that it reads"
            if text is not None:
                shown += 1
                assert ours.encode(text).tolist() == theirs(text, add_special_tokens=False)["input_ids"]
                assert ours.decode(ours.encode(text), keep_special_tokens=True) == text
    assert shown >= 8


@settings(max_examples=100, deadline=None)
@given(name=st.sampled_from(NAMES), conversation=conversations(), generate=st.booleans())
def test_any_conversation_gives_the_same_text(
    name: str, conversation: tuple[list[Form], list[Form]], generate: bool, theirs: PreTrainedTokenizerBase
) -> None:
    forms, tools = conversation
    text = expected(theirs, name, forms, tools, add_generation_prompt=generate)
    assert rendered(compiled(name), forms, tools, add_generation_prompt=generate) == text


@pytest.mark.parametrize(
    ("name", "variables"),
    [
        ("qwen3", {"enable_thinking": False}),
        ("qwen3_6", {"preserve_thinking": True}),
        ("glm4moe", {"enable_thinking": False}),
        ("gptoss", {"reasoning_effort": "high", "builtin_tools": ["python"]}),
        ("llama3_1", {"date_string": "1 Jan 2030", "tools_in_user_message": False}),
    ],
)
def test_variables_reach_the_template(name: str, variables: Form, theirs: PreTrainedTokenizerBase) -> None:
    differs = False
    for forms, tools in CONVERSATIONS.values():
        text = expected(theirs, name, forms, tools, add_generation_prompt=True, **variables)
        assert rendered(compiled(name), forms, tools, **variables) == text
        differs |= text is not None and text != expected(theirs, name, forms, tools, add_generation_prompt=True)
    assert differs


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Tokenizer, PreTrainedTokenizerBase]]:
    """The same tokenizers by Etude and by transformers: like Qwen's, like Phi's, like Llama 2's."""
    swallowing = byte_level("<|end|><|user|>", rstrip=["<|end|>"])
    made = [
        save(tmp_path_factory.mktemp("qwen"), byte_level("<|end|>"), None, ["<|im_end|>"]),
        save(tmp_path_factory.mktemp("phi"), swallowing, None, ["<|end|>"]),
        save(tmp_path_factory.mktemp("llama"), sentencepiece(), None, ["</s>"], unk_token="<unk>", add_bos_token=False),
    ]
    return [(Tokenizer.load(made_directory), AutoTokenizer.from_pretrained(made_directory)) for made_directory in made]


@settings(max_examples=150, deadline=None)
@given(
    which=st.integers(0, 2), pieces=st.lists(texts | st.sampled_from(["<|end|>", "</s>", "<s>", " ", "\n"]), max_size=6)
)
def test_any_text_gives_the_same_ids(
    which: int, pieces: list[str], pairs: list[tuple[Tokenizer, PreTrainedTokenizerBase]]
) -> None:
    (ours, theirs), text = pairs[which], "".join(pieces)
    ids = theirs(text, add_special_tokens=False)["input_ids"]
    assert ours.encode(text).tolist() == ids
    assert ours.encode(text, add_special_tokens=True).tolist() == theirs(text)["input_ids"]
    for special in (True, False):
        assert ours.decode(ids, special) == theirs.decode(ids, skip_special_tokens=not special)


def test_a_directory_is_read_as_transformers_reads_it(
    directory: Path, theirs: PreTrainedTokenizerBase, ours: Tokenizer
) -> None:
    assert ours.template == theirs.chat_template
    assert ours.special_tokens == theirs.special_tokens_map
    assert (ours.bos_id, ours.pad_id, ours.eos_ids) == (
        theirs.bos_token_id,
        theirs.pad_token_id,
        (theirs.eos_token_id,),
    )
    assert ours.vocab_size == len(theirs)
    ids = list(range(ours.vocab_size))
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.decode(ids, keep_special_tokens=True) == theirs.decode(ids, skip_special_tokens=False)
