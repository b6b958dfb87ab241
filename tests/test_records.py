"""Records are facts: typed arrays that nobody can change afterwards."""

from __future__ import annotations

import numpy as np
import pytest

from etude.records import Completion, Sample, Turn


def test_lists_become_typed_read_only_arrays() -> None:
    said = Completion(ids=[1, 2], logp=[-0.5, -1.0], version=[3, 3], finish="stop")  # type: ignore[arg-type]
    assert said.ids.dtype == np.int32 and said.logp.dtype == np.float32
    with pytest.raises(ValueError, match="read-only"):
        said.ids[0] = 7


def test_a_record_does_not_follow_the_array_it_was_made_from() -> None:
    prompt = np.array([1, 2], np.int32)
    said = Completion(ids=[3], logp=[-1.0], version=[0], finish="stop")  # type: ignore[arg-type]
    turn = Turn(prompt=prompt, completion=said, index=0)
    prompt[0] = 99
    assert turn.prompt.tolist() == [1, 2]


def test_columns_of_different_lengths_are_refused_with_their_lengths() -> None:
    with pytest.raises(ValueError, match=r"The sample of rollout 4 .*ids 2, action 2, logp 1"):
        Sample(
            ids=[1, 2],  # type: ignore[arg-type]
            action=np.array([False, True]),
            logp=[0.0],  # type: ignore[arg-type]
            version=[0, 0],  # type: ignore[arg-type]
            turn=[0, 0],  # type: ignore[arg-type]
            rollout=4,
        )


@pytest.mark.parametrize(
    ("ids", "sentence"),
    [
        ([[1, 2]], "Completion.ids must be one-dimensional"),
        ([1.5, 2.0], "Completion.ids must be int32; float64 cannot be cast"),
        ([2**40, 1], "Completion.ids has values that do not fit into int32"),
    ],
)
def test_ids_that_would_change_are_refused(ids: list[object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Completion(ids=ids, logp=[0.0, 0.0], version=[0, 0], finish="stop")  # type: ignore[arg-type]
