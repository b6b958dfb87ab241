from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.chat.reasoning import split_reasoning
from etude.chat.streaming import TextStreamParser


def parse(text: str, opened: bool | None) -> tuple[str, str]:
    """Return the reasoning in a text, and its content."""
    parser = TextStreamParser(None, supports_reasoning=True, reasoning_opened=opened)
    parser.push(text)
    parser.finish()
    return parser.message.reasoning, str(parser.message.content)


@pytest.mark.parametrize(
    ("text", "opened", "reasoning", "answer"),
    [
        ("<think>\nhm\n</think>\n\n4", False, "hm", "4"),
        ("\n<think>hm</think>4", False, "hm", "4"),
        ("\n <think>hm</think>4", True, "hm", "4"),
        ("<think>\n\n</think>\n\n4", False, "", "4"),
        ("<think>\nhm and\n\n", False, "hm and", ""),
        ("<think>\nhm and\n</thi", False, "hm and\n</thi", ""),
        ("<thi", False, "", "<thi"),
        ("<thi", True, "<thi", ""),
        ("hm\n</think>\n\n4", True, "hm", "4"),
        ("\n hm\n</think>\n\n4", True, " hm", "4"),
        ("hm and", True, "hm and", ""),
        ("hm\n</think>\n\n4", None, "hm", "4"),
        ("hm\n</think>\n\n4", False, "", "hm\n</think>\n\n4"),
        ("4", False, "", "4"),
        ("4", None, "", "4"),
        (" 4\n", False, "", " 4\n"),
        ("", False, "", ""),
        ("", True, "", ""),
        ("so: <think>hm</think>", False, "", "so: <think>hm</think>"),
        ("so: <think>hm</think>", None, "", "so: <think>hm</think>"),
        ("<think>a</think>b</think>c", False, "a", "b</think>c"),
        ("<think> a \n b </think> c ", False, " a \n b ", " c "),
    ],
)
def test_reasoning_is_separated(text: str, opened: bool | None, reasoning: str, answer: str) -> None:
    assert parse(text, opened) == (reasoning, answer)
    if opened is None:
        assert split_reasoning(text) == (reasoning, answer)


@given(st.text(alphabet="ab \n<"), st.text(alphabet="ab \n<"))
def test_reasoning_written_by_a_template_is_read_back(reasoning: str, answer: str) -> None:
    text = f"<think>\n{reasoning}\n</think>\n\n{answer}"
    assert split_reasoning(text) == parse(text, None) == (reasoning.strip("\n"), answer.lstrip("\n"))
