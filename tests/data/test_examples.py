"""Demonstrations and preferences as files hold them; the rows that are left out, and the messages about them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.chat import ChatRenderer
from etude.data.demonstrations import DemonstrationColumns, DemonstrationDataConfig
from etude.data.examples import SupervisedDataConfig
from etude.data.preferences import PreferenceColumns, PreferenceDataConfig, shared_prefix
from etude.errors import ChatError, ConfigError, DataError
from etude.observe import configure_logging
from tests.chat.conversations import by
from tests.data.chats import chat_of, shown

CONTEXT = 64
Warned = Callable[[], str]
HI, HELLO, HEY = by("user", "Hi"), by("assistant", "Hello."), by("assistant", "Hey")


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    """A ChatML renderer."""
    return chat_of(tmp_path_factory.mktemp("chatml"))


@pytest.fixture
def warned(capsys: pytest.CaptureFixture[str]) -> Warned:
    """Return the log since the last call."""
    configure_logging("warning")
    return lambda: capsys.readouterr().err


def write(file: Path, *rows: dict[str, Any]) -> str:
    """Write rows as lines of JSON."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def read(data: SupervisedDataConfig, file: str, chat: ChatRenderer, context: int = CONTEXT) -> list[list[list[str]]]:
    """Return every example of a file as text: each answer's rows."""
    examples = data.load_examples("data.train", [file], chat, context)
    return [[shown(chat, answer) for answer in examples[n]] for n in range(len(examples))]


def refused(data: SupervisedDataConfig, file: str, chat: ChatRenderer) -> str:
    """Return the error that refuses a file."""
    with pytest.raises(DataError) as refusal:
        data.load_examples("data.train", [file], chat, CONTEXT)
    return str(refusal.value)


# -- demonstrations ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [HI, HELLO]},
        {"prompt": [HI], "completion": [HELLO]},
        {"prompt": [HI], "completion": "Hello."},
        {"prompt": "of another use", "messages": [HI, HELLO]},
    ],
)
def test_all_forms_of_a_conversation_give_the_same_example(
    row: dict[str, Any], chat: ChatRenderer, tmp_path: Path
) -> None:
    (((text,),),) = read(DemonstrationDataConfig(), write(tmp_path / "a.jsonl", row), chat)
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n[Hello.<|im_end|>]"


def test_text_is_continued_and_plain_text_is_learned(chat: ChatRenderer, tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", {"prompt": "2 +", "completion": " 2"}, {"text": "2 + 2"})
    assert read(DemonstrationDataConfig(), file, chat) == [[["2 +[ 2<|im_end|>]"]], [["2[ + 2<|im_end|>]"]]]


def test_columns_are_named_also_inside_mappings(chat: ChatRenderer, tmp_path: Path) -> None:
    columns = DemonstrationColumns(prompt="q", completion="meta.answer")
    file = write(tmp_path / "a.jsonl", {"q": "2 +", "meta": {"answer": " 2"}})
    assert read(DemonstrationDataConfig(columns=columns), file, chat) == [[["2 +[ 2<|im_end|>]"]]]


def test_the_last_answer_is_what_is_learned_in_every_form(chat: ChatRenderer, tmp_path: Path) -> None:
    more = [HELLO, HI, HEY]
    rows = [
        {"messages": [HI, *more]},
        {"prompt": [HI], "completion": more},
        {"messages": [HI, *more, HI]},  # an answer is the last one also where another message follows it
        {"prompt": [HI], "completion": [*more, HI]},
    ]
    read_rows = read(DemonstrationDataConfig(train_on="last"), write(tmp_path / "a.jsonl", *rows), chat)
    assert len(read_rows) == len(rows)
    for ((text,),) in read_rows:
        assert text.count("[") == 1 and text.endswith("[Hey<|im_end|>]")


def test_nulls_of_tables_count_as_missing_keys(chat: ChatRenderer, tmp_path: Path) -> None:
    rows = [{"messages": [HI, {**HELLO, "name": None}], "tools": None}, {"messages": [HI, {**HEY, "name": "me"}]}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert len(read(DemonstrationDataConfig(), str(tmp_path / "a.parquet"), chat)) == 2


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"question": "?", "answer": "!"},
            "nor `prompt` with `completion`, nor `text`; it has question, answer",
        ),
        ({"prompt": "?"}, "neither `messages`"),
        ({"prompt": "?", "completion": [HELLO]}, "a prompt of text and an answer of messages"),
        ({"prompt": 3, "completion": "x"}, "row 0 has a value of type int for a prompt"),
        ({"prompt": "?", "completion": 3}, "row 0 has a value of type int for a completion"),
        ({"messages": "Hi"}, "row 0 has a text for its `messages`"),
        ({"messages": [{"from": "human"}]}, "for message 0 of its conversation"),
        ({"messages": [by("robot", "?"), HELLO]}, "row 0: Message 0 of the conversation has the role 'robot'"),
        ({"text": 3}, "row 0 has a value of type int for its `text`"),
        ({"messages": [HI, HELLO], "tools": "{"}, "row 0 has tools that are not JSON"),
    ],
)
def test_a_row_without_a_demonstration_is_reported(
    row: dict[str, Any], message: str, chat: ChatRenderer, tmp_path: Path
) -> None:
    assert message in refused(DemonstrationDataConfig(), write(tmp_path / "a.jsonl", row), chat)


