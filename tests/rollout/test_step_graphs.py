"""Steps as graphs draw the tokens of steps without graphs, also after weights have changed or moved."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from etude.models import Model
from etude.records import Completion
from etude.rollout import engine_steps
from etude.rollout.step_graphs import EagerSteps, GraphSteps
from etude.rollout.torch_engine import TorchEngine
from tests.rollout.engines import model_of
from tests.rollout.recorded_graphs import RecordedCuda, recorded_cuda
from tests.rollout.test_step_pipeline import PROMPTS, SAMPLINGS, assert_alike, static_engine

COUNT = 10
"""The requests of a test: one of each kind."""


def play(engine: TorchEngine) -> list[Completion]:
    return engine.generate_all([PROMPTS[row % 5] for row in range(COUNT)], SAMPLINGS[:COUNT])


def count_graphs(engine: TorchEngine) -> float:
    return engine.stats().reduce()["engine/graphs"]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[RecordedCuda]:
    """Graphs as on a GPU, recorded on a CPU."""
    with recorded_cuda(monkeypatch) as recorded:
        monkeypatch.setattr(engine_steps, "create_launcher", GraphSteps)
        yield recorded


@pytest.fixture
def model() -> Model:
    return model_of(layers=1)


def expected_of(model: Model, version: int = 0) -> list[Completion]:
    with static_engine(model, static=False) as engine:
        asyncio.run(engine.update_weights((), version))
        return play(engine)


def test_a_graph_is_captured_once_for_each_shape_and_draws_the_same_tokens(cuda: RecordedCuda, model: Model) -> None:
    expected = expected_of(model)
    with static_engine(model, max_num_seqs=16) as engine:
        assert_alike(play(engine), expected)
        captures = list(cuda.captures)
        assert_alike(play(engine), expected)
        assert cuda.captures == captures and count_graphs(engine) == len(captures) > 2
    assert {capture.capture_error_mode for capture in captures} == {"thread_local"}, "other threads use the GPU too"
    assert {capture.pool for capture in captures} == {1}
    assert all(capture.warmed_up for capture in captures)


@pytest.mark.slow
def test_weights_changed_in_place_are_read_by_the_same_graphs(cuda: RecordedCuda, model: Model) -> None:
    with static_engine(model, max_num_seqs=16) as engine:
        play(engine)
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(1.05)
        asyncio.run(engine.update_weights((), 1))
        assert_alike(play(engine), expected_of(model, 1))
        assert count_graphs(engine) == len(cuda.captures), "none was dropped"


@pytest.mark.slow
def test_graphs_are_dropped_if_a_weight_has_moved_and_in_sleep(cuda: RecordedCuda, model: Model) -> None:
    expected = expected_of(model, 1)
    with static_engine(model, max_num_seqs=16) as engine:
        play(engine)
        before = count_graphs(engine)
        norm = model.module.model.norm.weight
        norm.data = norm.data.clone()
        asyncio.run(engine.update_weights((), 1))
        assert count_graphs(engine) == 0
        assert_alike(play(engine), expected)
        assert count_graphs(engine) == before and {capture.pool for capture in cuda.captures} == {1, 2}
        asyncio.run(engine.sleep())
        asyncio.run(engine.wake())
        assert "engine/graphs" not in engine.stats().reduce()
        assert_alike(play(engine), expected)


def test_a_device_that_captures_no_step_has_each_operation_launched(
    cuda: RecordedCuda, model: Model, caplog: pytest.LogCaptureFixture
) -> None:
    expected = expected_of(model)
    cuda.fails = True
    with static_engine(model, max_num_seqs=16) as engine:
        assert_alike(play(engine), expected)
        assert count_graphs(engine) == 0 and len(cuda.captures) == 1
    assert "captures no step, so each operation is launched: operation not permitted" in caplog.text


@contextmanager
def launched_by_operation(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(engine_steps, "create_launcher", EagerSteps)
        yield


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_graphs_of_a_gpu_draw_what_its_operations_draw(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits are equal, because the kernels are. New weights are read where they are."""
    model = model_of(layers=3).copy(device="cuda", dtype=dtype)
    options: dict[str, Any] = {"static": True, "max_num_seqs": 16}
    with static_engine(model, **options) as graphs, static_engine(model, **options) as operations:
        for version in (1, 2):
            asyncio.run(graphs.update_weights((), version))
            asyncio.run(operations.update_weights((), version))
            drawn = play(graphs)
            assert count_graphs(graphs) > 2
            with launched_by_operation(monkeypatch):
                expected = play(operations)
            for answer, other in zip(drawn, expected, strict=True):
                assert answer.ids.tolist() == other.ids.tolist() and answer.logp.tolist() == other.logp.tolist()
            with torch.no_grad():
                for weight in model.parameters():
                    weight.mul_(1.05)
