"""What the demonstration teaches: to put six digits in order. Everybody can check an answer; nobody can guess it.

There are a million problems. Which of them are held out is decided by a hash of the *answer*, so that neither a
held-out problem nor its answer, nor the same digits in another order, can ever slip into training. The teacher who
shows how it is done is unreliable: more often than not it sorts the wrong way round. A model that imitates it holds
both procedures; which of them is right is what the reward tells.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping

__all__ = [
    "DIGITS",
    "TEACHER_RIGHT",
    "answer_to",
    "is_held_out",
    "make_rows",
    "problems",
    "prompt_of",
    "teacher_answer",
]

DIGITS = 6
TEACHER_RIGHT = 0.4
"""How often the teacher's answer is right."""
HELD_OUT = 10
"""One answer of so many is never trained on."""
ALPHABET = " 0123456789:orst"


def prompt_of(problem: str) -> str:
    """What the model is asked: `sort 582134:`."""
    return f"sort {problem}:"


def answer_to(problem: str) -> str:
    """The right answer."""
    return "".join(sorted(problem))


def is_held_out(problem: str) -> bool:
    """Whether a problem is kept for scoring."""
    return int.from_bytes(hashlib.sha256(answer_to(problem).encode()).digest()[:8], "big") % HELD_OUT == 0


def problems(seed: int, *, held_out: bool) -> Iterator[str]:
    """Problems without end, all of them held out or none."""
    generator = random.Random(f"{seed} {held_out}")
    while True:
        problem = f"{generator.randrange(10**DIGITS):0{DIGITS}}"
        if is_held_out(problem) == held_out:
            yield problem


def teacher_answer(problem: str, generator: random.Random) -> str:
    """What the unreliable teacher writes down: the digits in order, or the wrong way round."""
    right = answer_to(problem)
    return right if generator.random() < TEACHER_RIGHT else right[::-1]


def make_rows(seed: int, count: int, *, held_out: bool) -> list[Mapping[str, str]]:
    """Different problems as rows of a dataset."""
    source, rows = problems(seed, held_out=held_out), dict[str, Mapping[str, str]]()
    while len(rows) < count:
        problem = next(source)
        rows[problem] = {"prompt": prompt_of(problem), "answer": answer_to(problem), "data_source": "sort"}
    return list(rows.values())
