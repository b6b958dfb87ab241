"""Examples that are token ids already: what a model read and wrote, as it was, with nothing tokenised again.

A row of tokens is a mapping of two lists: `input_ids`, and `assistant_masks`, which is 1 at what is learned. So
`etude export rollouts` writes what a run drew. What ids mean is said by the vocabulary that they are of: a file that
names another than the model's is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from etude.chat import Tokenizer
from etude.data.lessons import Answer, Row
from etude.errors import DataError

__all__ = ["IDS", "MASKS", "VOCABULARY", "exact", "last_learned", "same_vocabulary"]

IDS, MASKS = "input_ids", "assistant_masks"
VOCABULARY = "vocabulary"
"""The column that names the vocabulary, as `Tokenizer.vocabulary` does."""


def exact(value: Any, tokenizer: Tokenizer, where: str) -> Answer:
    """What is learned of a row of tokens, or of several rows that are one conversation, in the order of time."""
    rows: list[Row] = []
    for each in value if isinstance(value, list) else [value]:
        row = _row(each, tokenizer, where, int(rows[-1].turn.max()) + 1 if rows else 0)
        if row.learned:
            rows.append(row)
    return tuple(rows)


def same_vocabulary(row: Mapping[str, Any], tokenizer: Tokenizer, where: str) -> None:
    """Refuse ids that mean other tokens to this model."""
    named = row.get(VOCABULARY)
    if named is not None and named != tokenizer.vocabulary:
        raise DataError(
            f"{where} has token ids of another vocabulary ({named}) than the tokenizer in {tokenizer.directory} "
            f"({tokenizer.vocabulary}): they would be other words. Choose a model of the same family, or write the "
            f"rollouts as text: `etude export rollouts RUN FILE --form text`."
        )


def last_learned(answer: Answer) -> Answer:
    """The same, with nothing learned but the last stretch."""
    if not answer:
        return ()
    last = answer[-1]
    turn = last.turn[last.action].max()
    return (Row(last.ids, last.action & (last.turn == turn), last.turn),)


def _row(value: Any, tokenizer: Tokenizer, where: str, first: int) -> Row:
    """One row, whose answers are numbered from `first`."""
    if not isinstance(value, Mapping) or not {IDS, MASKS} <= value.keys():
        raise DataError(f"{where} has tokens without `{IDS}` and `{MASKS}`: both are lists, of the same length.")
    ids, mask = _whole(value[IDS], IDS, where), _whole(value[MASKS], MASKS, where)
    if len(ids) != len(mask):
        raise DataError(f"{where} has {len(ids)} `{IDS}` and {len(mask)} `{MASKS}`: there is one for each token.")
    if len(ids) and not 0 <= ids.min() <= ids.max() < tokenizer.size:
        wrong = int(ids.min() if ids.min() < 0 else ids.max())
        raise DataError(
            f"{where} has the token id {wrong}, and the tokenizer in {tokenizer.directory} has {tokenizer.size} "
            f"tokens: these ids are of another model."
        )
    learned = mask != 0
    learned[:1] = False  # nothing predicts the first token
    begins = learned & ~np.concatenate([[False], learned[:-1]])
    turn = np.where(learned, first + np.cumsum(begins) - 1, 0)
    return Row(ids.astype(np.int32), learned, turn.astype(np.int16))


def _whole(values: Any, name: str, where: str) -> NDArray[np.int64]:
    """A list of whole numbers."""
    try:
        found = np.asarray(values if values is not None else [])
    except ValueError:
        found = np.asarray("")
    if found.ndim != 1 or (len(found) and found.dtype.kind not in "iub"):
        raise DataError(f"{where} has a `{name}` that is no list of whole numbers.")
    return found.astype(np.int64)
