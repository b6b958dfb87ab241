"""The experts that servers report: their forms in vLLM's and SGLang's replies, and what is refused."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from etude.errors import ConfigError, DataError
from etude.records import SamplingParams
from etude.rollout import SglangConfig, VllmConfig
from etude.rollout.partial_completion import PartialCompletion
from etude.rollout.reported_sets import Recording
from etude.rollout.server_backend import StreamChunk
from etude.rollout.sglang import _parse_routes as parse_sglang
from etude.rollout.vllm import _parse_routes as parse_vllm
from etude.token_routes import ServedRoutes, TokenRoutes

FORM = ServedRoutes(layers=(1, 2), all_layers=3, per_token=2, experts=4)
ASKED = SamplingParams(routes_start=5)
REPORTED = np.arange(4 * 3 * 2).reshape(4, 3, 2) % 4


def npy(array: NDArray[Any]) -> str:
    """Return an array as vLLM sends it."""
    buffer = io.BytesIO()
    np.save(buffer, array)
    return base64.b64encode(buffer.getvalue()).decode()


def test_both_servers_report_all_layers_of_which_those_with_experts_are_kept() -> None:
    from_vllm = parse_vllm(npy(REPORTED.astype(np.uint8)))
    from_sglang = parse_sglang(base64.b64encode(REPORTED.astype("<i4").tobytes()).decode())
    for config, reported in ((VllmConfig(), from_vllm), (SglangConfig(), from_sglang)):
        backend = config.create_backend(recording=Recording(routes=FORM))
        routes = backend.read_routes(reported, ASKED, "length")
        assert routes is not None and routes.start == 5 and routes.experts.dtype == np.uint8
        np.testing.assert_array_equal(routes.experts, REPORTED[:, 1:])
        assert backend.read_routes(None, ASKED, None) is None, "only the last chunk has them"
        with pytest.raises(ConfigError, match=r"was started without `--enable-return-routed-experts`. Start it with"):
            backend.read_routes(None, ASKED, "stop")
    assert parse_vllm(None) is None and parse_sglang(None) is None


def test_with_two_hundred_and_fifty_six_experts_each_choice_takes_two_bytes() -> None:
    """vLLM sends one byte, of which every value is an expert."""
    routes = ServedRoutes((0,), 1, 1, 256).read(np.array([[[255]]], np.uint8), 0, "vLLM")
    assert routes.experts.dtype == np.int16 and routes.spread(2).tolist() == [[255], [-1]]


def test_routes_of_another_model_are_refused() -> None:
    with pytest.raises(
        DataError, match=r"vLLM reports routes of the shape \[4, 3, 1\], .* has 3 layers, with 2 experts"
    ):
        FORM.read(REPORTED[:, :, :1], 0, "vLLM")
    with pytest.raises(DataError, match=r"SGLang reports the expert 7, .* from the experts 0 to 3"):
        FORM.read(REPORTED + 4, 0, "SGLang")


def answer(tokens: int) -> PartialCompletion:
    """Return an answer of so many tokens to a prompt of 6, from two servers: one broke off after the first token."""
    made = PartialCompletion(np.arange(6), ASKED, limit=99, vocab_size=99, tokenizer=None)
    made.append(StreamChunk([1], [-1.0]), 0)
    prompt, sampling = made.remaining_request(0)
    assert len(prompt) == 7 and sampling.routes_start == 5
    rest = tokens - 1
    routes = TokenRoutes(np.zeros((5, 2, 2), np.uint8), 5)
    made.append(StreamChunk([2] * rest, [-1.0] * rest, routes=routes, finish_reason="stop"), 0)
    return made


def test_the_server_that_ends_an_answer_reports_the_routes_of_all_of_it() -> None:
    completion = answer(5).take_delta().completion
    assert completion is not None and completion.routes is not None and completion.routes.start == 5
    with pytest.raises(DataError, match=r"routes of 5 tokens from 5 on, .* have 11 computed tokens"):
        answer(6).take_delta()
