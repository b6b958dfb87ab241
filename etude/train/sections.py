"""Weights that no rank holds whole: each keeps its rows, and a layer is brought together while it is computed.

A model falls into sections: each layer is one, and what no layer has (embedding, final norm, head) is another, which is
there for as long as a micro-batch is. Between its uses the memory of a section is given back.

    embedding, norm, head   ████████████████████████████████████████████
    layer 0                 ████                                    ████ ──► its gradients, to their owners
    layer 1                     ████                            ████ ──►
    layer 2                         ████                    ████ ──►
                            forward ──────► loss ──────► backward ─────►

What ranks exchange in a micro-batch is a *score*, the same on all of them, written before it begins. Whoever computes
plays it as the layers are reached; what was not reached, because there was nothing to compute or no gradient to take,
is played all the same. So no rank ever waits for an exchange that another does not come to, whatever each of them has
to do.

While an engine samples from the same weights they are *assembled*: all sections are there, and nothing is exchanged.
Once they are dispersed, nobody computes with them but who plays.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor

from etude.errors import EngineError
from etude.train.shards import Shards

__all__ = ["Sections", "sections"]

Exchange = tuple[Literal["bring", "send"], int]


def sections(leaves: Collection[str], layers: Sequence[Collection[str]]) -> list[list[str]]:
    """The leaves of each section, in the order in which a backward pass is done with them: from the last layer to the
    first, and then what is in none."""
    inside = set().union(*layers)
    there = [[name for name in leaves if name in layer] for layer in reversed(layers)]
    return [*there, [name for name in leaves if name not in inside]]


class Sections:
    """The memory of the leaves that this process computes with. All ranks make the same calls in the same order."""

    def __init__(self, shards: Shards, leaves: Mapping[str, Tensor], names: Sequence[Sequence[str]]) -> None:
        """`names`: see `sections`. The leaves are whole yet, and stay so until they are dispersed."""
        self._shards, self._names = shards, names
        self._rest = len(names) - 1
        self._held = [_storages([leaves[name] for name in section]) for section in names]
        self._sizes = [[storage.nbytes() for storage in held] for held in self._held]
        self._score: list[Exchange] | None = None
        self._at = self._player = 0
        self.assembled = True
        """Whether all of them are there."""

    # -- between passes -------------------------------------------------------------------------------------------

    def assemble(self) -> None:
        """Have every section be there, until they are dispersed."""
        for section in range(len(self._names)):
            self._bring(section)
        self.assembled = True

    def disperse(self) -> None:
        """Give the memory of every section back. What was being played is over."""
        self._score, self.assembled = None, False
        for section in range(len(self._names)):
            self._free(section)

    # -- a pass ---------------------------------------------------------------------------------------------------

    @contextmanager
    def played(self, *, backward: bool) -> Iterator[None]:
        """Within, a micro-batch may be computed: forward, and backward too; every exchange that this takes is made."""
        if self.assembled:
            assert not backward, "gradients are taken of weights that are dispersed"
            yield
            return
        self._score, self._at, self._player = self._written(backward), 1, threading.get_ident()
        self._bring(self._rest)
        try:
            yield
            while self._at < len(self._score):
                self._play()
        finally:
            self.disperse()

    def enter(self, layer: int) -> None:
        """See `Visits`."""
        self._refuse_others()
        section = self._rest - 1 - layer
        if self._score is not None:
            while self._score[self._at] != ("bring", section):
                self._play()
            self._at += 1
            self._bring(section)

    def leave(self, layer: int, *, back: bool) -> None:
        """See `Visits`."""
        self._refuse_others()
        section = self._rest - 1 - layer
        if self._score is None:
            return
        self._free(section)
        if back:
            assert self._score[self._at] == ("send", section), "layers are left in the order in which they are entered"
            self._play()

    def _refuse_others(self) -> None:
        """Of weights that come and go, only who plays may use any: the thread that began, and autograd on its behalf,
        which has threads of its own where a GPU computes."""
        playing = self._score is not None and self._player == threading.get_ident()
        if not (self.assembled or playing or torch._C._current_graph_task_id() != -1):
            raise EngineError(
                "Weights that ranks divide are there for an update, or not at all, and somebody else computed with "
                "them. Publish them first, and sample then."
            )

    def _written(self, backward: bool) -> list[Exchange]:
        """What ranks exchange in a micro-batch. The gradients of what no layer has go at its end, after all others."""
        score: list[Exchange] = [("bring", self._rest)]
        score += [("bring", section) for section in reversed(range(self._rest))]
        for section in range(self._rest) if backward else ():
            score += [("bring", section), ("send", section)]
        return score

    def _play(self) -> None:
        """The next exchange, for the others alone."""
        assert self._score is not None, "a score is played from its beginning"
        verb, section = self._score[self._at]
        self._at += 1
        if verb == "send":
            self._shards.send(section)
        else:
            self._bring(section)
            self._free(section)

    def _bring(self, section: int) -> None:
        for storage, size in zip(self._held[section], self._sizes[section], strict=True):
            if storage.nbytes() != size:
                storage.resize_(size)
        self._shards.bring(self._names[section])

    def _free(self, section: int) -> None:
        for storage in self._held[section]:
            storage.resize_(0)


def _storages(leaves: Sequence[Tensor]) -> list[torch.UntypedStorage]:
    """The memory that is these leaves' alone. What they share with others, which are frozen, stays."""
    for leaf in leaves:
        if not (leaf.untyped_storage().resizable() and leaf.is_contiguous()):  # a file's memory, say
            leaf.data = leaf.data.clone(memory_format=torch.contiguous_format)
    found: dict[int, torch.UntypedStorage] = {}
    sizes: dict[int, int] = {}
    for leaf in leaves:
        storage = leaf.untyped_storage()
        found[storage._cdata] = storage
        sizes[storage._cdata] = sizes.get(storage._cdata, 0) + leaf.nbytes
    return [storage for key, storage in found.items() if storage.nbytes() == sizes[key]]
