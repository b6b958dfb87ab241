"""Real servers that are killed while they answer: what is there is gone on with, once they are back."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from etude.records import SamplingParams
from tests.processes import started_by
from tests.rollout.test_served import until
from tests.served import on, started

COUNT, TOKENS = 8, 100


@pytest.mark.soak
@pytest.mark.parametrize("kind", [pytest.param("vllm", marks=on("vllm"))])
def test_what_a_server_was_killed_over_is_answered_whole(
    kind: str, served_models: tuple[Path, Path], tmp_path: Path
) -> None:
    """By the same tokens, of which those that had come are not asked for again."""
    prompts = [np.arange(5, 12, dtype=np.int32) + n for n in range(COUNT)]
    sampling = [SamplingParams(max_tokens=TOKENS, min_tokens=TOKENS, temperature=0.0)] * COUNT
    with started(kind, served_models[0], tmp_path) as engine, ThreadPoolExecutor() as pool:
        wanted = engine.generate_all(prompts, sampling)
        (replica,), (server,) = engine.replicas, engine.servers
        before = server.new_tokens
        asked = pool.submit(engine.generate_all, prompts, sampling)
        until(lambda: server.under_way == COUNT and server.new_tokens > before + COUNT * TOKENS / 10)
        assert replica._warden._keeper is not None
        os.killpg(started_by(replica._warden._keeper.pid), signal.SIGKILL)
        answers = asked.result(600)
        told = engine.stats().reduce()
    assert told["engine/restarts"] == 1 and told["engine/resumed"] > COUNT / 2 and told["engine/begun_anew"] == 0
    for answer, other in zip(answers, wanted, strict=True):
        assert answer.ids.tolist() == other.ids.tolist() and len(answer.ids) == TOKENS
        assert np.allclose(answer.logp, other.logp, atol=2e-3) and answer.finish == other.finish == "length"
