"""Served ids are kept exactly, with every template and every end of an answer."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.chat import ChatRenderer, Conversation, Tokenizer, message_from_dict
from etude.chat.tokenizer import Ids
from etude.errors import ChatError
from etude.records import Message, ToolCall
from tests.chat.conversations import WEATHER, Form
from tests.chat.made import byte_level, common_first, ends_of, published, save, sentencepiece

NAMES = sorted(published())
NO_TOOLS = ("cohere", "gemma_", "gemma3", "llava_next", "phi3", "idefics3", "smolvlm", "deepseek_r1_distill", "lfm2")
ASK, MORE = Message("user", "What is it?"), Message("user", "And then?")
CALL = ToolCall("call00001", "weather", '{"city": "Bern"}')
RESULT = Message("tool", "rain", tool_call_id="call00001", name="weather")
SAID, THOUGHT = Message("assistant", "It is 4."), Message("assistant", "It is 4.", reasoning="Two and two.")
CALLED = Message("assistant", "", tool_calls=(CALL,))


@cache
def chat_of(name: str, history: str = "served") -> ChatRenderer:
    template, ends = published()[name], ends_of(name)
    directory = Path(mkdtemp(prefix="etude-chat-"))
    try:
        tokenizer = Tokenizer.load(save(directory, byte_level(template, ends), template, ends))
    finally:
        remove(directory)
    return ChatRenderer(tokenizer, "template" if history == "template" else "served")


def remove(directory: Path) -> None:
    for path in directory.iterdir():
        path.unlink()
    directory.rmdir()


def takes_tools(name: str) -> bool:
    return (name != "gemma" and not name.startswith(NO_TOOLS)) or name.startswith("lfm2_v2")


def begins(ids: Ids, *prefix: Ids) -> bool:
    wanted = np.concatenate(prefix)
    return len(ids) > len(wanted) and np.array_equal(ids[: len(wanted)], wanted)


def serve(
    conversation: Conversation, messages: list[Message], tools: list[Form], completion: Ids, answer: Message
) -> tuple[Ids, list[Message]]:
    """Play one turn; return its prompt, and the conversation with the answer."""
    prompt = conversation.render(messages, tools).ids
    conversation.remember_answer(messages, tools, prompt, completion, answer)
    return prompt, [*messages, answer]


@pytest.mark.parametrize("name", common_first(NAMES))
def test_served_ids_begin_the_next_prompt(name: str) -> None:
    """The conversation has four turns of tokens that no template would write, ended by each of the ends or by none."""
    chat, random = chat_of(name), np.random.default_rng(0)
    for tools, answers in (([], [SAID, THOUGHT]), ([WEATHER], [CALLED, replace(CALLED, reasoning="Hm."), SAID])):
        if tools and not takes_tools(name):
            continue
        for end in (*chat.tokenizer.eos_ids, None):
            conversation, messages, seen = chat.start_conversation(), [ASK], np.zeros(0, np.int32)
            for turn in range(4):
                answer = answers[turn % len(answers)]
                completion = np.array([*random.integers(0, 256, 5), *([] if end is None else [end])], dtype=np.int32)
                prompt, messages = serve(conversation, messages, tools, completion, answer)
                assert not turn or begins(prompt, seen)
                seen = np.concatenate([prompt, completion])
                messages.append(RESULT if answer.tool_calls else MORE)
            last = conversation.render(messages, tools).ids
            assert begins(last, seen)
            assert str(messages[-1].content) in chat.tokenizer.decode(last[len(seen) :])


@pytest.mark.parametrize("name", common_first(NAMES))
def test_canonical_tokens_continue_as_the_template_renders(name: str) -> None:
    """The template keeps earlier messages and the model wrote the template's tokens, so both renderings agree."""
    chat, compared = chat_of(name), 0
    tokenizer = chat.tokenizer
    for answer, more, tools in ((SAID, MORE, []), (THOUGHT, MORE, []), (CALLED, RESULT, [WEATHER])):
        if tools and not takes_tools(name):
            continue
        prompt, whole = chat.render([ASK], tools).ids, chat.render([ASK, answer, more], tools).ids
        ends = [at for at in range(len(prompt), len(whole)) if whole[at] in tokenizer.eos_ids]
        if not begins(whole, prompt) or not ends:
            continue  # the template rewrites messages that it has shown
        for stop in (ends[0] + 1, ends[0]):
            conversation = chat.start_conversation()
            conversation.remember_answer([ASK], tools, prompt, whole[len(prompt) : stop], answer)
            assert conversation.render([ASK, answer, more], tools).ids.tolist() == whole.tolist()
            compared += 1
    assert compared or name.startswith(("deepseek", "nemotron"))  # these remove the <think> that they opened with


