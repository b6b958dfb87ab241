"""The names and shapes of weights in published files, where transformers gives its parameters others.

    model.language_model.layers.0…     the files of a model that also sees, and a server that serves all of it
    model.layers.0…                    transformers' text model, which Etude trains

    mlp.experts.0.gate_proj.weight…    the files of a mixture, and the servers that read them
    mlp.experts.gate_up_proj           transformers' parameter: all experts, and both products

transformers knows such prefixes and layouts and changes them when it reads files. Here they are put back.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass

import torch
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

_EXPERT = re.compile(r"(.+)\[(\d+)\]")


def expert_name(name: str, expert: int) -> str:
    """Return the name of one expert's part of a parameter, as `PublishedNames.publish` reads it."""
    return f"{name}[{expert}]"


def read_expert_name(name: str) -> tuple[str, int | None]:
    """Return the name of a parameter, and the expert of it that `expert_name` names; None for the whole parameter."""
    part = _EXPERT.fullmatch(name)
    return (name, None) if part is None else (part[1], int(part[2]))


@dataclass(frozen=True)
class StoredPiece:
    """A tensor of the files, as a block of a parameter."""

    name: str
    offset: tuple[int, int]
    """The first expert of the block, and its first row."""
    shape: tuple[int, ...]
    """The block's shape in the parameter."""
    is_single: bool
    """True if the files leave out the first dimension, because the block is of one expert."""

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of the tensor in the files."""
        return self.shape[1:] if self.is_single else self.shape

    def of_expert(self, weight: Tensor) -> Tensor:
        """Return the rows of an expert that this tensor has."""
        return weight.narrow(0, self.offset[1], self.shape[1])


class PublishedNames:
    """The names that weights have in files with these names."""

    def __init__(self, module: nn.Module, stored: Iterable[str] = ()) -> None:
        """stored: the names in the files, for prefixes; by default there are none."""
        assert isinstance(module, PreTrainedModel)
        self._module = module
        self._of_experts: dict[str, dict[int, list[StoredPiece]]] = {}
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
        So are the experts that come one by one (see `expert_name`), where the files have all in one tensor.
        """
        waiting: dict[str, WeightConverter] = {}
        experts: list[Tensor] = []
        for name, weight in weights:
            name, expert = read_expert_name(name)
            if expert is not None:
                pieces = self._pieces_by_expert(name).get(expert)
                if pieces is not None:
                    yield from ((piece.name, piece.of_expert(weight)) for piece in pieces)
                    continue
                experts.append(weight)
                if len(experts) < len(self._module.get_parameter(name)):
                    continue
                weight = torch.stack(experts)
                experts = []
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

    def _pieces_by_expert(self, name: str) -> dict[int, list[StoredPiece]]:
        """Return the tensors of the files that each expert of a parameter consists of; none if they have others too."""
        if name not in self._of_experts:
            found: dict[int, list[StoredPiece]] = {}
            for piece in self.pieces(name, self._module.get_parameter(name).shape) or ():
                found.setdefault(piece.offset[0], []).append(piece)
            is_single = all(piece.is_single for pieces in found.values() for piece in pieces)
            self._of_experts[name] = found if is_single else {}
        return self._of_experts[name]

    def pieces(self, name: str, shape: Sequence[int]) -> list[StoredPiece] | None:
        """Return the tensors of the files that a parameter of all experts consists of.

        None if they are not blocks of its experts and rows. An index is converted in place of the parameter: where its
        numbers end up, the parameter's do.
        """
        rows = shape[0] * shape[1]
        index = torch.arange(rows).view(*shape[:2], *[1] * (len(shape) - 2))
        found = []
        for stored, piece in self.publish([(name, index)]):
            is_single = piece.ndim < len(shape)
            block = piece[None] if is_single else piece
            first = divmod(int(block.flatten()[0]), shape[1])
            at = tuple(slice(start, start + size) for start, size in zip(first, block.shape, strict=False))
            if block.ndim != len(shape) or not torch.equal(block, index[at]):
                return None
            found.append(StoredPiece(stored, first, (*block.shape[:2], *shape[2:]), is_single))
        covered = sum(piece.shape[0] * piece.shape[1] for piece in found)
        return found if covered == rows else None

    def stored_name(self, name: str) -> str:
        """Return the name that a parameter has in the files if they store it as it is."""
        return self._rename(name)

    def _convert(self, target: str, converter: WeightConverter) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of the files that a converter makes of its parameters."""
        made = converter.convert(target, model=self._module, config=self._module.config)
        for name, weight in made.items():
            yield self._rename(name), weight[0] if isinstance(weight, list) else weight

    def _rename(self, name: str) -> str:
        return self(apply_renamings(name, self._renamings))
