"""Recurrences and short convolutions over a tree: each segment continues its parent, in states and in gradients."""

from __future__ import annotations

import functools
import inspect
from importlib import import_module

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv1d

from etude.models.recurrences import ANSWERS
from etude.models.states import NO_SLOT, Recurrence, Rows, SlotMemory, StateTree
from tests.families import config_of, family_model
from tests.models.packs import pack_of, paths

TREE = ((-1, 5), (0, 3), (0, 0), (2, 4), (0, 1), (4, 40), (-1, 0), (6, 2), (-1, 1), (3, 2))
"""Segments as (parent, length): empty ones, single tokens, an empty root, and four levels."""
CPU = torch.device("cpu")


def run(rows: Rows, first: Tensor | None) -> tuple[Tensor, Tensor]:
    """S ← exp(g) · S + x: the state is also the output."""
    decay, x = rows
    state = torch.zeros_like(x[:, 0]) if first is None else first
    outputs = []
    for place in range(x.shape[1]):
        state = decay[:, place].exp()[:, None] * state + x[:, place]
        outputs.append(state)
    return torch.stack(outputs, 1), state


RECURRENCE = Recurrence(run, run, neutral=(0, 1), products=1)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def tree_of(segments: tuple[tuple[int, int], ...], **slots: list[object]) -> StateTree:
    pack = pack_of(segments)
    return StateTree(pack.offsets.tolist(), pack.parent.tolist(), CPU, **slots)  # type: ignore[arg-type]


def test_a_tree_gives_the_states_of_its_rows_alone() -> None:
    pack = pack_of(TREE)
    decay, x = -random(len(pack.ids)).abs(), random(len(pack.ids), 3, seed=1)
    out = tree_of(TREE).scan(RECURRENCE, (decay, x))
    for row in paths(pack):
        if len(row):
            torch.testing.assert_close(out[row], run((decay[row][None], x[row][None]), None)[0][0], rtol=0, atol=1e-12)


def test_gradients_reach_the_inputs_of_all_ancestors() -> None:
    tree, count = tree_of(TREE), sum(length for _, length in TREE)
    inputs = (-random(count).abs().requires_grad_(), random(count, 2, seed=1).requires_grad_())
    assert torch.autograd.gradcheck(lambda *rows: tree.scan(RECURRENCE, rows), inputs, fast_mode=True)
    x, weight = random(3, count, seed=2).requires_grad_(), random(3, 1, 4, seed=3).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, w: tree.convolve(lambda row: convolved(row, w), x, 3), (x, weight))


def convolved(row: Tensor, weight: Tensor) -> Tensor:
    return conv1d(row[None], weight, padding=weight.shape[2] - 1, groups=len(row))[0, :, : row.shape[1]]


def test_a_convolution_sees_the_tokens_before_a_segment_also_beyond_a_short_parent() -> None:
    pack, weight = pack_of(TREE), random(3, 1, 4)
    x = random(3, len(pack.ids), seed=1)
    out = tree_of(TREE).convolve(lambda row: convolved(row, weight), x, 3)
    for row in paths(pack):
        if len(row):
            torch.testing.assert_close(out[:, row], convolved(x[:, row], weight), rtol=0, atol=1e-12)


def test_states_are_read_from_slots_before_they_are_written() -> None:
    """Two passes over three requests, the third a fork of the second, give what one pass over each row gives."""
    decay, x = -random(20).abs(), random(20, 2, seed=1)
    weight, kernel = random(2, 1, 4, seed=2), 3
    states, inputs = SlotMemory(4), SlotMemory(4)

    def compute(tree: StateTree, tokens: Tensor) -> tuple[Tensor, Tensor]:
        scanned = tree.scan(RECURRENCE, (decay[tokens], x[tokens]), states)
        return scanned, tree.convolve(lambda row: convolved(row, weight), x[tokens].T, kernel, inputs).T

    first = StateTree([0, 6, 7], [-1, -1], CPU, reads=[NO_SLOT] * 2, writes=[[3], [0, 1]])
    compute(first, torch.arange(7))
    second = StateTree([0, 1, 4, 5], [-1] * 3, CPU, reads=[3, 0, 1], writes=[[0], [1], [3]], steps=[True, False, True])
    scanned, convolved_rows = compute(second, torch.tensor([7, 8, 9, 10, 11]))
    for after, row in (([0], [*range(6), 7]), ([1, 2, 3], [6, 8, 9, 10]), ([4], [6, 11])):
        alone = run((decay[row][None], x[row][None]), None)[0][0]
        torch.testing.assert_close(scanned[after], alone[-len(after) :], rtol=0, atol=1e-12)
        wanted = convolved(x[row].T, weight).T
        torch.testing.assert_close(convolved_rows[after], wanted[-len(after) :], rtol=0, atol=1e-12)
    assert states.states is not None and torch.equal(states.states[3], scanned[4])


@pytest.mark.parametrize("name", ["qwen3_5_text", "kimi_linear", "nemotron_h", "lfm2"])
def test_the_operations_that_are_answered_exist_in_the_installed_transformers(name: str) -> None:
    """With the names and arguments that the answers use: a model whose operation moved would run without Etude."""
    family_model(name)
    kind = type(config_of(name)).__module__.replace("configuration", "modeling")
    file = vars(import_module(kind))
    assert any(hasattr(file.get(operation), "routed") for operation in ANSWERS)
    before = {operation: file.get(operation) for operation in ANSWERS}
    family_model(name)
    assert {operation: file.get(operation) for operation in ANSWERS} == before, "they are replaced once"


def test_a_processor_computes_torchs_code_where_the_kernels_of_a_package_are_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """transformers prefers the package wherever it can be imported, and its kernels need a GPU."""
    file = import_module("transformers.models.qwen3_5.modeling_qwen3_5")
    operation = "torch_chunk_gated_delta_rule"
    code = inspect.unwrap(getattr(file, operation))

    @functools.wraps(code)
    def kernel(*_: object, **__: object) -> None:
        raise RuntimeError("0 active drivers ([]). There should only be one.")

    monkeypatch.setattr(file, operation, kernel)
    family_model("qwen3_5_text")  # is verified when it is created
    assert getattr(file, operation) is not kernel, "the operation asks the mixer"


def test_every_hybrid_family_reports_the_bytes_of_its_states() -> None:
    model = family_model("qwen3_5_text")
    scanned, convolved_inputs = 4 * 8 * 8, 3 * (2 * 2 * 8 + 4 * 8)
    assert model.state_bytes == 4 * (scanned + convolved_inputs)
    assert [shape is None for shape in model.attention_shapes] == [True, False]


def test_the_products_of_a_recurrence_are_counted_for_each_number_of_its_state() -> None:
    delta, mamba = family_model("qwen3_5_text").sizes, family_model("nemotron_h").sizes
    (states,) = (shape for shape in delta.states if shape is not None)
    assert states.products == 3 * 4 * 8 * 8 + 4 * (2 * 2 * 8 + 4 * 8), "decayed by a key, written, read by a query"
    (states,) = (shape for shape in mamba.states if shape is not None)
    assert states.products == 2 * 4 * 8 * 8 + 4 * (4 * 8 + 2 * 2 * 8), "written, and read by C"
