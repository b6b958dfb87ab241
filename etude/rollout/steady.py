"""Matrix products whose rows have the same bits in every batch, and the trial that finds how to compute them.

A kernel may sum a row's products in another order when the number of rows changes. Which row counts give the same order
depends on the processor, the math library and the number of threads. A *form* fixes how many rows, queries and keys are
multiplied at once. The forms below are tried in order. The first ones are the fastest; in the last ones every product
has one shape. The engine uses the first form in which no row's bits depend on its batch. The result is kept in the
process, per model shape and number of threads. If no form holds, the first is used and exactness is not claimed.

The trial runs the model's layers at up to 400 rows. For a large model it runs the whole model at up to 48 rows, and one
matrix of each shape at 400. That last part covers the families in `etude.models.fused_layers` only. Attention is tried
over up to a thousand keys. The tests hold the claim for one and two threads. With more threads torch may split an
elementwise kernel within a row. The trial sees such a split in the layers, but not between attention's products.
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

from etude.models.prepack import prepacked_linear
from etude.observe import get_logger
from etude.rollout.attention_groups import CHUNK_TOKENS, KEYS

if TYPE_CHECKING:
    from etude.models import Model

__all__ = ["LOOSE", "MAX_LOGITS", "STEADY", "Form", "KeyForm", "RowForm", "plain_forms", "slack", "steady_form"]

MAX_LOGITS = 2**23
"""The most logits that exist at a time."""
MIN_KEYS = 32
"""Attention is over at least so many keys."""
BUDGET = 2**30
"""Multiplications that one batch of a trial may take, unless it is among the smallest."""
TRIAL_KEYS = (MIN_KEYS, 100, KEYS + 1, 300)
"""The numbers of keys that the queries of a trial see."""
LONGER = 700
"""The most keys that a batch has beyond these."""
TRIAL_BATCHES = (
    (1, CHUNK_TOKENS, 7),
    *((1, tokens, 16 * (tokens % 3)) for tokens in range(1, 18)),
    *((1, 1, LONGER), (1, CHUNK_TOKENS - 1, 340), (2, 1, 0), (2, 7, 16), (3, CHUNK_TOKENS // 2, 340), (24, 4, 40)),
)
"""The batches of a trial of attention: entries (at least as many as the engine computes), tokens, and further keys.
The first batch has all queries."""


@dataclass(frozen=True)
class RowForm:
    """The number of rows that linear layers compute at once."""

    multiple: int = 1
    """The number of rows is a multiple of this one."""
    fixed: bool = False
    """True if the number of rows is always `multiple` itself."""

    @property
    def most(self) -> int | None:
        """The most tokens that one pass may compute; None for no limit."""
        return self.multiple if self.fixed else None

    def logits(self, vocabulary: int) -> int:
        """Return how many rows of logits are computed at a time; fewer for a large vocabulary."""
        return self.multiple if self.fixed else max(1, MAX_LOGITS // (vocabulary * self.multiple)) * self.multiple


@dataclass(frozen=True)
class KeyForm:
    """The number of queries and keys of an attention product. Each head of a group adds its own queries."""

    least: int = 1
    """A product has at least so many queries."""
    multiple: int = 1
    """The number of queries is a multiple of this one."""
    keys: int = 1
    """The number of keys is a multiple of this one."""
    fixed: bool = False
    """True if every product has the fewest queries that `multiple` allows, and `KEYS` keys."""
    summed: int | None = KEYS
    """Values are summed over so many keys at a time; None for all."""

    @property
    def shares(self) -> bool:
        """True if one product may hold the queries of several requests."""
        return not self.fixed

    def piece(self, group: int) -> int:
        """Return how many tokens of a prompt attend at once, if `group` heads share their keys."""
        return self.tokens(1, group) if self.fixed else CHUNK_TOKENS

    def tokens(self, count: int, group: int) -> int:
        """Return `count`, rounded up to the number of tokens that is computed; the rest is padding."""
        step = self.multiple // math.gcd(self.multiple, group)
        return -(-max(count, -(-self.least // group)) // step) * step

    def blocks(self, keys: int, size: int) -> int:
        """Return how many blocks hold `keys` keys and their padding."""
        step = self.keys // math.gcd(self.keys, size)
        return -(-max(keys, MIN_KEYS) // (size * step)) * step

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
        assert found is not None, "attention needs at least one key"
        return found


@dataclass(frozen=True)
class Form:
    """The shapes in which a pass computes its products."""

    rows: RowForm
    keys: KeyForm
    exact: bool
    """True if a row's bits do not depend on its batch."""
    tried: bool = True
    """False if no trial was possible: weights were not finite, or all rows were equal."""


ROW_FORMS = (RowForm(16), RowForm(48, fixed=True), RowForm(16, fixed=True))
KEY_FORMS = (KeyForm(4), KeyForm(8, 8, 16), KeyForm(16, 16, 32), KeyForm(16, 16, KEYS, fixed=True))
"""The forms that are tried, in order."""
LOOSE = Form(RowForm(), KeyForm(summed=None), exact=False)
"""Where nothing is asked for."""
STEADY = Form(ROW_FORMS[0], KEY_FORMS[0], exact=True)
"""The form that holds on most processors."""

_found: dict[object, RowForm | None] = {}


