from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.chat.reasoning import split_reasoning


@pytest.mark.parametrize(
    ("text", "opened", "reasoning", "answer"),
    [
        ("<think>\nhm\n</think>\n\n4", False, "hm", "4"),
        ("\n<think>hm</think>4", False, "hm", "4"),
        ("<think>\n\n</think>\n\n4", False, "", "4"),
        ("<think>\nhm and", False, "hm and", ""),
        ("hm\n</think>\n\n4", True, "hm", "4"),
        ("hm and", True, "hm and", ""),
        ("hm\n</think>\n\n4", False, "hm", "4"),
        ("4", False, "", "4"),
        (" 4\n", False, "", " 4\n"),
        ("", False, "", ""),
        ("so: <think>hm</think>", False, "", "so: <think>hm</think>"),
        ("<think>a</think>b</think>c", False, "a", "b</think>c"),
        ("<think> a \n b </think> c ", False, " a \n b ", " c "),
    ],
)
def test_thinking_is_told_apart(text: str, opened: bool, reasoning: str, answer: str) -> None:
    assert split_reasoning(text, opened) == (reasoning, answer)


@given(st.text(alphabet="ab \n<"), st.text(alphabet="ab \n<"))
def test_what_a_template_wrote_is_read_back(reasoning: str, answer: str) -> None:
    text = f"<think>\n{reasoning}\n</think>\n\n{answer}"
    assert split_reasoning(text) == (reasoning.strip("\n"), answer.lstrip("\n"))
