"""The largest micro-batch that fits into a device's memory, from a plan with a smaller one."""

from __future__ import annotations

import torch

from etude.batch import Batch
from etude.data.pack import micro_batches, pack_prefix_tree
from etude.recipes.recipe import Recipe
from etude.recipes.run.config import Run
from etude.recipes.supervised.config import SupervisedRun
from etude.tools.plan.dry_run import worst_case_batch
from etude.tools.plan.results import DeviceMemory
from etude.tools.plan.supervised_dry_run import worst_case_examples

MOST_TOKENS = 65_536
"""Larger micro-batches are hardly faster: kernels of so many tokens fill a GPU."""
STEP = 1024
"""The advice is a multiple of so many tokens."""
FILLED = 0.92
"""The share of the memory that an update may take; the allocator needs the rest."""
NOTABLE = 1.25
"""The advice is given from so many times the planned tokens on."""


def fitting_tokens(limit: int, total: int, activations: int, tokens: int) -> int:
    """Return the tokens of the largest micro-batch that fits into `limit` bytes, at most `MOST_TOKENS`.

    total: the peak of an update with micro-batches of `tokens` tokens, of which `activations` bytes grow with them.
    """
    room = FILLED * limit - (total - activations)
    fitting = room * tokens / max(activations, 1)
    return max(int(min(fitting, MOST_TOKENS)) // STEP * STEP, 0)


def advise_micro_batch(
    run: Recipe, device: torch.device, memory: DeviceMemory, row: tuple[int, int]
) -> tuple[str, ...]:
    """Return a sentence if larger micro-batches fit on the policy's GPU, and the update has the tokens for them."""
    updating = memory.phases.get("updating")
    if device.type != "cuda" or memory.limit is None or not memory.fits or updating is None:
        return ()
    planned = run.train.max_tokens_per_micro_batch
    parts = micro_batches(_update_batch(run, row), planned)
    largest = max(len(pack_prefix_tree(part).ids) for part in parts)
    total, activations = updating.total + memory.base_bytes, updating.kinds.get("activations", 0)
    tokens = fitting_tokens(memory.limit, total, activations, largest)
    if len(parts) == 1 or tokens < NOTABLE * planned:
        return ()
    return (
        f"Micro-batches of {tokens:,} tokens would fit too: `train.max_tokens_per_micro_batch={tokens}` makes fewer "
        f"and larger passes, which keep a GPU busier.",
    )


def _update_batch(run: Recipe, row: tuple[int, int]) -> Batch:
    """Return the update batch of the dry run."""
    if isinstance(run, SupervisedRun):
        return worst_case_examples(run, sum(row), -(-run.batch_size * run.mesh.ranks_per_rollout // run.ranks))
    assert isinstance(run, Run), "every recipe is one or the other"
    return worst_case_batch(run, row)