def slack(size: int) -> int:
    """Return how many tokens padding may add to the longest context, for blocks of `size` tokens."""
    return MIN_KEYS + math.lcm(KEYS, size)


def steady_form(model: Model) -> Form:
    """Return the form for this model on this processor. A trial costs about as much as a short prompt."""
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
        get_logger("rollout").warning(
            "With this model on this processor the last bits of an answer depend on what shares its batch: no form of "
            "the products of %s was found in which they do not. A run goes on exactly after a kill, and not bit for "
            "bit. `threads=1` may help; `etude doctor` says whether that is the processor's, and what else may.",
            what,
        )
    return Form(rows or ROW_FORMS[0], keys or KEY_FORMS[0], exact=rows is not None and keys is not None)


def _shape_of(model: Model) -> object:
    """Return what decides which products a model computes, without the values of its weights."""
    shapes = frozenset((name, weight.shape) for name, weight in model.named_weights())
    return type(model.module), model.body, model.module.config.to_json_string(), shapes


def plain_forms(shapes: Iterable[tuple[int, int]], widths: Iterable[int]) -> Form:
    """Return the slowest form that linear layers [O, I] and heads of these widths need on this processor."""
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
        """True while all results are finite and differ between rows."""
        chance = torch.Generator().manual_seed(0)
        count = _rows_of(ROW_FORMS)
        self.ids = torch.randint(model.vocab_size, (count,), generator=chance).to(model.device)
        self.positions = torch.randint(model.context_length, (count,), generator=chance).to(model.device)
        self.weights = sum(weight.numel() for _, weight in model.named_weights())
        idle = [weight for weight in model.adapter_weights().values() if not weight.any()]
        self.adapters: AbstractContextManager[object] = _Filled(idle) if idle else nullcontext()

    def holds(self, form: RowForm) -> bool:
        """Return True if a token's hidden state and logits have the same bits in every batch of this form."""
        rows, batches = form.logits(self.model.vocab_size), _row_batches(form, self.weights)
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
        """Multiply by one matrix of each shape. The head is left out: it has few rows at a time."""
        shapes = {multiplied.weight.shape: multiplied.weight for multiplied in self.model.linear_weights()[:-1]}
        for number, (shape, weight) in enumerate(shapes.items()):
            x = _random(_rows_of(ROW_FORMS), shape[1], seed=number).to(weight)
            yield number, batch, prepacked_linear(x[batch], weight)

    def _telling(self, found: Tensor) -> Tensor:
        self.tells = self.tells and bool(found.isfinite().all()) and bool((found != found[0]).any() or len(found) == 1)
        return found


class _Filled(TorchFunctionMode):
    """A context in which adapters that are all zero compute with random numbers instead.

    Adapters are zero at the start of a run, and zero hides every difference. The weights are not changed.
    """

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
    """An `AttentionFn` in which each token sees only itself, so that it returns its own value."""
    del layer, k, scale, window, softcap
    return v.repeat_interleave(q.shape[1] // v.shape[1], 1)


def _rows_of(forms: Sequence[RowForm]) -> int:
    """Return the number of rows that a trial draws."""
    return max(25 * form.multiple for form in forms if not form.fixed)


def _row_batches(form: RowForm, weights: int) -> list[Tensor]:
    """Return the rows of each batch, in a random order: first all rows, then fewer."""
    chance = torch.Generator().manual_seed(0)
    counts = (1,) * 6 if form.fixed else (25, 5, 3, 2, 1, 1)
    sizes = [count * form.multiple for count in counts if count <= 3 or count * form.multiple * weights <= BUDGET]
    known = 2 * form.multiple if form.fixed else max(sizes)
    return [torch.randperm(known, generator=chance)[:size] for size in sizes]


def _alike(compute: Callable[[Tensor], Iterator[tuple[int, Tensor, Tensor]]], batches: Sequence[Tensor]) -> bool:
    """Return True if each row has the same bits in all of its batches.

    `compute` yields the products of a batch in parts: the number of the product, the rows, and their values.
    """
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
    """Return the form for heads of this width, of which `group` share their keys. Products have at least `least`
    entries."""
    del threads  # what it was tried with
    with torch.inference_mode():
        entries, longest = max(least, *(each[0] for each in TRIAL_BATCHES)), max(TRIAL_KEYS) + LONGER + KEYS
        keys, values = (_random(1, longest, width, seed=seed).to(place).repeat(entries, 1, 1) for seed in (1, 2))
        queries = _random(1, KeyForm(16, 16).tokens(CHUNK_TOKENS, group) * group, width, seed=3).to(place)
        queries = queries.repeat(entries, 1, 1)
        return next((form for form in KEY_FORMS if _attends_alike(form, group, least, queries, keys, values)), None)


def _attends_alike(form: KeyForm, group: int, least: int, queries: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Return True if each query's scores and sums have the same bits in every batch, at every place.

    Batches also hold the keys of longer contexts, with weights of zero.
    """
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
    """Return the entries, rows and keys of each batch; the first has all rows."""
    return dict.fromkeys(
        (max(least, entries), form.tokens(min(tokens, form.piece(group)), group) * group, form.blocks(seen + longer, 1))
        for entries, tokens, longer in TRIAL_BATCHES
    )


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