def test_messages_for_a_model_without_a_template_are_refused(tmp_path: Path) -> None:
    bare, file = chat_of(tmp_path / "bare", None), write(tmp_path / "a.jsonl", {"messages": [HI, HELLO]})
    with pytest.raises(ConfigError, match=r"no chat template.*`chat\.template`"):
        read(DemonstrationDataConfig(), file, bare)


def test_reasoning_that_a_template_hides_is_reported(chat: ChatRenderer, tmp_path: Path, warned: Warned) -> None:
    thought = {**HELLO, "reasoning_content": "Greet."}
    file = write(tmp_path / "a.jsonl", {"messages": [HI, thought]}, {"messages": [HI, HELLO]})
    read(DemonstrationDataConfig(), file, chat)
    assert "1 of 2 rows in data.train have reasoning beside their answers" in warned()
    read(DemonstrationDataConfig(), file, chat_of(tmp_path / "thinking", "qwen3"))
    assert "reasoning" not in warned()


# -- preferences ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [HI], "chosen": "Hello.", "rejected": "Hey"},
        {"prompt": [HI], "chosen": [HELLO], "rejected": [HEY]},
        {"prompt": [HI], "chosen": [HI, HELLO], "rejected": [HI, HEY]},
        {"prompt": "Hi", "chosen": [HI, HELLO], "rejected": [HI, HEY]},
        {"chosen": [HI, HELLO], "rejected": [HI, HEY]},
    ],
)
def test_all_forms_of_a_pair_give_the_same_example(row: dict[str, Any], chat: ChatRenderer, tmp_path: Path) -> None:
    (((chosen,), (rejected,)),) = read(PreferenceDataConfig(), write(tmp_path / "a.jsonl", row), chat)
    prefix = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert (chosen, rejected) == (f"{prefix}[Hello.<|im_end|>]", f"{prefix}[Hey<|im_end|>]")


def test_pairs_of_text_may_begin_with_their_prompt(chat: ChatRenderer, tmp_path: Path) -> None:
    prompt = "\n\nHuman: What is 2 + 2?\n\nAssistant:"
    file = write(tmp_path / "a.jsonl", {"chosen": f"{prompt} It is 4.", "rejected": f"{prompt} It may be 5."})
    assert read(PreferenceDataConfig(), file, chat) == [
        [[f"{prompt} It[ is 4.<|im_end|>]"], [f"{prompt} It[ may be 5.<|im_end|>]"]]
    ]


@given(st.text("ab \n", max_size=12), st.text("ab \n", max_size=6), st.text("ab \n", max_size=6))
def test_the_common_prefix_of_two_texts_ends_between_words_and_leaves_both_an_answer(
    prefix: str, one: str, other: str
) -> None:
    a, b = prefix + one, prefix + other
    examples = shared_prefix(a, b)
    for text in (a, b):
        rest = text[len(examples) :]
        assert text.startswith(examples) and (rest or not text)
        assert not examples or rest[0].isspace() or examples[-1:].isspace(), "no word is cut in two"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "?", "chosen": "!"}, "row 0 has no column `rejected`; it has prompt, chosen"),
        ({"prompt": "?", "better": "!"}, "such as `data.columns.chosen=better`"),
        ({"chosen": "yes", "rejected": "no"}, "has no prompt, and its two answers have no common beginning"),
        ({"chosen": [HELLO], "rejected": [HEY]}, "without a common first message"),
        ({"prompt": "Hi", "chosen": [HELLO], "rejected": [HEY]}, "without a common first message"),
        ({"prompt": "Hi", "chosen": "x", "rejected": [HEY]}, "one answer as text and one as messages"),
    ],
)
def test_a_row_without_a_comparison_is_reported(
    row: dict[str, Any], message: str, chat: ChatRenderer, tmp_path: Path
) -> None:
    assert message in refused(PreferenceDataConfig(), write(tmp_path / "a.jsonl", row), chat)


