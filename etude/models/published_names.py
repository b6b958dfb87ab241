"""The names of weights in the files that a model was read from, where transformers gives its parameters other names.

    model.language_model.layers.0…     the files of a model that also sees, and a server that serves all of it
    model.layers.0…                    transformers' text model, which Etude trains

transformers knows such prefixes and removes them when it reads files. Here they are put back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, WeightTransform


class PublishedNames:
    """The names that weights have in files with these names."""

    def __init__(self, module: nn.Module, stored: Iterable[str]) -> None:
        """stored: the names in the files."""
        assert isinstance(module, PreTrainedModel)
        changes = get_model_conversion_mapping(module, add_legacy=False)
        prefixes = [change for change in changes if isinstance(change, PrefixChange)]
        names = list(stored)
        self._changes: list[WeightTransform] = [
            change.reverse_transform()
            for change in reversed(prefixes)
            if any(change.rename_source_key(name)[1] is not None for name in names)
        ]

    def __call__(self, name: str) -> str:
        """Return the name in the files of a parameter with this name."""
        for change in self._changes:
            name, _ = change.rename_source_key(name)
        return name

    def rename(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield these weights by their names in the files."""
        return ((self(name), weight) for name, weight in weights)
