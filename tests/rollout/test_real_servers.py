"""Real servers that are killed while they answer, or whose engine hangs: all requests are answered after the
restart."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from etude.records import SamplingParams
from tests.processes import descendants, gone
from tests.served import on, started
from tests.waits import blocked_until as until

COUNT, TOKENS = 8, 100
ENGINES = {"vllm": "VLLM::EngineCore", "sglang": "sglang::scheduler"}
"""The names of the engine's processes."""


@pytest.mark.soak
@pytest.mark.parametrize("kind", [pytest.param("vllm", marks=on("vllm"))])
def test_requests_of_a_killed_server_are_answered_completely(
    kind: str, served_models: tuple[Path, Path], tmp_path: Path
) -> None:
    """The answer has the same tokens. Those that had arrived are not requested again."""
    prompts = [np.arange(5, 12, dtype=np.int32) + n for n in range(COUNT)]
    sampling = [SamplingParams(max_tokens=TOKENS, min_tokens=TOKENS, temperature=0.0)] * COUNT
    with started(kind, served_models[0], tmp_path) as engine, ThreadPoolExecutor() as pool:
        wanted = engine.generate_all(prompts, sampling)
        (replica,), (server,) = engine.replicas, engine.servers
        assert replica._process.process is not None
        group, before = replica._process.process.pid, server.new_tokens
        pending = pool.submit(engine.generate_all, prompts, sampling)
        until(lambda: server.active_requests == COUNT and server.new_tokens >= before + 2 * COUNT)
        os.killpg(group, signal.SIGKILL)
        answers = pending.result(600)
        metrics = engine.stats().reduce()
    assert (
        metrics["engine/restarts"] == 1
        and metrics["engine/requests_resumed"] > COUNT / 2
        and metrics["engine/requests_restarted"] == 0
    )
    for answer, other in zip(answers, wanted, strict=True):
        assert answer.ids.tolist() == other.ids.tolist() and len(answer.ids) == TOKENS
        assert (
            np.allclose(answer.logp, other.logp, atol=2e-3) and answer.finish_reason == other.finish_reason == "length"
        )


def engine_of(pid: int, kind: str) -> int:
    """Return the engine process among all that this server has started."""
    names = {child: Path(f"/proc/{child}/comm").read_text().strip() for child in descendants(pid)}
    (engine,) = [child for child, name in names.items() if name and ENGINES[kind].startswith(name)]
    return engine


@pytest.mark.soak
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=on(kind)) for kind in ENGINES])
def test_a_server_whose_engine_hangs_is_restarted(
    kind: str, served_models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The HTTP process in front of it still reports that all is well."""
    monkeypatch.setattr("etude.rollout.health_check.MAX_SILENCE", 15.0)
    prompts = [np.arange(5, 12, dtype=np.int32) + n for n in range(COUNT)]
    sampling = [SamplingParams(max_tokens=8, min_tokens=8, temperature=0.0)] * COUNT
    with started(kind, served_models[0], tmp_path) as engine:
        wanted = engine.generate_all(prompts, sampling)
        (replica,) = engine.replicas
        assert replica._process.process is not None
        stopped = engine_of(replica._process.process.pid, kind)
        os.kill(stopped, signal.SIGSTOP)
        answers = engine.generate_all(prompts, sampling)
        assert gone(stopped) and engine.stats().reduce()["engine/restarts"] == 1
    assert [answer.ids.tolist() for answer in answers] == [other.ids.tolist() for other in wanted]