@pytest.mark.parametrize(
    ("name", "answer", "more", "end", "tail"),
    [
        ("qwen3", SAID, MORE, "<|im_end|>", "\n<|im_start|>user\nAnd then?<|im_end|>\n<|im_start|>assistant\n"),
        ("qwen3", SAID, MORE, "", "<|im_end|>\n<|im_start|>user\nAnd then?<|im_end|>\n<|im_start|>assistant\n"),
        (
            "qwen3",
            CALLED,
            RESULT,
            "<|endoftext|>",
            "<|im_end|>\n<|im_start|>user\n<tool_response>\nrain\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
        ),
        ("qwen3", SAID, None, "<|im_end|>", "\n<|im_start|>assistant\n"),
        (
            "llama3_1",
            CALLED,
            RESULT,
            "<|eot_id|>",
            '<|start_header_id|>ipython<|end_header_id|>\n\n"rain"<|eot_id|>'
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        ("glm4moe", SAID, MORE, "<|user|>", "\nAnd then?<|assistant|>"),
        ("glm4moe", CALLED, RESULT, "<|observation|>", "\n<tool_response>\nrain\n</tool_response><|assistant|>"),
        ("glm4moe", SAID, MORE, "", "<|user|>\nAnd then?<|assistant|>"),
        ("llava_next", SAID, MORE, "</s>", " [INST] And then? [/INST]"),
    ],
)
def test_the_text_after_an_answer_is_the_rest_of_its_end_and_the_new_messages(
    name: str, answer: Message, more: Message | None, end: str, tail: str
) -> None:
    chat = chat_of(name)
    conversation, tools = chat.start_conversation(), [WEATHER] if answer.tool_calls else []
    completion = chat.tokenizer.encode("anything" + end)
    prompt, messages = serve(conversation, [ASK], tools, completion, answer)
    following = conversation.render([*messages, *([more] if more else [])], tools).ids
    assert chat.tokenizer.decode(following[len(prompt) + len(completion) :], keep_special_tokens=True) == tail


def test_an_end_token_in_a_users_text_is_not_the_end_of_the_answer() -> None:
    chat = chat_of("qwen3")
    conversation = chat.start_conversation()
    completion = chat.tokenizer.encode("cut off<|endoftext|>")
    prompt, messages = serve(conversation, [ASK], [], completion, SAID)
    more = Message("user", "what is <|endoftext|> for?")
    rest = chat.tokenizer.decode(
        conversation.render([*messages, more]).ids[len(prompt) + len(completion) :], keep_special_tokens=True
    )
    assert rest == f"<|im_end|>\n<|im_start|>user\n{more.content}<|im_end|>\n<|im_start|>assistant\n"


def test_reasoning_may_be_left_out_at_one_turn_and_come_back_at_the_next() -> None:
    chat = chat_of("qwen3")
    conversation = chat.start_conversation()
    odd = chat.tokenizer.encode("odd<|im_end|>")
    serve(conversation, [ASK], [], odd, THOUGHT)
    second, _ = serve(conversation, [ASK, SAID, MORE], [], odd, SAID)
    assert begins(conversation.render([ASK, THOUGHT, MORE, SAID, ASK]).ids, second, odd)


def test_slightly_changed_messages_still_continue() -> None:
    chat = chat_of("qwen3")
    conversation, call = chat.start_conversation(), replace(CALLED, reasoning="I look.")
    completion = chat.tokenizer.encode("<think>odd tokens")
    prompt, _ = serve(conversation, [ASK], [WEATHER], completion, call)
    back = replace(call, reasoning="", tool_calls=(replace(CALL, arguments='{"city":"Bern"}'),))
    following = conversation.render([ASK, back, RESULT], [dict(reversed(WEATHER.items()))]).ids
    assert begins(following, prompt, completion)


@pytest.mark.parametrize(
    ("messages", "tools"),
    [
        ([replace(ASK, content="What is it ?"), SAID, MORE], []),
        ([ASK, replace(SAID, content="It is 4. "), MORE], []),
        ([ASK, replace(SAID, reasoning="Hm."), MORE], []),
        ([Message("system", "Be brief."), ASK, SAID, MORE], []),
        ([ASK, SAID, MORE], [WEATHER]),
        ([ASK, MORE], []),
        ([ASK], []),
    ],
)
def test_a_rewritten_history_branches(messages: list[Message], tools: list[Form]) -> None:
    chat = chat_of("qwen3")
    conversation = chat.start_conversation()
    serve(conversation, [ASK], [], chat.tokenizer.encode("odd tokens<|im_end|>"), SAID)
    assert np.array_equal(conversation.render(messages, tools).ids, chat.render(messages, tools).ids)


def test_both_branches_continue_and_the_longest_history_wins() -> None:
    chat = chat_of("qwen3")
    conversation = chat.start_conversation()
    one, other, third = (chat.tokenizer.encode(f"{word}<|im_end|>") for word in ("one", "other", "third"))
    first, messages = serve(conversation, [ASK], [], one, SAID)
    second, longer = serve(conversation, [*messages, MORE], [], other, SAID)
    branch, apart = serve(conversation, [MORE], [], third, SAID)
    assert begins(conversation.render([*longer, MORE]).ids, second, other)
    assert begins(conversation.render([*apart, MORE]).ids, branch, third)
    assert begins(conversation.render([*messages, ASK]).ids, first, one)
    assert not begins(conversation.render([*messages, ASK]).ids, second)


def test_of_two_equal_answers_the_latest_is_continued() -> None:
    chat = chat_of("qwen3")
    conversation = chat.start_conversation()
    one, other = (chat.tokenizer.encode(f"{word}<|im_end|>") for word in ("one", "other"))
    prompt, messages = serve(conversation, [ASK], [], one, SAID)
    serve(conversation, [ASK], [], other, SAID)
    assert begins(conversation.render([*messages, MORE]).ids, prompt, other)


def test_messages_an_agent_put_in_between_are_rendered() -> None:
    chat = chat_of("qwen3")
    conversation = chat.start_conversation()
    completion = chat.tokenizer.encode("odd tokens<|im_end|>")
    prompt, messages = serve(conversation, [ASK], [], completion, SAID)
    invented = Message("assistant", "I said so.")
    following = conversation.render([*messages, MORE, invented, ASK]).ids
    assert begins(following, prompt, completion)
    rest = chat.tokenizer.decode(following[len(prompt) + len(completion) :], keep_special_tokens=True)
    assert "<|im_start|>assistant\nI said so.<|im_end|>" in rest


def test_marker_words_may_occur_in_messages() -> None:
    chat = chat_of("qwen3")
    conversation = chat.start_conversation()
    completion = chat.tokenizer.encode("odd<|im_end|>")
    message = Message("user", "etudemark etudewords etudemarkk<|im_end|>")
    prompt, messages = serve(conversation, [message], [], completion, replace(SAID, content="etudemark"))
    rest = conversation.render([*messages, message]).ids[len(prompt) + len(completion) :]
    text = f"\n<|im_start|>user\n{message.content}<|im_end|>\n<|im_start|>assistant\n"
    assert chat.tokenizer.decode(rest, keep_special_tokens=True) == text


def test_an_empty_answer_can_be_continued() -> None:
    chat = chat_of("qwen3")
    conversation = chat.start_conversation()
    prompt, messages = serve(conversation, [ASK], [], np.zeros(0, np.int32), Message("assistant", ""))
    rest = conversation.render([*messages, MORE]).ids[len(prompt) :]
    assert chat.tokenizer.decode(rest, keep_special_tokens=True).startswith("<|im_end|>\n<|im_start|>user\nAnd then?")


def test_history_served_keeps_the_thinking_that_the_template_would_drop() -> None:
    for history, keeps_reasoning in (("served", True), ("template", False)):
        chat = chat_of("qwen3", history)
        conversation = chat.start_conversation()
        completion = chat.tokenizer.encode("<think>\nTwo and two.\n</think>\n\nIt is 4.<|im_end|>")
        prompt, messages = serve(conversation, [ASK], [], completion, THOUGHT)
        following = conversation.render([*messages, MORE]).ids
        assert begins(following, prompt, completion) == keeps_reasoning
        assert keeps_reasoning or np.array_equal(following, chat.render([ASK, THOUGHT, MORE]).ids)


@pytest.mark.parametrize("history", ["served", "template"])
def test_the_length_of_an_observation_is_known_even_if_the_template_rewrites_history(history: str) -> None:
    """The count is since the last answer only, whether or not the prompt has the ids of earlier ones."""
    chat = chat_of("qwen3", history)
    conversation, messages, shown = chat.start_conversation(), [ASK], ""
    completion = chat.tokenizer.encode("<think>\nTwo and two.\n</think>\n\nIt is 4.<|im_end|>")
    for turn in range(3):
        prompt = conversation.render(messages).ids
        length = conversation.count_observed_tokens(messages, [], prompt)
        assert chat.tokenizer.decode(prompt[len(prompt) - length :], keep_special_tokens=True) == shown, turn
        _, messages = serve(conversation, messages, [], completion, THOUGHT)
        messages, shown = [*messages, MORE], "\n<|im_start|>user\nAnd then?<|im_end|>\n<|im_start|>assistant\n"


def test_text_before_a_foreign_answer_is_no_observation_after_the_models_own() -> None:
    chat = chat_of("qwen3")
    conversation = chat.start_conversation()
    made_up = [ASK, Message("assistant", "Hello."), MORE]
    assert conversation.count_observed_tokens(made_up, [], conversation.render(made_up).ids) == 0, (
        "the model has not answered"
    )
    _, messages = serve(conversation, [ASK], [], chat.tokenizer.encode("It is 4.<|im_end|>"), SAID)
    edited = [*messages, MORE, Message("assistant", "Mine."), ASK]
    prompt = conversation.render(edited).ids
    shown = chat.tokenizer.decode(
        prompt[len(prompt) - conversation.count_observed_tokens(edited, [], prompt) :], keep_special_tokens=True
    )
    assert shown.endswith("user\nWhat is it?<|im_end|>\n<|im_start|>assistant\n") and "Mine" not in shown


def test_history_template_keeps_the_ids_where_the_template_keeps_the_thinking() -> None:
    chat = chat_of("qwen3", "template")
    conversation, tools = chat.start_conversation(), [WEATHER]
    call = replace(CALLED, reasoning="I look.")
    odd = [chat.tokenizer.encode(f"<think>\n{word}\n</think>\n\nodd<|im_end|>") for word in ("one", "two")]
    first, messages = serve(conversation, [ASK], tools, odd[0], call)
    omitted = replace(call, reasoning="")  # the agent leaves it out, and the model still sees it
    second, messages = serve(conversation, [ASK, omitted, RESULT], tools, odd[1], THOUGHT)
    assert begins(second, first, odd[0])
    anew = conversation.render([*messages, MORE], tools).ids
    assert np.array_equal(anew, chat.render([ASK, call, RESULT, THOUGHT, MORE], tools).ids)
    plain = chat.tokenizer.encode("odd<|im_end|>")
    third, messages = serve(conversation, [*messages, MORE], tools, plain, SAID)
    assert np.array_equal(third, anew)
    assert begins(conversation.render([*messages, ASK], tools).ids, third, plain)


def test_history_template_remembers_thinking_of_earlier_answers() -> None:
    chat = chat_of("qwen3", "template")
    conversation, tools, call = chat.start_conversation(), [WEATHER], replace(CALLED, reasoning="I look.")
    odd = chat.tokenizer.encode("odd<|im_end|>")
    first, _ = serve(conversation, [ASK], tools, odd, call)
    second, messages = serve(conversation, [ASK, call, RESULT], tools, odd, SAID)
    assert begins(second, first, odd)
    assert np.array_equal(conversation.render([*messages, MORE], tools).ids, chat.render([*messages, MORE], tools).ids)


def test_history_template_shows_thinking_that_was_left_out_where_the_template_shows_it(tmp_path: Path) -> None:
    """This template shows the thinking of the last answer only: each new question drops the thinking before it."""
    template = (
        "{% set n = namespace(last=0) %}"
        "{% for m in messages if m.role == 'assistant' %}{% set n.last = m %}{% endfor %}"
        "{% for m in messages %}{% if m == n.last %}({{ m.reasoning_content }}){% endif %}"
        "{{ m.content }}<|im_end|>{% endfor %}"
    )
    chat = ChatRenderer(Tokenizer.load(save(tmp_path, byte_level(template), template, ["<|im_end|>"])), "template")
    conversation, odd = chat.start_conversation(), chat.tokenizer.encode("odd<|im_end|>")
    one, other = replace(SAID, reasoning="one"), replace(SAID, content="5", reasoning="other")
    first, _ = serve(conversation, [ASK], [], odd, one)
    second, _ = serve(conversation, [ASK, SAID, MORE], [], odd, other)
    assert begins(second, first, odd)
    third = conversation.render([ASK, SAID, MORE, replace(other, reasoning=""), ASK]).ids
    assert np.array_equal(third, chat.render([ASK, one, MORE, other, ASK]).ids)
    assert "(other)" in chat.tokenizer.decode(third)


@pytest.mark.parametrize("name", ["qwen3_training", "gemma3", "llama3_1", "phi3"])
def test_history_template_keeps_the_ids_where_there_is_no_thinking(name: str) -> None:
    chat = chat_of(name, "template")
    conversation = chat.start_conversation()
    completion = chat.tokenizer.encode("odd tokens")
    prompt, messages = serve(conversation, [ASK], [], completion, SAID)
    assert begins(conversation.render([*messages, MORE]).ids, prompt, completion)


def test_a_tokenizer_that_marks_beginnings_continues_as_within_a_text(tmp_path: Path) -> None:
    """The tokenizer begins every text with a ▁, so text after an end is tokenized as after that end."""
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ ' ' + m.content + '</s>' }}"
        "{% else %}{{ 'the ' + m.content + '\\n' }}{% endif %}{% endfor %}"
    )
    chat = ChatRenderer(Tokenizer.load(save(tmp_path, sentencepiece(), template, ["</s>"])))
    whole = chat.render([ASK, SAID, MORE]).ids
    prompt = chat.render([ASK]).ids
    stop = whole.tolist().index(chat.tokenizer.eos_ids[0]) + 1
    assert begins(whole, prompt)
    conversation = chat.start_conversation()
    conversation.remember_answer([ASK], [], prompt, whole[len(prompt) : stop], SAID)
    assert conversation.render([ASK, SAID, MORE]).ids.tolist() == whole.tolist()


