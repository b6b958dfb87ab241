"""Shapes of matrix products in which a row's bits do not depend on what shares its batch: *batch invariance*.

A kernel may sum a row's products in another order when the number of rows changes. Which row counts give the same order
depends on the processor, the math library and the number of threads. A *padding* fixes how many rows, queries and keys
are multiplied at once. The paddings below are tried in order. The first ones are the fastest; in the last ones every
product has one shape. The engine uses the first padding in which no row's bits depend on its batch. The result is kept
in the process, per model shape and number of threads. If none passes, the first is used and exactness is not claimed.

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

from etude.models.experts import pad_expert_rows
from etude.models.mixers import AloneMixer
from etude.models.prepack import prepacked_linear
from etude.observe import get_logger
from etude.rollout.attention_groups import CHUNK_TOKENS, KEY_CHUNK
from etude.rollout.state_trial import states_are_batch_invariant

if TYPE_CHECKING:
    from etude.models import Model

MAX_LOGITS = 2**23
"""The most logits that are computed at a time."""
MIN_KEYS = 32
"""The fewest keys of an attention product, and of the last sum of values."""
MAX_TRIAL_PRODUCTS = 2**30
"""Multiplications that one batch of a trial may take, unless it is among the smallest."""
FEW_ROWS = (1, 2, 5)
"""The real rows of batches that are mostly padding: a mixture gives its experts few rows there."""
TRIAL_KEYS = (MIN_KEYS, 100, KEY_CHUNK + 1, 300)
"""The numbers of keys that the queries of a trial see."""
MAX_EXTRA_KEYS = 700
"""The most keys that a trial's batch has beyond these."""
TRIAL_BATCHES = (
    (1, CHUNK_TOKENS, 7),
    *((1, tokens, 16 * (tokens % 3)) for tokens in range(1, 18)),
    *((1, tokens, 0) for tokens in (1, 2, 5, 8, 12, 24)),
    (1, 1, MAX_EXTRA_KEYS),
    (1, CHUNK_TOKENS - 1, 340),
    (2, 1, 0),
    (2, 7, 16),
    (3, CHUNK_TOKENS // 2, 340),
    (24, 4, 40),
)
"""The batches of a trial of attention: entries (at least as many as the engine computes), tokens, and further keys.
The first batch has all queries."""


@dataclass(frozen=True)
class RowPadding:
    """The number of rows that linear layers compute at once."""

    multiple: int = 1
    """The number of rows is a multiple of this one."""
    fixed: bool = False
    """True if the number of rows is always `multiple` itself."""

    @property
    def max_tokens(self) -> int | None:
        """The most tokens that one pass may compute; None for no limit."""
        return self.multiple if self.fixed else None

    def logit_rows(self, vocab_size: int) -> int:
        """Return how many rows of logits are computed at a time; fewer for a large vocabulary."""
        return self.multiple if self.fixed else max(1, MAX_LOGITS // (vocab_size * self.multiple)) * self.multiple


@dataclass(frozen=True)
class AttentionPadding:
    """The number of queries and keys of an attention product.

    `group_size` is the number of query heads that share a key head. Each head of a group adds its own queries.
    """

    min_queries: int = 1
    """The fewest queries of a product."""
    query_multiple: int = 1
    """The number of queries is a multiple of this one."""
    key_multiple: int = 1
    """The number of keys is a multiple of this one."""
    fixed: bool = False
    """True if every product has the fewest queries that `query_multiple` allows, and `KEY_CHUNK` keys."""
    keys_per_sum: int | None = KEY_CHUNK
    """The number of keys over which values are summed at a time; None for all."""

    @property
    def allows_prefix_groups(self) -> bool:
        """True if one product may hold the queries of several requests."""
        return not self.fixed

    def chunk_tokens(self, group_size: int) -> int:
        """Return how many tokens of a prompt attend at once."""
        return self.pad_tokens(1, group_size) if self.fixed else CHUNK_TOKENS

    def pad_tokens(self, count: int, group_size: int) -> int:
        """Return `count`, rounded up to the number of tokens that is computed; the rest is padding."""
        step = self.query_multiple // math.gcd(self.query_multiple, group_size)
        return -(-max(count, -(-self.min_queries // group_size)) // step) * step

    def padded_blocks(self, keys: int, block_size: int) -> int:
        """Return how many blocks hold `keys` keys and their padding."""
        step = self.key_multiple // math.gcd(self.key_multiple, block_size)
        blocks = -(-max(keys, MIN_KEYS) // (block_size * step)) * step
        while 0 < blocks * block_size % KEY_CHUNK < MIN_KEYS:  # few rows times few keys take another path
            blocks += step
        return blocks

    def scores(self, queries: Tensor, keys: Tensor) -> Tensor:
        """[N, M, D], [N, L, D] → [N, M, L]"""
        if not self.fixed:
            return torch.bmm(queries, keys.transpose(1, 2))
        parts = torch.split(keys, KEY_CHUNK, 1)
        return torch.cat([torch.bmm(queries, part.transpose(1, 2)) for part in parts], -1)

    def weighted_sums(self, weights: Tensor, values: Tensor, total: Tensor | None = None) -> Tensor:
        """[N, M, L], [N, L, D] → [N, M, D], added to `total`."""
        step = self.keys_per_sum or max(weights.shape[2], 1)
        for start in range(0, weights.shape[2], step):
            weight = weights[:, :, start : start + step]
            value = values[:, start : start + step]
            total = torch.bmm(weight, value) if total is None else torch.baddbmm(total, weight, value)
        assert total is not None, "attention needs at least one key"
        return total


@dataclass(frozen=True)
class ProductShapes:
    """The shapes in which a pass computes its products."""

    rows: RowPadding
    attention: AttentionPadding
    batch_invariant: bool
    """True if a row's bits do not depend on its batch."""
    tested: bool = True
    """False if no trial was possible: weights were not finite, or all rows were equal."""


ROW_PADDINGS = (RowPadding(16), RowPadding(48, fixed=True), RowPadding(16, fixed=True))
ATTENTION_PADDINGS = (
    AttentionPadding(4),
    AttentionPadding(8, 8, 16),
    AttentionPadding(16, 16, 32),
    AttentionPadding(16, 16, KEY_CHUNK, fixed=True),
)
"""The paddings that are tried, in order."""
UNPADDED_SHAPES = ProductShapes(RowPadding(), AttentionPadding(keys_per_sum=None), batch_invariant=False)
"""The shapes of an engine that need not be deterministic."""
USUAL_SHAPES = ProductShapes(ROW_PADDINGS[0], ATTENTION_PADDINGS[0], batch_invariant=True)
"""The shapes that are batch invariant on most processors."""

_tested_paddings: dict[object, RowPadding | None] = {}


def max_context_padding(block_size: int) -> int:
    """Return how many tokens padding may add to the longest context, for blocks of `block_size` tokens."""
    return MIN_KEYS + math.lcm(KEY_CHUNK, block_size)


def find_batch_invariant_shapes(model: Model) -> ProductShapes:
    """Return the shapes for this model on this processor. A trial costs about as much as a short prompt."""
    device, threads = model.device, torch.get_num_threads()
    found = [
        _find_attention_padding(
            shape.width, shape.query_heads // shape.key_heads, min(shape.key_heads, threads), device, threads
        )
        for shape in dict.fromkeys(model.attention_shapes)
        if shape is not None
    ]
    attention = _choose_slowest(found)
    key = _weight_shapes(model), device, threads
    if key not in _tested_paddings:
        trial = _ModelTrial(model)
        with torch.inference_mode():
            rows = next((padding for padding in ROW_PADDINGS if trial.is_batch_invariant(padding)), None)
        if not trial.conclusive:
            unproven = _choose_shapes(None, attention)
            return ProductShapes(unproven.rows, unproven.attention, batch_invariant=False, tested=False)
        _tested_paddings[key] = rows
    rows = _tested_paddings[key]
    if rows is None or attention is None:
        paddings = (("linear layers and recurrences", rows), ("attention", attention))
        get_logger("rollout").warning(
            "With this model on this processor the last bits of an answer depend on what shares its batch: no "
            "padding of the products of %s prevents it. A killed run resumes exactly, but not bit for bit. "
            "`threads=1` may help; `etude doctor` reports if the processor is the cause, and what else may help.",
            " and ".join(name for name, padding in paddings if padding is None),
        )
    return _choose_shapes(rows, attention)


def _weight_shapes(model: Model) -> object:
    """Return all that decides which products a model computes; the values of its weights do not."""
    shapes = frozenset((name, weight.shape) for name, weight in model.named_weights())
    return type(model.module), model.body, model.module.config.to_json_string(), shapes


def find_shapes_of_layers(linear_layers: Iterable[tuple[int, int]], head_dims: Iterable[int]) -> ProductShapes:
    """Return the slowest shapes that linear layers [O, I] and heads of these widths need on this processor."""
    layers = [_random(outputs, inputs, seed=outputs) for outputs, inputs in linear_layers]
    inputs = [_random(_num_trial_rows(ROW_PADDINGS), layer.shape[1], seed=1) for layer in layers]

    def compute(batch: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        for number, (x, layer) in enumerate(zip(inputs, layers, strict=True)):
            yield number, batch, linear(x[batch], layer)

    rows = next((padding for padding in ROW_PADDINGS if _rows_match(compute, _row_batches(padding, 0))), None)
    threads = torch.get_num_threads()
    found = [_find_attention_padding(width, 2, min(2, threads), torch.device("cpu"), threads) for width in head_dims]
    return _choose_shapes(rows, _choose_slowest(found))


def _choose_slowest(found: Sequence[AttentionPadding | None]) -> AttentionPadding | None:
    """Return the padding that serves heads of all shapes; None if some shape has none."""
    passed = [padding for padding in found if padding is not None]
    return max(passed, key=ATTENTION_PADDINGS.index) if len(passed) == len(found) else None


def _choose_shapes(rows: RowPadding | None, attention: AttentionPadding | None) -> ProductShapes:
    """Return the paddings that passed; the fastest one in place of None, without the claim."""
    passed = rows is not None and attention is not None
    return ProductShapes(rows or ROW_PADDINGS[0], attention or ATTENTION_PADDINGS[0], batch_invariant=passed)


# -- trials -----------------------------------------------------------------------------------------------------------


class _ModelTrial:
    """A model that computes random tokens in batches of several sizes. Each token attends to itself alone."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.conclusive = True
        """True while all results are finite and differ between rows."""
        generator = torch.Generator().manual_seed(0)
        count = _num_trial_rows(ROW_PADDINGS)
        self.ids = torch.randint(model.vocab_size, (count,), generator=generator).to(model.device)
        self.positions = torch.randint(model.context_length, (count,), generator=generator).to(model.device)
        self.num_weights = sum(weight.numel() for _, weight in model.named_weights())
        zero_weights = [weight for weight in model.adapter_weights().values() if not weight.any()]
        self.adapters: AbstractContextManager[object] = _RandomAdapters(zero_weights) if zero_weights else nullcontext()

    def is_batch_invariant(self, padding: RowPadding) -> bool:
        """Return True if a token's hidden state and logits have the same bits in every batch of this padding."""
        rows, batches = padding.logit_rows(self.model.vocab_size), _row_batches(padding, self.num_weights)
        with self.adapters, pad_expert_rows(padding.multiple):
            same = self.conclusive and _rows_match(lambda batch: self._compute(batch, rows), batches)
        if same and self.model.state_bytes:
            same = self._states_match(padding)
        largest, *_, smallest = _row_batches(padding, 0)
        return same and (len(largest) == len(batches[0]) or _rows_match(self._multiply, (largest, smallest)))

    def _states_match(self, padding: RowPadding) -> bool:
        """Return True if recurrent layers are batch invariant too. A pass of few tokens cannot keep to their chunks."""
        batch = _row_batches(padding, self.num_weights)[0]
        return not padding.fixed and states_are_batch_invariant(
            self.model, self.ids[batch], self.positions[batch], padding.multiple
        )

    def _compute(self, batch: Tensor, rows: int) -> Iterator[tuple[int, Tensor, Tensor]]:
        hidden = self.model.hidden(self.ids[batch], self.positions[batch], AloneMixer())
        yield 0, batch, self._check_conclusive(hidden)
        for part, hidden_part in zip(torch.split(batch, rows), torch.split(hidden, rows), strict=True):
            yield 1, part, self._check_conclusive(self.model.logits(hidden_part))

    def _multiply(self, batch: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Multiply by one matrix of each shape. The head is left out: it has few rows at a time."""
        weights = {layer.weight.shape: layer.weight for layer in self.model.linear_weights()[:-1]}
        for number, (shape, weight) in enumerate(weights.items()):
            x = _random(_num_trial_rows(ROW_PADDINGS), shape[1], seed=number).to(weight)
            yield number, batch, prepacked_linear(x[batch], weight)

    def _check_conclusive(self, result: Tensor) -> Tensor:
        differs = bool((result != result[0]).any()) or len(result) == 1
        self.conclusive = self.conclusive and bool(result.isfinite().all()) and differs
        return result


class _RandomAdapters(TorchFunctionMode):
    """A context in which adapters that are all zero compute with random numbers instead.

    Adapters are zero at the start of a run, and zero hides every difference. The weights are not changed.
    """

    def __init__(self, zero_weights: Sequence[Tensor]) -> None:
        super().__init__()
        self._random = {
            weight.data_ptr(): _random(*weight.shape, seed=seed).div_(weight.shape[-1] ** 0.5).to(weight)
            for seed, weight in enumerate(zero_weights)
        }

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*map(self._replace, args), **{name: self._replace(value) for name, value in (kwargs or {}).items()})

    def _replace(self, argument: Any) -> Any:
        if not isinstance(argument, Tensor) or argument.dim() != 2:
            return argument
        random = self._random.get(argument.data_ptr())
        return random if random is not None and random.shape == argument.shape else argument


def _num_trial_rows(paddings: Sequence[RowPadding]) -> int:
    """Return the number of rows that a trial draws."""
    return max(25 * padding.multiple for padding in paddings if not padding.fixed)


def _row_batches(padding: RowPadding, num_weights: int) -> list[Tensor]:
    """Return the rows of each batch, in a random order: first all rows, then fewer."""
    generator = torch.Generator().manual_seed(0)
    counts = (1,) * 6 if padding.fixed else (25, 5, 3, 2, 1, 1)
    affordable = [
        count for count in counts if count <= 3 or count * padding.multiple * num_weights <= MAX_TRIAL_PRODUCTS
    ]
    sizes = [count * padding.multiple for count in affordable]
    num_rows = 2 * padding.multiple if padding.fixed else max(sizes)
    batches = [torch.randperm(num_rows, generator=generator)[:size] for size in sizes]
    for real in FEW_ROWS:  # the rest is padding, which is one token many times
        batches.append(torch.cat([batches[0][:real], batches[0][-1:].expand(padding.multiple - real)]))
    return batches


def _rows_match(compute: Callable[[Tensor], Iterator[tuple[int, Tensor, Tensor]]], batches: Sequence[Tensor]) -> bool:
    """Return True if each row has the same bits in all of its batches.

    `compute` yields the products of a batch in parts: the number of the product, the rows, and their values.
    """
    count = 1 + max(int(batch.max()) for batch in batches)
    first: dict[int, Tensor] = {}
    computed: dict[int, Tensor] = {}
    for batch in batches:
        for number, rows, values in compute(batch):
            if number not in first:
                first[number] = values.new_empty(count, values.shape[1])
                computed[number] = torch.zeros(count, dtype=torch.bool)
            repeated = computed[number][rows]
            if not torch.equal(values[repeated], first[number][rows[repeated]]):
                return False
            first[number][rows], computed[number][rows] = values, True
    return True


@cache
def _find_attention_padding(
    head_dim: int, group_size: int, min_entries: int, device: torch.device, threads: int
) -> AttentionPadding | None:
    """Return the first padding that passes for heads of this width, in products of at least `min_entries` entries."""
    del threads  # a part of the cache's key
    with torch.inference_mode():
        entries = max(min_entries, *(batch[0] for batch in TRIAL_BATCHES))
        num_keys = max(TRIAL_KEYS) + MAX_EXTRA_KEYS + KEY_CHUNK
        keys, values = (_random(1, num_keys, head_dim, seed=seed).to(device).repeat(entries, 1, 1) for seed in (1, 2))
        rows = AttentionPadding(16, 16).pad_tokens(CHUNK_TOKENS, group_size) * group_size
        queries = _random(1, rows, head_dim, seed=3).to(device).repeat(entries, 1, 1)
        for padding in ATTENTION_PADDINGS:
            if _attention_matches(padding, group_size, min_entries, queries, keys, values):
                return padding
        return None


def _attention_matches(
    padding: AttentionPadding, group_size: int, min_entries: int, queries: Tensor, keys: Tensor, values: Tensor
) -> bool:
    """Return True if each query's scores and sums have the same bits in every batch, at every row.

    Batches also hold the keys of longer contexts, with weights of zero.
    """
    noise = _random(1, queries.shape[1], max(TRIAL_KEYS), seed=4).to(queries.device)
    for seen in TRIAL_KEYS:
        first: list[Tensor] = []
        for entries, rows, length in _attention_batches(padding, group_size, min_entries, seen):
            weights = queries.new_zeros(entries, rows, length)
            weights[:, :, :seen] = noise[:, :rows, :seen]
            for order in (torch.arange(rows), torch.arange(rows).flip(0)):
                scores = padding.scores(queries[:entries, order], keys[:entries, :length])
                sums = padding.weighted_sums(weights[:, order], values[:entries, :length])
                results = [scores[:, :, :seen], sums]
                first = first or [result[0].clone() for result in results]
                if not all(bool((one[order] == result).all()) for one, result in zip(first, results, strict=True)):
                    return False
    return True


def _attention_batches(
    padding: AttentionPadding, group_size: int, min_entries: int, seen: int
) -> Iterable[tuple[int, int, int]]:
    """Return the entries, rows and keys of each batch; the first has all rows."""
    shapes: dict[tuple[int, int, int], None] = {}
    for entries, tokens, extra_keys in TRIAL_BATCHES:
        padded = padding.pad_tokens(min(tokens, padding.chunk_tokens(group_size)), group_size)
        keys = padding.padded_blocks(seen + extra_keys, 1)
        shapes[max(min_entries, entries), padded * group_size, keys] = None
    return shapes


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
