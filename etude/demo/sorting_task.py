"""The language demo's task: put six digits in order. An answer is easy to check and hard to guess.

There are a million problems. A hash of the *answer* selects the held-out ones, so that a held-out problem, its answer,
or the same digits in another order never get into training. The teacher is unreliable: it mostly sorts in reverse
order. A model that imitates it knows both procedures, and the reward tells which one is right.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping

DIGITS = 6
TEACHER_RIGHT = 0.4
"""The share of right answers of the teacher."""
HELD_OUT = 10
"""One of this many answers is held out."""
ALPHABET = " 0123456789:orst"


def prompt_of(problem: str) -> str:
    """Return the prompt: `sort 582134:`."""
    return f"sort {problem}:"


def answer_to(problem: str) -> str:
    """Return the right answer."""
    return "".join(sorted(problem))


def is_held_out(problem: str) -> bool:
    """Return True if a problem is held out for evaluation."""
    return int.from_bytes(hashlib.sha256(answer_to(problem).encode()).digest()[:8], "big") % HELD_OUT == 0


def problems(seed: int, *, held_out: bool) -> Iterator[str]:
    """Iterate over endless problems, all of them held out or none."""
    generator = random.Random(f"{seed} {held_out}")
    while True:
        problem = f"{generator.randrange(10**DIGITS):0{DIGITS}}"
        if is_held_out(problem) == held_out:
            yield problem


def teacher_answer(problem: str, generator: random.Random) -> str:
    """Return the teacher's answer: the digits in order, or in reverse order."""
    right = answer_to(problem)
    return right if generator.random() < TEACHER_RIGHT else right[::-1]


def make_rows(seed: int, count: int, *, held_out: bool) -> list[Mapping[str, str]]:
    """Return distinct problems as dataset rows."""
    source, rows = problems(seed, held_out=held_out), dict[str, Mapping[str, str]]()
    while len(rows) < count:
        problem = next(source)
        rows[problem] = {"prompt": prompt_of(problem), "answer": answer_to(problem), "data_source": "sort"}
    return list(rows.values())
