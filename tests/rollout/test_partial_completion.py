"""An answer that several servers write: the requests to each, and the result."""

from __future__ import annotations

import numpy as np
import pytest

from etude.chat import Tokenizer
from etude.records import SamplingParams
from etude.rollout.partial_completion import PartialCompletion
from etude.rollout.server_backend import StreamChunk
from tests.worlds import make_tokenizer

V = 43


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
    answer = PartialCompletion(
        prompt, sampling, limit=100, vocab_size=V, tokenizer=tokenizer, on_start=lambda: starts.append(None)
    )
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
    answer = PartialCompletion(
        np.array([5], np.int32), SamplingParams(max_tokens=5), limit=100, vocab_size=V, tokenizer=tokenizer
    )
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
            np.array([5], np.int32), SamplingParams(max_tokens=3), limit=100, vocab_size=V, tokenizer=tokenizer
        )
        answer.append(StreamChunk(tokens, [-1.0] * len(tokens)), 0)
        assert answer.finish_if_complete() and answer.finish == finish


def test_greedy_tokens_are_certain_and_a_restart_drops_all(tokenizer: Tokenizer) -> None:
    answer = PartialCompletion(
        np.array([5], np.int32), SamplingParams(temperature=0), limit=4, vocab_size=V, tokenizer=tokenizer
    )
    answer.append(StreamChunk([5], [-1.0]), 0)
    answer.restart()
    assert answer.version is None and answer.remaining_request(2)[1].max_tokens == 3
    answer.append(StreamChunk([6, 7, 8], [-0.5] * 3, finish_reason="length"), 2)
    done = answer.take_delta().completion
    assert done is not None and done.ids.tolist() == [6, 7, 8] and done.logp.tolist() == [0.0] * 3
    assert done.raw_logp is not None and done.raw_logp.tolist() == [-0.5] * 3


def test_an_answer_has_the_sets_of_each_server_that_wrote_it(tokenizer: Tokenizer) -> None:
    """Banned tokens and early end tokens are in no set, whether or not the server leaves them out."""
    sampling = SamplingParams(
        max_tokens=4, min_tokens=1, stop_ids=(9,), logit_bias={7: -100.0}, top_k=3, support=True, alternatives=2
    )
    answer = PartialCompletion(np.array([5], np.int32), sampling, limit=100, vocab_size=V, tokenizer=None)
    first = StreamChunk([6], [-1.0], sets=[[6, 7, 9]], alternatives=[[(7, -0.5), (6, -1.0)]])
    answer.append(first, 0)
    answer.restart()
    answer.append(first, 1)
    delta = answer.take_delta()
    assert delta.support is not None and delta.support.mask(0, V).nonzero()[0].tolist() == [6]
    answer.remaining_request(1)
    answer.append(
        StreamChunk([9], [-1.0], finish_reason="stop", sets=[[8, 7, 9]], alternatives=[[(9, -1.0), (8, -2.0)]]), 1
    )
    delta = answer.take_delta()
    done = delta.completion
    assert done is not None and done.support is not None and delta.support is not None
    assert [done.support.mask(token, V).nonzero()[0].tolist() for token in (0, 1)] == [[6], [8, 9]]
    assert delta.support.sizes(V).tolist() == [2] and done.raw_logp is None
    assert done.alternative_ids is not None and done.alternative_ids.tolist() == [[6, 7], [9, 8]]
    assert done.alternative_logp is not None and done.alternative_logp.tolist() == [[-1.0, -np.inf], [-1.0, -2.0]]


def test_rules_alone_fill_the_sets_that_no_server_reports(tokenizer: Tokenizer) -> None:
    sampling = SamplingParams(max_tokens=3, min_tokens=1, stop_ids=(9,), logit_bias={7: -np.inf}, support=True)
    answer = PartialCompletion(np.array([5], np.int32), sampling, limit=100, vocab_size=V, tokenizer=None)
    answer.append(StreamChunk([6, 6, 9], [-1.0] * 3, finish_reason="stop"), 0)
    done = answer.take_delta().completion
    assert done is not None and done.support is not None and done.support.sizes(V).tolist() == [V - 2, V - 1, V - 1]
    assert not done.support.mask(0, V)[[7, 9]].any() and done.support.mask(1, V)[9]

    greedy = SamplingParams(max_tokens=2, temperature=0, top_p=0.5, support=True, alternatives=2)
    answer = PartialCompletion(np.array([5], np.int32), greedy, limit=100, vocab_size=V, tokenizer=None)
    reported = StreamChunk(
        [6, 8], [0.0] * 2, finish_reason="length", sets=[[6], [8]], alternatives=[[(6, 0.0)], [(8, 0.0)]]
    )
    answer.append(reported, 0)
    done = answer.take_delta().completion
    assert done is not None and done.support is not None and done.support.sizes(V).tolist() == [1, 1]
    assert done.raw_logp is None, "the server was asked for one token, and its log-probs say nothing of the model"
    assert done.alternative_logp is not None and done.alternative_logp.tolist() == [[0.0, -np.inf]] * 2
