"""Products whose rows have the same bits whatever is computed beside them, and the trial that finds their form here.

A kernel may add up a row's products in another order when the number of rows is another, and which numbers it treats
alike is a matter of the processor and of the library that multiplies. A *form* says how many rows, queries and keys are
multiplied at once. The forms below are tried in order, from the fastest to those in which every product has one shape;
the first in which no row's bits depend on its company is the one to compute with. It is found once in a process for
each shape and number of threads. Where there is none, the first is used, and nothing is claimed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import linear

from etude.observe import get_log
from etude.rollout.grouping import KEYS, PIECE

if TYPE_CHECKING:
    from etude.models import Model

__all__ = ["LOGITS", "LOOSE", "STEADY", "Form", "KeyForm", "RowForm", "plain_forms", "slack", "steady_form"]

LOGITS = 2**23
"""How many logits exist at a time."""
SHORTEST = 32
"""Attention is over at least so many keys."""
BUDGET = 2**30
"""Multiplications that one company of a trial may take, unless it is among the smallest."""
SEEN = (SHORTEST, 100, KEYS + 1, 300)
"""Of how many keys a trial asks."""
LONGER = 700
"""How many keys more are beside them at most."""
BESIDE = ((2, 1, 0), (1, 1, LONGER), (24, 4, 40), (2, 7, 16), (3, PIECE // 2, 340), (1, PIECE, 7))
"""Companies of a query: how many products are computed at once, of how many tokens, with how many keys more."""


@dataclass(frozen=True)
class RowForm:
    """How many rows linear layers have at once."""

    multiple: int = 1
    """A multiple of so many,"""
    fixed: bool = False
    """or just so many."""

    @property
    def most(self) -> int | None:
        """How many tokens one pass may compute; None for any number."""
        return self.multiple if self.fixed else None

    def logits(self, vocabulary: int) -> int:
        """How many rows of logits exist at a time: of a large vocabulary a few after the other."""
        return self.multiple if self.fixed else max(1, LOGITS // (vocabulary * self.multiple)) * self.multiple


@dataclass(frozen=True)
class KeyForm:
    """How many queries and keys an attention product has. A query of each head of a group counts as one."""

    least: int = 1
    """At least so many queries,"""
    multiple: int = 1
    """and a multiple of so many,"""
    keys: int = 1
    """with a multiple of so many keys;"""
    fixed: bool = False
    """or the smallest such number of queries, with `KEYS` keys at a time."""
    summed: int | None = KEYS
    """Values are summed over so many keys at a time; None for all."""

    @property
    def shares(self) -> bool:
        """Whether the queries of several requests may be those of one product."""
        return not self.fixed

    def piece(self, group: int) -> int:
        """How many tokens of a prompt attend at once, where a group of so many heads has the same keys."""
        return self.tokens(1, group) if self.fixed else PIECE

    def tokens(self, count: int, group: int) -> int:
        """How many tokens are computed in place of so many, the others being padding."""
        step = self.multiple // math.gcd(self.multiple, group)
        return -(-max(count, -(-self.least // group)) // step) * step

    def blocks(self, keys: int, size: int) -> int:
        """How many blocks hold so many keys, and those that pad them."""
        step = self.keys // math.gcd(self.keys, size)
        return -(-max(keys, SHORTEST) // (size * step)) * step

    def scores(self, queries: Tensor, keys: Tensor) -> Tensor:
        """[N, M, D], [N, L, D] → [N, M, L]"""
        if not self.fixed:
            return torch.bmm(queries, keys.transpose(1, 2))
        parts = torch.split(keys, KEYS, 1)
        return torch.cat([torch.bmm(queries, part.transpose(1, 2)) for part in parts], -1)

    def sums(self, weights: Tensor, values: Tensor, found: Tensor | None = None) -> Tensor:
        """[N, M, L], [N, L, D] → [N, M, D], on top of what was found before."""
        step = self.summed or max(weights.shape[2], 1)
        for start in range(0, weights.shape[2], step):
            part = weights[:, :, start : start + step], values[:, start : start + step]
            found = torch.bmm(*part) if found is None else torch.baddbmm(found, *part)
        assert found is not None, "nobody attends to nothing"
        return found


@dataclass(frozen=True)
class Form:
    """How a pass computes."""

    rows: RowForm
    keys: KeyForm
    exact: bool
    """Whether a row's bits do not depend on its company."""


