"""Products whose rows have the same bits whatever is computed beside them, and the trial that finds their form here.

A kernel may add up a row's products in another order when the number of rows is another, and which numbers it treats
alike is a matter of the processor, of the library that multiplies, and of the number of threads. A *form* says how many
rows, queries and keys are multiplied at once. The forms below are tried in order, from the fastest to those in which
every product has one shape; the first in which no row's bits depend on its batch is the one to compute with. It is
found once in a process for each model's shape and number of threads. Where there is none, the first is used, and
nothing is claimed.

Tried are the model's layers at up to 400 rows. Where that would take long, the whole model is tried at up to 48 rows,
and at 400 one matrix of each shape alone, if its family is one of those in `etude.models.layers`. Attention is tried
over up to a thousand keys. Threads are part of the trial: on one or two of them the tests hold what is claimed; with
more, torch may cut an elementwise kernel within a row, which the trial sees in the layers, and not between attention's
products.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from etude.models.layout import product
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
"""Multiplications that one batch of a trial may take, unless it is among the smallest."""
TRIAL_KEYS = (SHORTEST, 100, KEYS + 1, 300)
"""How many keys the queries of a trial see."""
LONGER = 700
"""How many keys more are beside them at most."""
TRIAL_BATCHES = (
    (1, PIECE, 7),
    *((1, tokens, 16 * (tokens % 3)) for tokens in range(1, 18)),
    *((1, 1, LONGER), (1, PIECE - 1, 340), (2, 1, 0), (2, 7, 16), (3, PIECE // 2, 340), (24, 4, 40)),
)
"""The batches of a trial of attention: how many products are computed at once, or as many as the least that an engine
computes where those are more; of how many tokens; with how many keys more. The first has all queries."""


@dataclass(frozen=True)
class RowForm:
    """How many rows linear layers have at once."""

    multiple: int = 1
    """The number of rows is a multiple of this one."""
    fixed: bool = False
    """Whether the number of rows is `multiple` itself, always."""

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
    """A product has at least so many queries."""
    multiple: int = 1
    """The number of queries is a multiple of this one."""
    keys: int = 1
    """The number of keys is a multiple of this one."""
    fixed: bool = False
    """Whether every product has the smallest number of queries that `multiple` allows, and `KEYS` keys."""
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
    """Whether a row's bits do not depend on its batch."""
    tried: bool = True
    """Whether a trial said so. Weights that are not finite, or of which nothing can be told apart, allow none."""


ROW_FORMS = (RowForm(16), RowForm(48, fixed=True), RowForm(16, fixed=True))
KEY_FORMS = (KeyForm(4), KeyForm(8, 8, 16), KeyForm(16, 16, 32), KeyForm(16, 16, KEYS, fixed=True))
"""The forms that are tried, in order."""
LOOSE = Form(RowForm(), KeyForm(summed=None), exact=False)
"""Where nothing is asked for."""
STEADY = Form(ROW_FORMS[0], KEY_FORMS[0], exact=True)
"""The form that holds on most processors."""

_found: dict[object, RowForm | None] = {}


def slack(size: int) -> int:
    """How many tokens padding may add to the longest context, in blocks of so many."""
    return SHORTEST + math.lcm(KEYS, size)