def test_an_end_token_swallows_the_space_after_it(tmp_path: Path) -> None:
    template, ends = published()["phi3"], ends_of("phi3")
    inner = byte_level(template, ends, rstrip=["<|end|>", "<|assistant|>", "<|user|>"])
    chat = ChatRenderer(Tokenizer.load(save(tmp_path, inner, template, ends)))
    prompt, whole = chat.render([ASK]).ids, chat.render([ASK, SAID, MORE]).ids
    stop = whole.tolist().index(chat.tokenizer.eos_ids[0], len(prompt)) + 1
    conversation = chat.start_conversation()
    conversation.remember_answer([ASK], [], prompt, whole[len(prompt) : stop], SAID)
    assert conversation.render([ASK, SAID, MORE]).ids.tolist() == whole.tolist()


def test_a_template_without_ends_continues(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    chat = ChatRenderer(Tokenizer.load(save(tmp_path, byte_level(), template, ["<|im_end|>"])))
    conversation = chat.start_conversation()
    completion = chat.tokenizer.encode("4")
    prompt, messages = serve(conversation, [ASK], [], completion, SAID)
    assert np.array_equal(conversation.render(messages).ids, np.concatenate([prompt, completion]))
    assert chat.tokenizer.decode(conversation.render([*messages, MORE]).ids) == "What is it?4And then?"


def test_the_templates_own_error_is_reported() -> None:
    chat = chat_of("gemma")
    conversation = chat.start_conversation()
    _, messages = serve(conversation, [ASK], [], chat.tokenizer.encode("4<end_of_turn>"), SAID)
    with pytest.raises(ChatError, match="roles must alternate"):
        conversation.render([*messages, RESULT])


def test_a_template_that_hides_answers_is_reported(tmp_path: Path) -> None:
    template = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    chat = ChatRenderer(Tokenizer.load(save(tmp_path, byte_level(), template, ["<|im_end|>"])))
    conversation = chat.start_conversation()
    _, messages = serve(conversation, [ASK], [], chat.tokenizer.encode("4"), SAID)
    with pytest.raises(ChatError, match="does not show the content of an assistant message"):
        conversation.render([*messages, MORE])


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_conversation_keeps_what_was_served(data: st.DataObject) -> None:
    """Any tokens, any texts, and answers that come back with or without their thinking."""
    name = data.draw(st.sampled_from(["qwen3", "qwen3_6", "llama3_1", "gptoss", "gemma4_v5", "glm4moe", "deepseekv3"]))
    chat, words = chat_of(name), st.text(min_size=1, max_size=6).filter(lambda text: "<|" not in text)
    conversation, sent, seen = chat.start_conversation(), [ASK], np.zeros(0, np.int32)
    for _ in range(data.draw(st.integers(2, 4))):
        thinking = data.draw(st.sampled_from(["", "Hm."]))
        answer = replace(data.draw(st.sampled_from([SAID, CALLED])), reasoning=thinking)
        ids = data.draw(st.lists(st.integers(0, chat.tokenizer.vocab_size - 1), max_size=4))
        prompt, _ = serve(conversation, sent, [WEATHER], np.array(ids, dtype=np.int32), answer)
        assert begins(prompt, seen)
        seen = np.concatenate([prompt, np.array(ids, dtype=np.int32)])
        back = answer if data.draw(st.booleans()) else replace(answer, reasoning="")
        more = replace(RESULT if answer.tool_calls else MORE, content=data.draw(words))
        sent = [*sent, message_from_dict({"role": "assistant", **_form(back)}), more]
    assert begins(conversation.render(sent, [WEATHER]).ids, seen)


def _form(message: Message) -> Form:
    """Return an assistant's message as an agent may send it back: empty fields are null, and arguments are a value."""
    function = {"name": CALL.name, "arguments": {"city": "Bern"}}
    calls = [{"id": call.id, "function": function} for call in message.tool_calls]
    form = {"content": message.content, "reasoning_content": message.reasoning, "tool_calls": calls}
    return {key: value or None for key, value in form.items()}


def added(chat: ChatRenderer, text: str, more: Message = MORE) -> tuple[Ids, Ids]:
    """An answer that a stop string ended, sent back as this text: the served ids stay, and the rest follows."""
    conversation = chat.start_conversation()
    prompt = conversation.render([ASK]).ids
    completion = np.concatenate([chat.tokenizer.encode(letter) for letter in "It is 4.</code>"])
    answer = Message("assistant", "It is 4.", reasoning="Two and two.")
    conversation.remember_answer([ASK], [], prompt, completion, answer, "</code>")
    messages = [ASK, Message("assistant", text), more]
    whole = np.concatenate([prompt, completion])
    then = conversation.render(messages).ids
    if not begins(then, whole):
        return whole, then[:0]
    second = np.concatenate([then, chat.tokenizer.encode("Good.<|im_end|>")])
    conversation.remember_answer(messages, [], then, second[len(then) :], Message("assistant", "Good."))
    third = conversation.render([*messages, Message("assistant", "Good."), MORE]).ids
    assert begins(third, second), "it goes on from there too, with what was added"
    return whole, then[len(whole) :]


@pytest.mark.parametrize("given", ["It is 4.", "It is 4.</code>", "It is 4.</code>\nCalling: f(4)", "It is 4.</code> "])
def test_a_stop_string_that_is_sent_back_continues_with_the_added_text(given: str) -> None:
    chat = chat_of("qwen3")
    _, rest = added(chat, given)
    appended = given.removeprefix("It is 4.").removeprefix("</code>")
    close = "<|im_end|>\n<|im_start|>user\nAnd then?<|im_end|>\n<|im_start|>assistant\n"
    assert chat.tokenizer.decode(rest, keep_special_tokens=True) == appended + close


@pytest.mark.parametrize("given", ["It is 4. Calling", "It is 4.</co", "It is 5.</code>", " It is 4.</code>"])
def test_a_text_that_differs_from_the_stopped_one_is_rendered_anew(given: str) -> None:
    assert not len(added(chat_of("qwen3"), given)[1])
