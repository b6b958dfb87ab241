"""Replies of SGLang with the tokens that could be drawn."""

from __future__ import annotations

from typing import Any

import pytest

from etude.errors import ConfigError, EngineError
from etude.records import SamplingParams
from etude.rollout.sglang import _parse_chunk

CUT = SamplingParams(top_p=0.9, top_k=4, support=True, alternatives=2)


def event(**meta: Any) -> dict[str, Any]:
    """Return the last event of an answer of three tokens, of which it brings the last two."""
    scores = [[-3.0, 31, None], [-4.0, 4, None]]
    finish = {"type": "length", "length": 3}
    return {"output_ids": [31, 4], "meta_info": {"output_token_logprobs": scores, "finish_reason": finish, **meta}}


def test_log_probs_and_alternatives_are_those_over_the_sets_of_the_new_tokens() -> None:
    """A server that sends whole lists repeats those of earlier tokens."""
    sets = [[25, 27], [25, 31, 7], [4]]
    logp = [[-0.5, -1.0], [-0.75, -1.5, -1.75], [0.0]]
    chunk = _parse_chunk(event(output_token_sampling_mask=sets, output_token_sampling_logprobs=logp), CUT, 1)
    assert chunk.sets == [[25, 31, 7], [4]] and chunk.logp == [-1.5, 0.0]
    assert chunk.alternatives == [[(25, -0.75), (31, -1.5)], [(4, 0.0)]] and chunk.finish_reason == "length"
    plain = _parse_chunk(event(), SamplingParams(), 1)
    assert plain.sets is None and plain.logp == [-3.0, -4.0]


def test_a_server_that_sends_no_sets_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"2 tokens with 0 sets of those that are left\. Use SGLang from 0\.5\.23"):
        _parse_chunk(event(), CUT, 1)


def test_a_log_prob_that_is_no_number_is_an_error_of_the_server() -> None:
    with pytest.raises(EngineError, match=r"SGLang computed no number for the log-prob of token 31\. It computes this"):
        _parse_chunk(event(output_token_logprobs=[[None, 31, None], [-4.0, 4, None]]), SamplingParams(), 1)
