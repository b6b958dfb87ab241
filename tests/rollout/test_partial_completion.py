"""An answer that several servers write: the requests to each, and the result."""

from __future__ import annotations

import numpy as np
import pytest

from etude.chat import Tokenizer
from etude.records import SamplingParams
from etude.rollout.partial_completion import PartialCompletion
from etude.rollout.server_backend import StreamChunk
from tests.worlds import make_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("characters")
    make_tokenizer(directory)
    return Tokenizer.load(directory)


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    encoded: list[int] = tokenizer.encode(text).tolist()
    return encoded


def test_another_server_continues_an_answer(tokenizer: Tokenizer) -> None:
    starts: list[None] = []
    sampling = SamplingParams(max_tokens=10, min_tokens=4, seed=7, stop=("end",))
    prompt = np.array(ids(tokenizer, "1+2="), np.int32)
    answer = PartialCompletion(prompt, sampling, limit=100, tokenizer=tokenizer, on_start=lambda: starts.append(None))
    remaining, params = answer.remaining_request(3)
    assert (remaining.tolist(), params) == (prompt.tolist(), sampling)
    answer.append(StreamChunk(ids(tokenizer, "the en"), [-0.5] * 6), 3)
    assert answer.take_delta().text == "the "  # the rest may be the beginning of a stop string
    assert not answer.finish_if_complete()
    remaining, params = answer.remaining_request(4)
    assert remaining.tolist() == ids(tokenizer, "1+2=the en")
    assert (params.max_tokens, params.min_tokens, params.seed) == (4, 0, 13)
    answer.append(StreamChunk(ids(tokenizer, "d"), [-0.25]), 4)  # its server sees no stop string
    done = answer.take_delta().completion
    assert done is not None and (done.text, done.finish_reason) == ("the ", "stop")
    assert done.version.tolist() == [3] * 6 + [4] and len(starts) == 1
    assert done.raw_logp is None  # no end could be sampled at first: not the model's own distribution


def test_versions_come_from_the_servers_report(tokenizer: Tokenizer) -> None:
    answer = PartialCompletion(np.array([5], np.int32), SamplingParams(max_tokens=5), limit=100, tokenizer=tokenizer)
    answer.remaining_request(1)
    answer.append(StreamChunk([5, 6], [-1.0, -1.0]), 1)
    answer.remaining_request(1)
    answer.append(
        StreamChunk([7, 8, 9], [-1.0] * 3, finish_reason="length", version_spans=[("1", 0, 1), ("2", 1, 3)]), 1
    )
    done = answer.take_delta().completion
    assert done is not None and done.version.tolist() == [1, 1, 1, 2, 2]
    assert done.raw_logp is not None and done.logp.tolist() == [-1.0] * 5


def test_an_answer_that_broke_off_at_its_end_is_complete(tokenizer: Tokenizer) -> None:
    end = tokenizer.eos_ids[0]
    for tokens, finish in (([5, end], "stop"), ([5, 6, 7], "length")):
        answer = PartialCompletion(
            np.array([5], np.int32), SamplingParams(max_tokens=3), limit=100, tokenizer=tokenizer
        )
        answer.append(StreamChunk(tokens, [-1.0] * len(tokens)), 0)
        assert answer.finish_if_complete() and answer.finish == finish


def test_greedy_tokens_are_certain_and_a_restart_drops_all(tokenizer: Tokenizer) -> None:
    answer = PartialCompletion(np.array([5], np.int32), SamplingParams(temperature=0), limit=4, tokenizer=tokenizer)
    answer.append(StreamChunk([5], [-1.0]), 0)
    answer.restart()
    assert answer.version is None and answer.remaining_request(2)[1].max_tokens == 3
    answer.append(StreamChunk([6, 7, 8], [-0.5] * 3, finish_reason="length"), 2)
    done = answer.take_delta().completion
    assert done is not None and done.ids.tolist() == [6, 7, 8] and done.logp.tolist() == [0.0] * 3
    assert done.raw_logp is not None and done.raw_logp.tolist() == [-0.5] * 3
