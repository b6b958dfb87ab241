"""Examples that are token ids already: exactly what a model read and wrote, without another tokenization.

A token row is a mapping of two lists: `input_ids`, and `assistant_masks` with 1 for each trained token. `etude export
rollouts` writes a run's rollouts in this form. Ids belong to one vocabulary, so a file that names another vocabulary
than the model's is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from etude.chat import Tokenizer
from etude.data.tokenization import AnswerRows, TokenRow
from etude.errors import DataError

INPUT_IDS, ASSISTANT_MASKS = "input_ids", "assistant_masks"
VOCABULARY_COLUMN = "vocabulary"
"""The column that names the vocabulary, as `Tokenizer.vocabulary` does."""


def load_token_rows(value: Any, tokenizer: Tokenizer, where: str) -> AnswerRows:
    """Return the token rows of a mapping, or of a list of mappings that are one conversation, in order of time."""
    rows: list[TokenRow] = []
    for item in value if isinstance(value, list) else [value]:
        row = _load_token_row(item, tokenizer, where, int(rows[-1].turn.max()) + 1 if rows else 0)
        if row.num_trained_tokens:
            rows.append(row)
    return tuple(rows)


def check_vocabulary(row: Mapping[str, Any], tokenizer: Tokenizer, where: str) -> None:
    """Refuse the ids of another vocabulary than the model's."""
    vocabulary = row.get(VOCABULARY_COLUMN)
    if vocabulary is not None and vocabulary != tokenizer.vocab_hash:
        raise DataError(
            f"{where} has token ids of another vocabulary ({vocabulary}) than the tokenizer in {tokenizer.directory} "
            f"({tokenizer.vocab_hash}): the ids would mean other tokens. Choose a model of the same family, or write "
            f"the rollouts as text: `etude export rollouts RUN FILE --form text`."
        )


def keep_last_answer(answer: AnswerRows) -> AnswerRows:
    """Return the last row, with only its last answer trained."""
    if not answer:
        return ()
    last = answer[-1]
    turn = last.turn[last.action].max()
    return (TokenRow(last.ids, last.action & (last.turn == turn), last.turn),)


def _load_token_row(value: Any, tokenizer: Tokenizer, where: str, first: int) -> TokenRow:
    """Load one row and number its answers from `first`."""
    if not isinstance(value, Mapping) or not {INPUT_IDS, ASSISTANT_MASKS} <= value.keys():
        raise DataError(
            f"{where} has tokens without `{INPUT_IDS}` and `{ASSISTANT_MASKS}`: both are lists, of the same length."
        )
    ids, mask = (
        _integer_array(value[INPUT_IDS], INPUT_IDS, where),
        _integer_array(value[ASSISTANT_MASKS], ASSISTANT_MASKS, where),
    )
    if len(ids) != len(mask):
        raise DataError(
            f"{where} has {len(ids)} `{INPUT_IDS}` and {len(mask)} `{ASSISTANT_MASKS}`: each token needs one of both."
        )
    if len(ids) and not 0 <= ids.min() <= ids.max() < tokenizer.vocab_size:
        invalid = int(ids.min() if ids.min() < 0 else ids.max())
        raise DataError(
            f"{where} has the token id {invalid}, and the tokenizer in {tokenizer.directory} has "
            f"{tokenizer.vocab_size} tokens: these ids are of another model."
        )
    trained = mask != 0
    trained[:1] = False  # no token predicts the first one
    starts = trained & ~np.concatenate([[False], trained[:-1]])
    turn = np.where(trained, first + np.cumsum(starts) - 1, 0)
    return TokenRow(ids.astype(np.int32), trained, turn.astype(np.int16))


def _integer_array(values: Any, name: str, where: str) -> NDArray[np.int64]:
    """Convert a list of whole numbers."""
    try:
        array = np.asarray(values if values is not None else [])
    except ValueError:
        array = np.asarray("")
    if array.ndim != 1 or (len(array) and array.dtype.kind not in "iub"):
        raise DataError(f"{where} has a `{name}` that is not a list of whole numbers.")
    return array.astype(np.int64)
