"""Spans and keys of images: prompts of equal ids and other images differ."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from etude.images import ImageSpan, check_spans, image_digest, keyed_ids
from etude.records import Completion, Turn

A, B = image_digest(b"a"), image_digest(b"b")
IDS = np.array([5, 9, 9, 9, 6, 9], np.int32)


def test_keys_follow_the_image_and_the_place_of_the_feature() -> None:
    keys = keyed_ids(IDS, [ImageSpan(A, 1, 4)])
    assert keys[[0, 4, 5]].tolist() == [5, 6, 9], "a sampled placeholder outside of spans is a word like any other"
    assert (keys[1:4] < 0).all() and len(set(keys[1:4].tolist())) == 3
    assert not np.isin(keyed_ids(IDS, [ImageSpan(B, 1, 4)])[1:4], keys[1:4]).any()
    parts = keyed_ids(IDS, [ImageSpan(A, 1, 2), ImageSpan(A, 2, 4, first=1)])
    assert np.array_equal(parts, keys), "the cut of an image into spans changes nothing"
    assert keyed_ids(IDS, ()) is IDS


def test_spans_must_be_sorted_and_inside() -> None:
    assert check_spans("Turn.images", [ImageSpan(A, 1, 4)], 6) == (ImageSpan(A, 1, 4),)
    for wrong in ([ImageSpan(A, 1, 7)], [ImageSpan(A, 2, 4), ImageSpan(B, 3, 5)], [ImageSpan(A, 2, 2)]):
        with pytest.raises(ValueError, match=r"Turn.images has the tokens .* of an image"):
            check_spans("Turn.images", wrong, 6)


def test_a_turn_keeps_its_images_when_pickled() -> None:
    completion = Completion(ids=[3], logp=[-1.0], version=[0], finish_reason="stop")  # type: ignore[arg-type]
    turn = Turn(prompt=IDS, completion=completion, index=0, images=(ImageSpan(A, 1, 4),))
    assert pickle.loads(pickle.dumps(turn)).images == turn.images
    with pytest.raises(ValueError, match=r"among 6 tokens"):
        Turn(prompt=IDS, completion=completion, index=0, images=(ImageSpan(A, 4, 8),))
