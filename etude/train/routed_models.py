"""Several frozen models that share the rollouts of a batch by data source: the teachers of a mix of tasks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from etude.batch import Batch
from etude.errors import BatchError
from etude.train.frozen_model import FrozenModel, ScoringModel


class RoutedModels(ScoringModel):
    """Frozen models, each of which computes the rollouts of its data sources.

    On sharded ranks every rank calls every model, also one of whose sources it has no rollout: the ranks gather its
    weights together.
    """

    def __init__(self, models: Mapping[str, FrozenModel]) -> None:
        """models: by data source. Several sources may have one model."""
        self.models = list(dict.fromkeys(models.values()))
        self._model_of_source = {source: self.models.index(model) for source, model in models.items()}

    @classmethod
    def load(cls, paths: Mapping[str, Path], load_model: Callable[[str, Path], FrozenModel]) -> RoutedModels:
        """Load the model of each source, and one that several sources name only once."""
        loaded: dict[Path, FrozenModel] = {}
        for source, path in paths.items():
            if path not in loaded:
                loaded[path] = load_model(source, path)
        return cls({source: loaded[path] for source, path in paths.items()})

    @property
    def vocab_size(self) -> int:
        return min(model.vocab_size for model in self.models)

    def logp(self, batch: Batch) -> Tensor:
        return self._join(batch, lambda model, part: (model.logp(part),))[0]

    def top_tokens(self, batch: Batch, count: int, among: int) -> tuple[Tensor, Tensor]:
        ids, logp = self._join(batch, lambda model, part: model.top_tokens(part, count, among))
        return ids, logp

    def _join(self, batch: Batch, compute: Callable[[FrozenModel, Batch], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Return the columns [T, …] that each model computes for its rollouts, in the batch's order."""
        of_rollout = self._assign(batch)
        of_token = of_rollout.repeat_interleave(batch.rollout_token_offsets.diff())
        joined = tuple[Tensor, ...]()
        for index, model in enumerate(self.models):
            own = of_rollout == index
            part = batch if bool(own.all()) else batch.select(own)
            columns = compute(model, part)
            if not joined:
                joined = tuple(column.new_empty(batch.num_tokens, *column.shape[1:]) for column in columns)
            for whole, column in zip(joined, columns, strict=True):
                whole[of_token == index] = column
        return joined

    def _assign(self, batch: Batch) -> Tensor:
        """[U]: return the index of the model of each rollout. All ranks refuse the same batches."""
        source = batch.require("source", needed_by="A model for each data source")
        unknown = [name for name in batch.source_names if name not in self._model_of_source]
        if unknown:
            known = ", ".join(f"`{name}`" for name in self._model_of_source)
            raise BatchError(
                f"The batch has rollouts of the data source `{unknown[0]}`, and the models are for {known}. Give "
                "`teacher.paths` a model for it, or leave its tasks out."
            )
        models = [self._model_of_source[name] for name in batch.source_names]
        return torch.tensor(models, dtype=torch.int64, device=batch.device)[source]
