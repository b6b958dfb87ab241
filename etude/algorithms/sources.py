"""Action tokens by the data source of their task: factors of sources, and a mean for each source."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from etude.algorithms.view import View
from etude.lazy import torch
from etude.observe import Mean, Metrics

if TYPE_CHECKING:
    from torch import Tensor


def source_weights(view: View, weights: Mapping[str, float], needed_by: str) -> Tensor:
    """[A]: the weight of each action token's data source; 1 for a source that is not named."""
    source = view.column("source", needed_by)
    of_source = [weights.get(name, 1.0) for name in view.batch.source_names]
    return torch.tensor(of_source, dtype=view.dtype, device=source.device)[source]


def means_by_source(view: View, name: str, values: Tensor) -> Metrics:
    """Return the mean over the tokens of each data source that has a name. values: [A]."""
    metrics = Metrics()
    if view.batch.source is None or not any(view.batch.source_names):
        return metrics
    source = view.column("source")
    for place, source_name in enumerate(view.batch.source_names):
        if source_name:
            own = source == place
            metrics.add(f"{name}/{source_name}", Mean.over(torch.where(own, values, 0.0).sum(), own.sum()))
    return metrics
