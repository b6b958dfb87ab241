"""The kernels by Triton's interpreter, and their compilation for GPUs, on a machine without one."""

from __future__ import annotations

import pytest

from etude.rollout.python_environments import PythonEnvironment
from tests.components import require_environment
from tests.models.kernels.triton_process import run_with_triton

pytestmark = pytest.mark.smoke


@pytest.fixture(scope="module")
def triton() -> PythonEnvironment:
    return require_environment("triton")


def test_kernels_compute_what_torch_does(triton: PythonEnvironment) -> None:
    outcomes = run_with_triton(triton, "tests.models.kernels.interpreted", interpret=True)
    assert len(outcomes) == 19
    assert not [f"{name}: {error}" for name, error in outcomes if error is not None]


def test_kernels_compile_for_gpus_without_spills(triton: PythonEnvironment) -> None:
    outcomes = run_with_triton(triton, "tests.models.kernels.compiled", "80", "90", "100")
    assert len(outcomes) == 3 * 7
    allowed = {"attention in float32": 16}  # four registers, on sm_80
    assert not [outcome for outcome in outcomes if outcome[2] > allowed.get(outcome[0], 0)]