def test_a_named_column_that_is_missing_is_reported(chat: ChatRenderer, tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", {"chosen": "a b", "rejected": "a c"})
    message = refused(PreferenceDataConfig(columns=PreferenceColumns(prompt="question")), file, chat)
    assert "no column `question`; it has chosen, rejected" in message


# -- rows that are left out -------------------------------------------------------------------------------------------

LONG = {"prompt": "a" * 9, "completion": "b" * 9}


def test_rows_that_are_too_long_are_left_out_cut_or_refused(chat: ChatRenderer, tmp_path: Path, warned: Warned) -> None:
    file = write(tmp_path / "a.jsonl", {"prompt": "a", "completion": "b"}, LONG)
    assert len(read(DemonstrationDataConfig(max_tokens=12), file, chat)) == 1
    message = warned()
    assert "1 of 2 rows in data.train are longer than `data.max_tokens=12`: left out. The first is" in message
    assert "a.jsonl, row 1" in message
    truncated = read(DemonstrationDataConfig(max_tokens=12, overlong="truncate"), file, chat)
    assert truncated[1] == [["a" * 9 + "[bbb]"]] and ": cut at the end." in warned()
    message = refused(DemonstrationDataConfig(max_tokens=12, overlong="error"), file, chat)
    assert "row 1 has 19 tokens; 12 are allowed" in message


def test_a_row_that_is_cut_to_nothing_is_left_out(chat: ChatRenderer, tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", {"prompt": "a", "completion": "b"}, LONG)
    examples = DemonstrationDataConfig(max_tokens=9, overlong="truncate").load_examples(
        "data.train", [file], chat, CONTEXT
    )
    counts = examples.skip_metrics().reduce()
    assert len(examples) == 1 and counts == {"overlong_rows": 1, "skipped_rows": 1}


def test_without_a_limit_the_context_is_one(chat: ChatRenderer, tmp_path: Path, warned: Warned) -> None:
    file = write(tmp_path / "a.jsonl", {"prompt": "a", "completion": "b"}, LONG)
    assert len(read(DemonstrationDataConfig(), file, chat, context=19)) == 2
    assert len(read(DemonstrationDataConfig(), file, chat, context=18)) == 1
    assert "longer than this model's context of 18 tokens" in warned()
    with pytest.raises(ConfigError, match=r"`data\.max_tokens=19` does not fit into this model's context of 18"):
        read(DemonstrationDataConfig(max_tokens=19), file, chat, context=18)


def test_rows_with_nothing_to_learn_are_left_out_and_reported(
    chat: ChatRenderer, tmp_path: Path, warned: Warned
) -> None:
    good = {"prompt": "a", "completion": "b"}
    file = write(tmp_path / "a.jsonl", {"prompt": "a", "completion": ""}, good, {"prompt": "a", "completion": None})
    assert len(read(DemonstrationDataConfig(), file, chat)) == 1
    assert "2 of 3 rows in data.train have nothing to learn: left out. The first is" in warned()


def test_pairs_of_equal_answers_are_left_out_and_reported(chat: ChatRenderer, tmp_path: Path, warned: Warned) -> None:
    pairs = [("b", "b"), ("b", "c"), ("b", ""), ("", "")]
    rows = [{"prompt": "a", "chosen": one, "rejected": other} for one, other in pairs]
    assert len(read(PreferenceDataConfig(), write(tmp_path / "a.jsonl", *rows), chat)) == 1
    message = warned()
    assert "1 of 4 rows in data.train prefer an answer to itself: left out" in message
    assert "2 of 4 rows in data.train have nothing to learn: left out" in message


def test_files_without_usable_rows_are_refused(chat: ChatRenderer, tmp_path: Path) -> None:
    rows = [{"prompt": "a", "chosen": "b", "rejected": "b"}, {"prompt": "a", "chosen": "", "rejected": "b"}]
    message = refused(PreferenceDataConfig(), write(tmp_path / "a.jsonl", *rows), chat)
    assert "None of the 2 rows in data.train can be learned from" in message
    assert (
        "with nothing to learn: 1; preferring an answer to itself: 1" in message
        and "row 0 prefers an answer" in message
    )


def test_a_callback_runs_for_every_row_that_is_read(chat: ChatRenderer, tmp_path: Path) -> None:
    calls: list[int] = []
    file = write(tmp_path / "a.jsonl", *[{"prompt": "a", "completion": "b", "data_source": "x"}] * 3)
    examples = DemonstrationDataConfig().load_examples("data.train", [file], chat, CONTEXT, lambda: calls.append(1))
    assert len(calls) == 3 and examples.sources() == ["x"] * 3


def test_an_error_names_the_row_of_its_file(chat: ChatRenderer, tmp_path: Path) -> None:
    files = [
        write(tmp_path / f"{n}.jsonl", {"messages": [by(role, "?"), HELLO]}) for n, role in enumerate(("user", "x"))
    ]
    with pytest.raises(ChatError, match=r"1\.jsonl, row 0: Message 0"):
        DemonstrationDataConfig().load_examples("data.train", files, chat, CONTEXT)