ROWS = (RowForm(16), RowForm(48, fixed=True), RowForm(16, fixed=True))
MEETINGS = (KeyForm(4), KeyForm(8, 8, 16), KeyForm(16, 16, 32), KeyForm(16, 16, KEYS, fixed=True))
"""What is tried, in order."""
LOOSE = Form(RowForm(), KeyForm(summed=None), exact=False)
"""Where nothing is asked for."""
STEADY = Form(ROWS[0], MEETINGS[0], exact=True)
"""The form that holds on most processors."""

_found: dict[object, RowForm | None] = {}


def slack(size: int) -> int:
    """How many tokens padding may add to the longest context, in blocks of so many."""
    return SHORTEST + math.lcm(KEYS, size)


def steady_form(model: Model) -> Form:
    """The form for this model on this processor. A trial costs about what a short prompt does."""
    place, threads = model.device, torch.get_num_threads()
    keys = _keys(model.head_dim, model.query_heads // model.kv_heads, place, threads)
    shapes = frozenset((name, weight.shape) for name, weight in model.named_weights())
    known = (type(model.module), shapes, place, threads)
    if known not in _found:
        trial = _Trial(model)
        rows = next((form for form in ROWS if trial.holds(form)), None)
        if not trial.finite:  # weights that have diverged prove nothing
            return Form(rows or ROWS[0], keys or MEETINGS[0], exact=rows is not None and keys is not None)
        _found[known] = rows
    rows = _found[known]
    if rows is None or keys is None:
        what = " and ".join(name for name, form in (("linear layers", rows), ("attention", keys)) if form is None)
        get_log("rollout").warning(
            "With this model on this processor the last bits of an answer depend on what shares its batch: no form of "
            "the products of %s was found in which they do not. A run goes on exactly after a kill, and not bit for "
            "bit. `etude doctor` says whether that is the processor's, and what may help.",
            what,
        )
    return Form(rows or ROWS[0], keys or MEETINGS[0], exact=rows is not None and keys is not None)


def plain_forms(shapes: Iterable[tuple[int, int]], widths: Iterable[int]) -> Form:
    """The slowest form that linear layers [O, I] and heads of these widths need on this processor: what can be said of
    it without a model."""
    layers = [_random(outputs, inputs, seed=outputs) for outputs, inputs in shapes]
    inputs = [_random(_rows_of(ROWS), layer.shape[1], seed=1) for layer in layers]

    def compute(company: Tensor) -> Tensor:
        return torch.cat([linear(x[company], layer) for x, layer in zip(inputs, layers, strict=True)], 1)

    rows = next((form for form in ROWS if _alike(compute, _companies(form, 0))), None)
    found = [_keys(width, 2, torch.device("cpu"), torch.get_num_threads()) for width in widths]
    keys = None if None in found else max((form for form in found if form is not None), key=MEETINGS.index)
    return Form(rows or ROWS[0], keys or MEETINGS[0], exact=rows is not None and keys is not None)


# -- trials -----------------------------------------------------------------------------------------------------------


class _Trial:
    """A model that computes made-up tokens, each of which sees itself alone, in companies of several sizes."""

    def __init__(self, model: Model) -> None:
        self.model, self.finite = model, True
        chance = torch.Generator().manual_seed(0)
        count = _rows_of(ROWS)
        self.ids = torch.randint(model.vocabulary, (count,), generator=chance).to(model.device)
        self.positions = torch.randint(model.context, (count,), generator=chance).to(model.device)
        self.weights = sum(weight.numel() for _, weight in model.named_weights())

    def holds(self, form: RowForm) -> bool:
        """Whether a token's hidden state and logits are the same bits in all companies that a form allows."""
        rows = form.logits(self.model.vocabulary)
        return _alike(lambda company: self._compute(company, rows), _companies(form, self.weights))

    def _compute(self, company: Tensor, rows: int) -> Tensor:
        hidden = self.model.hidden(self.ids[company], self.positions[company], _alone)
        logits = [self.model.logits(some) for some in torch.split(hidden, rows)]
        out = torch.cat([hidden, torch.cat(logits)], 1)
        self.finite = self.finite and bool(out.isfinite().all())
        return out


def _alone(
    layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, softcap: float | None
) -> Tensor:
    """An `Attend`: a token that sees itself alone finds its own value."""
    del layer, k, scale, window, softcap
    return v.repeat_interleave(q.shape[1] // v.shape[1], 1)


def _rows_of(forms: Sequence[RowForm]) -> int:
    """How many rows a trial knows."""
    return max(25 * form.multiple for form in forms if not form.fixed)


def _companies(form: RowForm, weights: int) -> list[Tensor]:
    """Which rows are computed together, in which order: all that there are, and some, in many places."""
    chance = torch.Generator().manual_seed(0)
    counts = (1,) * 6 if form.fixed else (25, 5, 3, 2, 1, 1)
    sizes = [each * form.multiple for each in counts if each <= 3 or each * form.multiple * weights <= BUDGET]
    known = 2 * form.multiple if form.fixed else max(sizes)
    return [torch.randperm(known, generator=chance)[:size] for size in sizes]


def _alike(compute: Callable[[Tensor], Tensor], companies: Iterable[Tensor]) -> bool:
    """Whether each row has the same bits in all of its companies."""
    first, known = torch.empty(0), torch.zeros(_rows_of(ROWS), dtype=torch.bool)
    for company in companies:
        found = compute(company).nan_to_num().cpu()
        if not len(first):
            first = found.new_zeros(len(known), found.shape[1])
        again = known[company]
        if not torch.equal(found[again], first[company[again]]):
            return False
        first[company], known[company] = found, True
    return True


@cache
def _keys(width: int, group: int, place: torch.device, threads: int) -> KeyForm | None:
    """The form for heads of this width, of which a group has the same keys."""
    del threads  # what it was tried with
    with torch.inference_mode():
        entries, longest = max(entries for entries, _, _ in BESIDE), max(SEEN) + LONGER + KEYS
        keys, values = (_random(1, longest, width, seed=seed).to(place).repeat(entries, 1, 1) for seed in (1, 2))
        queries = _random(1, KeyForm(16, 16).tokens(PIECE, group) * group, width, seed=3).to(place)
        queries = queries.repeat(entries, 1, 1)
        return next((form for form in MEETINGS if _attends_alike(form, group, queries, keys, values)), None)


def _attends_alike(form: KeyForm, group: int, queries: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Whether a query's scores and what it finds are the same bits among few and many others, at whatever place, and
    with the keys of longer contexts beside its own, whose weights are zero."""
    chance = _random(1, queries.shape[1], max(SEEN), seed=4).to(queries.device)
    for seen in SEEN:
        first: list[Tensor] = []
        for entries, tokens, longer in BESIDE:
            rows = form.tokens(min(tokens, form.piece(group)), group) * group
            length = form.blocks(seen + longer, 1)
            weights = queries.new_zeros(entries, rows, length)
            weights[:, :, :seen] = chance[:, :rows, :seen]
            for order in (torch.arange(rows), torch.arange(rows).flip(0)):
                scores = form.scores(queries[:entries, order], keys[:entries, :length])
                sums = form.sums(weights[:, order], values[:entries, :length])
                mine = [each[0, order == 0] for each in (scores[:, :, :seen], sums)]
                first = first or mine
                if not all(map(torch.equal, first, mine)):
                    return False
    return True


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
