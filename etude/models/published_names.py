"""The names and shapes of weights in published files, where transformers gives its parameters others.

    model.language_model.layers.0…     the files of a model that also sees, and a server that serves all of it
    model.layers.0…                    transformers' text model, which Etude trains

    mlp.experts.0.gate_proj.weight…    the files of a mixture, and the servers that read them
    mlp.experts.gate_up_proj           transformers' parameter: all experts, and both products

transformers knows such prefixes and layouts and changes them when it reads files. Here they are put back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from copy import deepcopy

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    apply_converters,
    apply_renamings,
)


class PublishedNames:
    """The names that weights have in files with these names."""

    def __init__(self, module: nn.Module, stored: Iterable[str] = ()) -> None:
        """stored: the names in the files, for prefixes; by default there are none."""
        assert isinstance(module, PreTrainedModel)
        self._module = module
        changes = get_model_conversion_mapping(module, add_legacy=False)
        names = list(stored)
        self._prefixes: list[WeightTransform] = []
        self._renamings: list[WeightRenaming] = []
        self._converters: list[WeightConverter] = []
        for change in reversed(changes):
            reverse = change.reverse_transform()
            if isinstance(change, PrefixChange):
                if any(change.rename_source_key(name)[1] is not None for name in names):
                    self._prefixes.append(reverse)
            elif isinstance(reverse, WeightConverter):
                self._converters.append(reverse)
            else:
                assert isinstance(reverse, WeightRenaming)
                self._renamings.append(reverse)

    def __call__(self, name: str) -> str:
        """Return the name of a parameter with the prefix that it has in the files."""
        for change in self._prefixes:
            name, _ = change.rename_source_key(name)
        return name

    def rename(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield these weights with the prefix that they have in the files."""
        return ((self(name), weight) for name, weight in weights)

    def publish(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield these weights by their names and in their shapes in the files.

        Where a tensor of the files is made of several parameters, the earlier ones are held until the last has come.
        """
        waiting: dict[str, WeightConverter] = {}
        for name, weight in weights:
            target, pattern = apply_converters(name, self._converters)
            if pattern is None:
                yield self._rename(name), weight
                continue
            known = next(converter for converter in self._converters if pattern in converter.source_patterns)
            converter = waiting.setdefault(target, deepcopy(known))
            converter.add_tensor(target, name, pattern, weight)  # type: ignore[arg-type]  # or a promise of one
            sources = converter.source_patterns
            if all("*" not in source and converter.collected_tensors[source] for source in sources):
                yield from self._convert(target, waiting.pop(target))
        for target, converter in waiting.items():  # of any number of parameters
            yield from self._convert(target, converter)

    def _convert(self, target: str, converter: WeightConverter) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of the files that a converter makes of its parameters."""
        made = converter.convert(target, model=self._module, config=self._module.config)
        for name, weight in made.items():
            yield self._rename(name), weight[0] if isinstance(weight, list) else weight

    def _rename(self, name: str) -> str:
        return self(apply_renamings(name, self._renamings))