def steady_form(model: Model) -> Form:
    """The form for this model on this processor. A trial costs about what a short prompt does."""
    place, threads = model.device, torch.get_num_threads()
    keys = _keys(model.head_dim, model.query_heads // model.kv_heads, min(model.kv_heads, threads), place, threads)
    known = _shape_of(model), place, threads
    if known not in _found:
        trial = _Trial(model)
        with torch.inference_mode():
            rows = next((form for form in ROW_FORMS if trial.holds(form)), None)
        if not trial.tells:
            return Form(ROW_FORMS[0], keys or KEY_FORMS[0], exact=False, tried=False)
        _found[known] = rows
    rows = _found[known]
    if rows is None or keys is None:
        what = " and ".join(name for name, form in (("linear layers", rows), ("attention", keys)) if form is None)
        get_log("rollout").warning(
            "With this model on this processor the last bits of an answer depend on what shares its batch: no form of "
            "the products of %s was found in which they do not. A run goes on exactly after a kill, and not bit for "
            "bit. `threads=1` may help; `etude doctor` says whether that is the processor's, and what else may.",
            what,
        )
    return Form(rows or ROW_FORMS[0], keys or KEY_FORMS[0], exact=rows is not None and keys is not None)


def _shape_of(model: Model) -> object:
    """All that decides which products a model computes, but for the weights' values."""
    shapes = frozenset((name, weight.shape) for name, weight in model.named_weights())
    return type(model.module), model.body, model.module.config.to_json_string(), shapes


def plain_forms(shapes: Iterable[tuple[int, int]], widths: Iterable[int]) -> Form:
    """The slowest form that linear layers [O, I] and heads of these widths need on this processor: what can be said of
    it without a model."""
    layers = [_random(outputs, inputs, seed=outputs) for outputs, inputs in shapes]
    inputs = [_random(_rows_of(ROW_FORMS), layer.shape[1], seed=1) for layer in layers]

    def compute(batch: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        for number, (x, layer) in enumerate(zip(inputs, layers, strict=True)):
            yield number, batch, linear(x[batch], layer)

    rows = next((form for form in ROW_FORMS if _alike(compute, _row_batches(form, 0))), None)
    threads = torch.get_num_threads()
    found = [_keys(width, 2, min(2, threads), torch.device("cpu"), threads) for width in widths]
    keys = None if None in found else max((form for form in found if form is not None), key=KEY_FORMS.index)
    return Form(rows or ROW_FORMS[0], keys or KEY_FORMS[0], exact=rows is not None and keys is not None)


# -- trials -----------------------------------------------------------------------------------------------------------


class _Trial:
    """A model that computes made-up tokens, each of which sees itself alone, in batches of several sizes."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.tells = True
        """Whether all that was computed is finite, and differs from row to row."""
        chance = torch.Generator().manual_seed(0)
        count = _rows_of(ROW_FORMS)
        self.ids = torch.randint(model.vocabulary, (count,), generator=chance).to(model.device)
        self.positions = torch.randint(model.context, (count,), generator=chance).to(model.device)
        self.weights = sum(weight.numel() for _, weight in model.named_weights())
        idle = [weight for weight in model.adapter_weights().values() if not weight.any()]
        self.adapters: AbstractContextManager[object] = _Filled(idle) if idle else nullcontext()

    def holds(self, form: RowForm) -> bool:
        """Whether a token's hidden state and logits are the same bits in all batches that a form allows."""
        rows, batches = form.logits(self.model.vocabulary), _row_batches(form, self.weights)
        with self.adapters:
            alike = self.tells and _alike(lambda batch: self._compute(batch, rows), batches)
        most, *_, least = _row_batches(form, 0)
        return alike and (len(most) == len(batches[0]) or _alike(self._multiply, (most, least)))

    def _compute(self, batch: Tensor, rows: int) -> Iterator[tuple[int, Tensor, Tensor]]:
        hidden = self.model.hidden(self.ids[batch], self.positions[batch], _alone)
        yield 0, batch, self._telling(hidden)
        for some, of_some in zip(torch.split(batch, rows), torch.split(hidden, rows), strict=True):
            yield 1, some, self._telling(self.model.logits(of_some))

    def _multiply(self, batch: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """By one matrix of each shape; the head has few rows at a time, and was tried with those."""
        shapes = {multiplied.weight.shape: multiplied.weight for multiplied in self.model.products()[:-1]}
        for number, (shape, weight) in enumerate(shapes.items()):
            x = _random(_rows_of(ROW_FORMS), shape[1], seed=number).to(weight)
            yield number, batch, product(x[batch], weight)

    def _telling(self, found: Tensor) -> Tensor:
        self.tells = self.tells and bool(found.isfinite().all()) and bool((found != found[0]).any() or len(found) == 1)
        return found


class _Filled(TorchFunctionMode):
    """Within, adapters that are all zero, as they are at the start of a run, compute with random numbers: what is
    multiplied by zero has the same bits however it was added up. The weights themselves are not touched."""

    def __init__(self, idle: Sequence[Tensor]) -> None:
        super().__init__()
        self._random = {
            weight.data_ptr(): _random(*weight.shape, seed=seed).div_(weight.shape[-1] ** 0.5).to(weight)
            for seed, weight in enumerate(idle)
        }

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*map(self._filled, args), **{name: self._filled(each) for name, each in (kwargs or {}).items()})

    def _filled(self, given: Any) -> Any:
        if not isinstance(given, Tensor) or given.dim() != 2:
            return given
        random = self._random.get(given.data_ptr())
        return random if random is not None and random.shape == given.shape else given


def _alone(
    layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, softcap: float | None
) -> Tensor:
    """An `Attend`: a token that sees itself alone finds its own value."""
    del layer, k, scale, window, softcap
    return v.repeat_interleave(q.shape[1] // v.shape[1], 1)


def _rows_of(forms: Sequence[RowForm]) -> int:
    """How many rows a trial knows."""
    return max(25 * form.multiple for form in forms if not form.fixed)


def _row_batches(form: RowForm, weights: int) -> list[Tensor]:
    """Which rows are computed together, in which order: all that there are, and some, in many places."""
    chance = torch.Generator().manual_seed(0)
    counts = (1,) * 6 if form.fixed else (25, 5, 3, 2, 1, 1)
    sizes = [count * form.multiple for count in counts if count <= 3 or count * form.multiple * weights <= BUDGET]
    known = 2 * form.multiple if form.fixed else max(sizes)
    return [torch.randperm(known, generator=chance)[:size] for size in sizes]


def _alike(compute: Callable[[Tensor], Iterator[tuple[int, Tensor, Tensor]]], batches: Sequence[Tensor]) -> bool:
    """Whether each row has the same bits in all of its batches. Of a batch several products are computed, and of each
    product some rows after the others: `compute` gives the number of a product, the rows, and what they are."""
    count = 1 + max(int(batch.max()) for batch in batches)
    first: dict[int, Tensor] = {}
    known: dict[int, Tensor] = {}
    for batch in batches:
        for number, rows, found in compute(batch):
            if number not in first:
                first[number] = found.new_empty(count, found.shape[1])
                known[number] = torch.zeros(count, dtype=torch.bool)
            again = known[number][rows]
            if not torch.equal(found[again], first[number][rows[again]]):
                return False
            first[number][rows], known[number][rows] = found, True
    return True


@cache
def _keys(width: int, group: int, least: int, place: torch.device, threads: int) -> KeyForm | None:
    """The form for heads of this width, of which a group has the same keys, in products of no fewer entries than
    `least`."""
    del threads  # what it was tried with
    with torch.inference_mode():
        entries, longest = max(least, *(each[0] for each in TRIAL_BATCHES)), max(TRIAL_KEYS) + LONGER + KEYS
        keys, values = (_random(1, longest, width, seed=seed).to(place).repeat(entries, 1, 1) for seed in (1, 2))
        queries = _random(1, KeyForm(16, 16).tokens(PIECE, group) * group, width, seed=3).to(place)
        queries = queries.repeat(entries, 1, 1)
        return next((form for form in KEY_FORMS if _attends_alike(form, group, least, queries, keys, values)), None)


def _attends_alike(form: KeyForm, group: int, least: int, queries: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Whether each query's scores and what it finds are the same bits among few and many others, at whatever place, and
    with the keys of longer contexts beside its own, whose weights are zero."""
    chance = _random(1, queries.shape[1], max(TRIAL_KEYS), seed=4).to(queries.device)
    for seen in TRIAL_KEYS:
        first: list[Tensor] = []
        for entries, rows, length in _key_batches(form, group, least, seen):
            weights = queries.new_zeros(entries, rows, length)
            weights[:, :, :seen] = chance[:, :rows, :seen]
            for order in (torch.arange(rows), torch.arange(rows).flip(0)):
                scores = form.scores(queries[:entries, order], keys[:entries, :length])
                sums = form.sums(weights[:, order], values[:entries, :length])
                found = [scores[:, :, :seen], sums]
                first = first or [each[0].clone() for each in found]
                if not all(bool((one[order] == each).all()) for one, each in zip(first, found, strict=True)):
                    return False
    return True


def _key_batches(form: KeyForm, group: int, least: int, seen: int) -> Iterable[tuple[int, int, int]]:
    """How many products are computed at once, of how many rows and keys; the first has all rows."""
    return dict.fromkeys(
        (max(least, entries), form.tokens(min(tokens, form.piece(group)), group) * group, form.blocks(seen + longer, 1))
        for entries, tokens, longer in TRIAL_BATCHES
    )


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
