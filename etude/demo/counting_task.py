"""The task of the vision demo: count the squares, or the circles, of a picture.

picture     one to four squares and one to four circles in three colours, on a grid that is not quite regular
question    `squares?` or `circles?`; the other shapes do not count
answer      one digit
"""

from __future__ import annotations

import base64
import io
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

from PIL import Image, ImageDraw

SIDE = 32
"""The width and the height of a picture, in pixels."""
MOST = 4
"""The most shapes of a kind."""
SQUARES, CIRCLES = "squares?", "circles?"
QUESTIONS = (SQUARES, CIRCLES)
PER_SIDE = 4
"""The rows, and the columns, of the grid on which shapes are drawn."""
_CELL = SIDE // PER_SIDE
_COLOURS = ("red", "blue", "green")


class Shape(NamedTuple):
    """A shape of a picture, by its place on the grid."""

    row: int
    column: int
    kind: str
    """The question that counts it."""
    colour: str


class Puzzle(NamedTuple):
    """A picture with a question about it."""

    picture: bytes
    """A PNG file."""
    question: str
    answer: int
    """The right answer."""
    shapes: tuple[Shape, ...]


def puzzles(seed: int, *, held_out: bool) -> Iterator[Puzzle]:
    """Iterate over random puzzles, for ever. Held-out ones are others than those for training."""
    generator = random.Random(f"{seed} {'held out' if held_out else 'training'}")
    while True:
        yield _draw(generator)


def make_rows(seed: int, count: int, *, held_out: bool) -> Iterator[dict[str, Any]]:
    """Yield the rows of so many tasks."""
    for _, puzzle in zip(range(count), puzzles(seed, held_out=held_out), strict=False):
        yield {
            "prompt": [{"role": "user", "content": f"<image>{puzzle.question}"}],
            "images": [_data_url(puzzle.picture)],
            "ground_truth": str(puzzle.answer),
        }


def _data_url(picture: bytes) -> str:
    """Return the picture as an address that contains it."""
    return f"data:image/png;base64,{base64.b64encode(picture).decode()}"


def _draw(generator: random.Random) -> Puzzle:
    counts = {question: generator.randint(1, MOST) for question in QUESTIONS}
    cells = iter(generator.sample(range(PER_SIDE**2), sum(counts.values())))
    shapes = [
        Shape(*divmod(next(cells), PER_SIDE), question, generator.choice(_COLOURS))
        for question, count in counts.items()
        for _ in range(count)
    ]
    picture = Image.new("RGB", (SIDE, SIDE), "white")
    canvas = ImageDraw.Draw(picture)
    for shape in shapes:
        left = _CELL * shape.column + generator.randint(0, 1)
        top = _CELL * shape.row + generator.randint(0, 1)
        box = (left, top, left + _CELL - 2, top + _CELL - 2)
        if shape.kind == SQUARES:
            canvas.rectangle(box, fill=shape.colour)
        else:
            canvas.ellipse(box, fill=shape.colour)
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    asked = generator.choice(QUESTIONS)
    return Puzzle(buffer.getvalue(), asked, counts[asked], tuple(shapes))
