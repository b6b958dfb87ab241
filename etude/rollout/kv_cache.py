"""The KV cache in blocks, and the attention that reads it.

`KVCache` owns the memory of the layers with heads of one shape. Each layer has all key blocks, then all value blocks,
head by head. One `index_select` of a request's blocks thus leaves each head's keys as one matrix. `ForwardBatch` is an
`AttentionFn` for one forward pass: it knows where to write each new token, and which blocks each attention group reads.
If requests that are generating hold the same first blocks, those are fetched and attended once for all of them.

**A row's result does not depend on what shares its batch.** Requests are grouped only as entries of a batched matrix
product, each of which is reduced on its own. Padding to the longest of a group adds weights that are exactly zero
behind the others. In float32 the kernels do not promise this by themselves. On most processors a product of fewer than
4 rows takes another path. So does a linear layer of fewer than 16 rows if their number is not a multiple of 4. A sum
over more than 192 keys is split into parts whose size depends on their number. On other processors more cases differ. A
pass therefore computes in `ProductShapes`, found by a trial, which fix how many rows, queries and keys a product has
(see `batch_invariance`). Then a token's numbers are the same if it was computed alone, in a batch, in a chunk of a
prompt, or again after its request was preempted. In bfloat16 the kernels keep the promise at any size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from etude.errors import ConfigError
from etude.models import AttentionShape, Model
from etude.models.gpu_memory import gpu_bytes
from etude.rollout.attention_groups import CPU_LIMITS, GPU_LIMITS, AttentionGroup, group_chunks, split_into_chunks
from etude.rollout.batch_invariance import ProductShapes
from etude.rollout.scheduler import KEPT_STATES, ScheduledWork

if TYPE_CHECKING:
    from etude.rollout.config import TorchEngineConfig


def block_bytes(model: Model, size: int) -> int:
    """Return the bytes of one block in all layers."""
    return size * model.kv_values_per_token * model.dtype.itemsize


def count_slots(max_num_seqs: int) -> int:
    """Return the number of states of a recurrent layer: one for each running request, and the kept ones."""
    return max_num_seqs + KEPT_STATES


class KVCache:
    """The memory of all blocks, for the layers of a model that have heads of one shape."""

    def __init__(self, model: Model, shape: AttentionShape, *, blocks: int, size: int) -> None:
        self.blocks = blocks
        self.size = size
        self.heads = shape.key_heads
        self.width = shape.width
        self.block_bytes = size * shape.values_per_token * model.dtype.itemsize  # of one layer
        self.queries_per_kv_head = shape.query_heads // shape.key_heads
        self.dtype = model.dtype
        self.device = model.device
        layers = [layer for layer, own in enumerate(model.attention_shapes) if own == shape]
        self.row_of_layer = {layer: row for row, layer in enumerate(layers)}
        """The layers that it serves, with their places in the memory."""
        extent = (len(layers), 2, self.heads * blocks * size, self.width)
        self.memory = torch.zeros(extent, dtype=self.dtype, device=self.device)
        """[layer, keys or values, head · block · position, D]"""
        self.scratch_memory = torch.empty(0, dtype=self.dtype, device=self.device)
        heads = torch.arange(self.heads)
        self.head_tokens = heads * blocks * size  # the start of each head's tokens
        self.half_blocks = (
            torch.arange(2)[:, None] * self.heads + heads
        ) * blocks  # the start of its key and value blocks

    def scratch(self, elements: int) -> Tensor:
        """Return memory to fetch into, the same for every layer."""
        if self.scratch_memory.numel() < elements:
            self.scratch_memory = torch.empty(elements, dtype=self.dtype, device=self.device)
        return self.scratch_memory[:elements]


@dataclass
class AttentionBatch:
    """An attention group as tensors, made once and used in every layer.

    The chunks of a prefix group have the same first S keys, fetched once. Each chunk has L more keys and n queries.
    """

    rows: Any  # Tensor [F · U · n] or a slice: the flat rows of the queries
    real_rows: Tensor | None  # those that are no padding; None for all
    shape: tuple[int, int, int, int, int]  # F, U, n, S, L
    fetch: Tensor  # blocks: [2 · F · Hk · S / size] of prefix groups, then [2 · F · U · Hk · L / size] of chunks
    query_positions: Tensor  # [F · U, n] of each query
    last_seen: Tensor  # [F · U, n]: the position of the last key that it sees: its own, but within some images
    in_windows: bool  # later keys than its own are seen in layers with a window alone
    masks: dict[int | None, Tensor] = field(default_factory=dict)

    def mask(self, window: int | None) -> Tensor:
        """[F · U, 1, n, 1, S + L]: 0 where a query sees a key, −inf elsewhere."""
        if window not in self.masks:
            keys = torch.arange(self.shape[3] + self.shape[4], device=self.query_positions.device)
            last = self.query_positions if self.in_windows and window is None else self.last_seen
            visible = keys <= last[:, :, None]
            if window is not None:
                visible &= keys > self.query_positions[:, :, None] - window
            mask = torch.zeros(visible.shape, device=self.query_positions.device).masked_fill_(~visible, -torch.inf)
            self.masks[window] = mask[:, None, :, None]
        return self.masks[window]


@dataclass(frozen=True, eq=False)
class ComputedRows:
    """The rows of a pass that are kept, and where."""

    places: Tensor
    """[N] on the CPU: the places of the tokens in the blocks."""
    tokens: int
    """The number of real rows of the pass, which come first."""
    source: Tensor | None
    """[N]: the row of each place; None for all real rows in order."""

    def select(self, rows: Tensor) -> Tensor:
        """[P, …] → [N, …]: return the row of each place."""
        return rows[: self.tokens] if self.source is None else rows.index_select(0, self.source)


@dataclass(frozen=True)
class _Scoring:
    """The options by which the scores of an attention call become weights; see `AttentionFn`."""

    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None


class ForwardBatch:
    """One forward pass over the work of a step, in the layers of one cache: its flat tokens, and how they attend."""

    def __init__(
        self, cache: KVCache, works: Sequence[ScheduledWork], table: NDArray[np.int64], shapes: ProductShapes
    ) -> None:
        self.cache = cache
        self.shapes = shapes
        computed = [work for work in works if work.stop > work.start]
        start = np.array([work.start for work in computed])
        stop = np.array([work.stop for work in computed])
        slot = np.array([work.request.slot for work in computed])
        first = np.cumsum(stop - start) - (stop - start)
        self.tokens = int((stop - start).sum())
        """The number of real rows. The others pad it to a safe number of rows."""
        padding = np.zeros(-self.tokens % shapes.rows.multiple, dtype=np.int64)
        positions = np.arange(self.tokens) - np.repeat(first - start, stop - start)
        ids = np.concatenate([work.request.tokens[work.start : work.stop] for work in computed])
        self.ids = self._to(np.concatenate([ids, padding]))
        self.positions = self._to(np.concatenate([positions, padding]))
        self.sampled = [work for work in works if work.samples_token]
        """The work whose next token is drawn; `last_rows` has the flat rows of the hidden states to draw it from."""
        row_of = {id(work): row for work, row in zip(computed, first.tolist(), strict=True)}
        computing = [work.duplicate_of or work for work in self.sampled]
        last = [row_of[id(work)] + work.stop - work.start - 1 for work in computing]
        self.last_rows = self._to(np.array(last + [0] * (-len(last) % shapes.rows.multiple), dtype=np.int64))
        self.computed = self._computed_rows(np.repeat(slot, stop - start), positions, row_of, table)
        addresses = self.computed.places[:, None] + cache.head_tokens
        self._write = addresses.reshape(-1).to(cache.device)
        reach = _reach(computed)
        images = (work.request.images for work in computed)
        self._in_windows = any(each is not None and each.in_windows for each in images)
        self._last_seen = positions if reach is None else reach - 1
        chunk_tokens = shapes.attention.chunk_tokens(cache.queries_per_kv_head)
        chunks = split_into_chunks(first, start, stop, slot, chunk_tokens, reach)
        sizes = {"size": cache.size, "block_bytes": cache.block_bytes, "heads": cache.heads * cache.queries_per_kv_head}
        limits = GPU_LIMITS if cache.device.type == "cuda" else CPU_LIMITS
        allows = shapes.attention.allows_prefix_groups
        groups = group_chunks(chunks, table, allow_prefix_groups=allows, limits=limits, **sizes)
        self._batches = [self._batch(group, table) for group in groups]

    def _computed_rows(
        self,
        slots: NDArray[np.int64],
        positions: NDArray[np.int64],
        row_of: dict[int, int],
        table: NDArray[np.int64],
    ) -> ComputedRows:
        """Return the places of all tokens. A duplicate's last, partial block gets a copy of the same keys."""
        size = self.cache.size
        source = [np.arange(self.tokens)]
        for work in self.sampled:
            if work.duplicate_of is not None:
                tail = np.arange(work.stop // size * size, work.stop)
                source.append(tail + row_of[id(work.duplicate_of)] - work.duplicate_of.start)
                slots = np.concatenate([slots, np.full(len(tail), work.request.slot)])
                positions = np.concatenate([positions, tail])
        places = torch.from_numpy(table[slots, positions // size] * size + positions % size)
        copied = len(slots) > self.tokens
        return ComputedRows(places, self.tokens, self._to(np.concatenate(source)) if copied else None)

    def _batch(self, group: AttentionGroup, table: NDArray[np.int64]) -> AttentionBatch:
        cache, chunks = self.cache, group.chunks
        num_groups = group.prefix_groups
        size = cache.size
        prefix_length = group.prefix_length
        count = self.shapes.attention.pad_tokens(int(chunks.count.max()), cache.queries_per_kv_head)
        shared_blocks = prefix_length // size
        blocks = self.shapes.attention.padded_blocks(int(chunks.reach.max()) - prefix_length, size)
        counts = chunks.count[:, None]
        index = np.minimum(np.arange(count), counts - 1)  # copies of its last query pad a short chunk
        rows = (chunks.row[:, None] + index).reshape(-1)
        real = ((np.arange(count) < counts) & group.real[:, None]).reshape(-1)
        block_ids = torch.from_numpy(table[chunks.slot, : shared_blocks + blocks])
        shared_ids = block_ids[:: len(chunks) // num_groups, :shared_blocks]
        parts = (shared_ids, block_ids[:, shared_blocks:])
        fetch = [cache.half_blocks[:, None, :, None] + ids[None, :, None, :] for ids in parts]
        return AttentionBatch(
            rows=slice(int(rows[0]), int(rows[-1]) + 1) if bool((np.diff(rows) == 1).all()) else self._to(rows),
            real_rows=None if bool(real.all()) else self._to(np.flatnonzero(real)),
            shape=(num_groups, len(chunks) // num_groups, count, prefix_length, blocks * size),
            fetch=torch.cat([ids.reshape(-1) for ids in fetch]).to(cache.device),
            query_positions=self._to(chunks.end[:, None] - counts + index),
            last_seen=self._to(self._last_seen[rows].reshape(len(chunks), count)),
            in_windows=self._in_windows,
        )

    def __call__(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Write the new keys and values, then attend over all that each token may see (an `AttentionFn`)."""
        cache, scoring = self.cache, _Scoring(scale, window, softcap, sinks)
        memory = cache.memory[cache.row_of_layer[layer]]
        for half, new in enumerate((k, v)):
            memory[half].index_copy_(0, self._write, self.computed.select(new).reshape(-1, cache.width))
        blocks = memory.view(2 * cache.heads * cache.blocks, cache.size * cache.width)
        if len(self._batches) == 1 and self.tokens == len(q) and isinstance(self._batches[0].rows, slice):
            return self._attend(self._batches[0], q, blocks, scoring)
        out = torch.zeros_like(q)
        for batch in self._batches:
            output = self._attend(batch, q, blocks, scoring)
            if batch.real_rows is None:
                out[batch.rows] = output
            else:
                out[batch.rows[batch.real_rows]] = output[batch.real_rows]
        return out

    def _attend(self, batch: AttentionBatch, q: Tensor, blocks: Tensor, scoring: _Scoring) -> Tensor:
        """[F · U · n, Hq, D]: the attention output for the queries of a batch."""
        cache = self.cache
        num_groups, chunks_per_group, count, num_shared, num_own = batch.shape
        num_chunks = num_groups * chunks_per_group
        heads = cache.heads
        rows = count * cache.queries_per_kv_head
        fetched = cache.scratch(len(batch.fetch) * blocks.shape[1]).view(len(batch.fetch), -1)
        torch.index_select(blocks, 0, batch.fetch, out=fetched)
        num_shared_blocks = 2 * num_groups * heads * num_shared // cache.size
        keys, values = fetched[num_shared_blocks:].view(2, num_chunks * heads, num_own, cache.width)
        queries = q[batch.rows].view(num_chunks, count, heads, cache.queries_per_kv_head, cache.width).transpose(1, 2)
        queries = queries.reshape(num_chunks * heads, rows, cache.width)
        scores = self.shapes.attention.scores(queries, keys)
        if num_shared:
            shared_shape = (2, num_groups * heads, num_shared, cache.width)
            common_keys, common_values = fetched[:num_shared_blocks].view(shared_shape)
            of_groups = self.shapes.attention.scores(_group_by_prefix(queries, num_groups, heads), common_keys)
            scores = torch.cat([_split_by_chunk(of_groups, num_groups, chunks_per_group), scores], -1)
        scores = scores.view(num_chunks, heads, count, cache.queries_per_kv_head, num_shared + num_own)
        weights = _weigh(scores, batch.mask(scoring.window), scoring).to(cache.dtype)
        weights = weights.reshape(num_chunks * heads, rows, num_shared + num_own)
        sums = None
        if num_shared:
            of_groups = self.shapes.attention.weighted_sums(
                _group_by_prefix(weights[:, :, :num_shared], num_groups, heads), common_values
            )
            sums = _split_by_chunk(of_groups, num_groups, chunks_per_group)
        sums = self.shapes.attention.weighted_sums(weights[:, :, num_shared:], values, sums)
        sums = sums.view(num_chunks, heads, count, cache.queries_per_kv_head, cache.width).transpose(1, 2)
        return sums.reshape(num_chunks * count, heads * cache.queries_per_kv_head, cache.width)

    def _to(self, values: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(values).to(self.cache.device)


def _reach(computed: Sequence[ScheduledWork]) -> NDArray[np.int64] | None:
    """[N]: return the number of tokens that each token of these works sees; None if none sees a later one."""
    if all(work.request.images is None or work.request.images.reach is None for work in computed):
        return None
    parts = []
    for work in computed:
        reach = np.arange(work.start + 1, work.stop + 1)
        images = work.request.images
        if images is not None and images.reach is not None:
            of_prompt = images.reach[work.start : work.stop]
            reach[: len(of_prompt)] = of_prompt
        parts.append(reach)
    return np.concatenate(parts)


def _weigh(scores: Tensor, mask: Tensor, scoring: _Scoring) -> Tensor:
    """[N, Hk, n, G, L] → [N, Hk, n, G, L]: the softmax of masked scores, in float32 or wider."""
    if scoring.softcap is None:
        weights = torch.add(mask, scores, alpha=scoring.scale)
    else:
        weights = torch.tanh(scores.float() * (scoring.scale / scoring.softcap)).mul_(scoring.softcap).add_(mask)
    if scoring.sinks is None:
        return torch.softmax(weights, -1)
    sinks = scoring.sinks.view(1, scores.shape[1], 1, -1, 1).to(weights.dtype).expand(*weights.shape[:-1], 1)
    return torch.softmax(torch.cat([weights, sinks], -1), -1)[..., :-1]


def _group_by_prefix(rows: Tensor, num_groups: int, heads: int) -> Tensor:
    """[F · U · Hk, M, X] → [F · Hk, U · M, X]"""
    per_group = len(rows) // (num_groups * heads)
    split = rows.view(num_groups, per_group, heads, *rows.shape[1:]).transpose(1, 2)
    return split.reshape(num_groups * heads, per_group * rows.shape[1], rows.shape[2])


def _split_by_chunk(rows: Tensor, num_groups: int, per_group: int) -> Tensor:
    """[F · Hk, U · M, X] → [F · U · Hk, M, X]"""
    heads = len(rows) // num_groups
    split = rows.view(num_groups, heads, per_group, -1, rows.shape[2]).transpose(1, 2)
    return split.reshape(num_groups * per_group * heads, -1, rows.shape[2])


def count_blocks(model: Model, config: TorchEngineConfig) -> int:
    """Return the number of blocks of an engine with this model: no more than requests could fill."""
    bytes_of_block = block_bytes(model, config.block_size)
    max_useful = config.max_num_seqs * -(-model.context_length // config.block_size)
    blocks = min(cache_bytes(model, config) // bytes_of_block, max_useful)
    if blocks == 0:
        raise ConfigError(
            f"kv_gib={kv_gib(model.device, config):g} does not hold one block: {config.block_size} tokens of this "
            f"model take {bytes_of_block / 2**30:.3g} GiB. Raise kv_gib or lower block_size."
        )
    return blocks


def kv_gib(device: torch.device, config: TorchEngineConfig) -> float:
    """Return the GiB for keys and values on a device."""
    if config.kv_gib is not None:
        return config.kv_gib
    total = gpu_bytes(device) if device.type == "cuda" else 0
    return total / 8 / 2**30 if total else 1.0


def cache_bytes(model: Model, config: TorchEngineConfig) -> int:
    """Return the bytes that an engine has for keys and values: what the states of recurrent layers leave."""
    held = model.state_bytes * count_slots(config.max_num_seqs)
    gib = kv_gib(model.device, config)
    left = int(gib * 2**30) - held
    if left <= 0:
        raise ConfigError(
            f"kv_gib={gib:g} does not hold the states of max_num_seqs={config.max_num_seqs} requests: "
            f"{model.state_bytes / 2**20:.3g} MiB each, {held / 2**30:.3g} GiB with {KEPT_STATES} kept ones. Raise "
            f"kv_gib or lower max_num_seqs."
        )
    return left
