"""Records are immutable: typed arrays that cannot be changed after creation."""

from __future__ import annotations

import copy
import itertools
import math
import pickle

import numpy as np
import pytest

from etude.records import Completion, Rollout, Sample, SamplingParams, Turn, has_zero_variance


def test_lists_become_typed_read_only_arrays() -> None:
    completion = Completion(ids=[1, 2], logp=[-0.5, -1.0], version=[3, 3], finish_reason="stop")  # type: ignore[arg-type]
    assert completion.ids.dtype == np.int32 and completion.logp.dtype == np.float32
    with pytest.raises(ValueError, match="read-only"):
        completion.ids[0] = 7


def test_a_record_does_not_follow_the_array_it_was_made_from() -> None:
    prompt = np.array([1, 2], np.int32)
    completion = Completion(ids=[3], logp=[-1.0], version=[0], finish_reason="stop")  # type: ignore[arg-type]
    turn = Turn(prompt=prompt, completion=completion, index=0)
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
        Completion(ids=ids, logp=[0.0, 0.0], version=[0, 0], finish_reason="stop")  # type: ignore[arg-type]


def test_a_record_stays_read_only_when_it_is_copied_or_sent() -> None:
    completion = Completion(ids=[1, 2], logp=[-0.5, -1.0], version=[3, 3], finish_reason="stop")  # type: ignore[arg-type]
    turn = Turn(prompt=np.array([1, 2]), completion=completion, index=0)
    for other in (copy.deepcopy(turn), pickle.loads(pickle.dumps(turn))):
        assert other.prompt.tolist() == [1, 2] and not other.prompt.flags.writeable
        assert not other.completion.logp.flags.writeable


def test_a_read_only_view_of_another_array_is_copied() -> None:
    array = np.array([1, 2], np.int32)
    window = array.view()
    window.setflags(write=False)
    completion = Completion(ids=[3], logp=[-1.0], version=[0], finish_reason="stop")  # type: ignore[arg-type]
    turn = Turn(prompt=window, completion=completion, index=0)
    array[0] = 99
    assert turn.prompt.tolist() == [1, 2]


def test_mappings_are_copied() -> None:
    parts = {"right": 1.0}
    rollout = Rollout(id=0, task=0, group=0, reward=1.0, parts=parts)
    parts["right"] = 7.0
    assert rollout.parts == {"right": 1.0}


def test_a_log_prob_too_large_for_its_type_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Completion.logp has values that do not fit into float32"):
        Completion(ids=[1], logp=[-1e300], version=[0], finish_reason="stop")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("parameters", "sentence"),
    [
        ({"temperature": -1.0}, "SamplingParams.temperature must be 0 or more, and finite; -1.0 was given"),
        (
            {"logit_bias": {5: math.nan}},
            "SamplingParams.logit_bias must be finite, or minus infinity; {5: nan} was given",
        ),
        ({"logit_bias": {5: math.inf}}, "SamplingParams.logit_bias must be finite, or minus infinity"),
        ({"top_p": 0.0}, "SamplingParams.top_p must be above 0 and at most 1"),
        ({"max_tokens": 0}, "SamplingParams.max_tokens must be 1 or more"),
        ({"min_tokens": 9, "max_tokens": 3}, "SamplingParams.min_tokens must be from 0 to max_tokens"),
    ],
)
def test_impossible_sampling_is_refused(parameters: dict[str, float], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        SamplingParams(**parameters)  # type: ignore[arg-type]


def test_an_unknown_finish_reason_is_refused() -> None:
    with pytest.raises(ValueError, match="one of stop, length, abort; 'banana' was given"):
        Completion(ids=[1], logp=[-1.0], version=[0], finish_reason="banana")  # type: ignore[arg-type]


@pytest.mark.parametrize("parts", [(1.0, -0.3, -0.7), (1.0, 0.1, -1.1, 0.2), (0.1, 0.2, -0.3)])
def test_the_order_of_parts_does_not_change_the_reward(parts: tuple[float, ...]) -> None:
    sums = [sum(some) for some in itertools.permutations(parts)]
    assert min(sums) < max(sums) and has_zero_variance(min(sums), max(sums))
    assert not has_zero_variance(0.0, 1e-12) and not has_zero_variance(1.0, 1.0 + 1e-12)
