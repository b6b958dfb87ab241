"""The published weights: checked against the first complete publish, one tensor at a time, cast on the way."""

from __future__ import annotations

from collections.abc import Generator, Iterator

import pytest
import torch
from torch import Tensor

from etude.errors import ConfigError
from etude.sync.weights import WeightManifest, WeightStream


def weights(*shapes: tuple[int, ...]) -> list[tuple[str, Tensor]]:
    return [(f"layer.{at}.weight", torch.full(shape, float(at))) for at, shape in enumerate(shapes)]


def test_the_first_complete_publish_defines_the_manifest() -> None:
    plan = WeightManifest()
    assert [name for name, _ in plan.check_weights(weights((2, 3), (4,)))] == ["layer.0.weight", "layer.1.weight"]
    assert len(list(plan.check_weights(weights((2, 3), (4,))))) == 2
    assert len(list(plan.check_weights(weights((2, 3)), partial=True))) == 1
    with pytest.raises(ConfigError, match=r"`layer.0.weight` is \[5\] now"):
        list(plan.check_weights(weights((5,)), partial=True))


@pytest.mark.parametrize(
    ("later", "complaint"),
    [
        (weights((2, 3)), "`layer.1.weight` is missing"),
        (weights((2, 3), (5,)), r"`layer.1.weight` is \[5\] now and was \[4\]"),
        (weights((2, 3), (4,), (1,)), "`layer.2.weight` is .* was not there"),
        ([*weights((2, 3), (4,)), *weights((2, 3))], "`layer.0.weight` comes twice"),
    ],
)
def test_weights_unlike_the_manifest_are_refused(later: list[tuple[str, Tensor]], complaint: str) -> None:
    plan = WeightManifest()
    list(plan.check_weights(weights((2, 3), (4,))))
    with pytest.raises(ConfigError, match=complaint):
        list(plan.check_weights(later))
    assert len(list(plan.check_weights(weights((2, 3), (4,))))) == 2, "the plan is as it was"


def test_an_interrupted_publish_defines_no_manifest() -> None:
    plan = WeightManifest()
    half = plan.check_weights(weights((2, 3), (4,)))
    assert isinstance(half, Generator)
    next(half)
    half.close()
    assert len(list(plan.check_weights(weights((7,))))) == 1


def test_a_publish_without_weights_is_refused() -> None:
    with pytest.raises(ConfigError, match="no weights"):
        list(WeightManifest().check_weights([]))


def test_a_stream_holds_one_tensor_and_casts_floats() -> None:
    made: list[str] = []

    def making() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights((2, 3), (4,)):
            made.append(name)
            yield name, tensor
        yield "counts", torch.arange(3)

    stream = WeightStream(making(), torch.bfloat16)
    assert stream.next_nbytes() == 12 and stream.next_nbytes() == 12 and made == ["layer.0.weight"]
    stream.advance()
    assert stream.next_nbytes() == 8 and len(made) == 2
    stream.advance()
    assert stream.next_nbytes() == 24, "integers travel as they are"
    stream.advance()
    assert stream.peek() is None and stream.next_nbytes() == 0
