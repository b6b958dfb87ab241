"""A model that is evaluated and never trained: a policy's reference, or the teacher that it imitates."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from etude.batch import Batch, ColumnKind, Pack
from etude.data.pack import pack_prefix_tree
from etude.images.pixel_cache import PixelCache
from etude.models import Model
from etude.models.experts import count_loads
from etude.train.forward import ForwardPass, SharedPacks, run_now
from etude.train.images import compute_hidden
from etude.train.micro_batches import MicroBatch, iterate_micro_batches, iterate_passes

if TYPE_CHECKING:
    from etude.train.fsdp import ShardedModel


class ScoringModel(Protocol):
    """A model that computes log-probs of tokens that other models sampled, or several models that share the work."""

    @property
    def vocab_size(self) -> int:
        """The number of tokens that it knows."""
        ...

    def logp(self, batch: Batch) -> Tensor:
        """[T]: compute the log-prob of each action token; NaN elsewhere."""
        ...

    def top_tokens(self, batch: Batch, count: int, among: int) -> tuple[Tensor, Tensor]:
        """[T, k] of each: return the most likely ids at every action token, and their log-probs; NaN elsewhere.

        Both come from the distribution over the first `among` ids of the vocabulary.
        """
        ...


class FrozenModel(ScoringModel):
    """A model that computes log-probs of tokens that other models sampled. Its weights never change."""

    def __init__(
        self,
        model: Model | ShardedModel,
        max_tokens_per_micro_batch: int,
        *,
        temperature: float = 1.0,
        pack: Callable[[Batch], Pack] = pack_prefix_tree,
        disable_adapters: bool = False,
        compute_device: torch.device | None = None,
        pixels: PixelCache | None = None,
    ) -> None:
        """temperature: the sampler's, which the policy's own log-probs use too. disable_adapters: the model is the
        policy, and computes without its adapters here. compute_device: the device of the passes, if the model is kept
        on another. For each call a copy goes there, or the shards themselves, which are otherwise in CPU memory.
        pixels: of the images of batches, for a model that takes images.
        """
        self._sharded = None if isinstance(model, Model) else model
        self.model = model if isinstance(model, Model) else model.model
        if not disable_adapters:
            for weight in self.model.parameters():
                weight.requires_grad_(False)
        self._max_tokens_per_micro_batch = max_tokens_per_micro_batch
        self._shares_weights = disable_adapters
        self._adapter_context = self.model.without_adapters if disable_adapters else nullcontext
        self._run = run_now if self._sharded is None else self._sharded.run
        if self._sharded is not None and compute_device is not None:
            self._sharded.to("cpu")
        self._pack = pack
        self._temperature = temperature
        self._compute_device = compute_device
        self._pixels = pixels
        self._shared_packs: SharedPacks | None = None if self._sharded is None else self._sharded.split_tokens

    @property
    def vocab_size(self) -> int:
        return self.model.vocab_size

    def logp(self, batch: Batch) -> Tensor:
        logp = torch.full((batch.num_tokens,), torch.nan, dtype=torch.promote_types(self.model.dtype, torch.float32))
        with self._on_compute_device() as forward, closing(self._passes(batch, forward.model)) as passes:
            for micro, at in passes:
                with torch.no_grad(), self._adapter_context():
                    logp[at[ColumnKind.TOKEN]] = forward(micro, frozenset({"logp"})).columns["logp"].to(logp)
        return logp.to(batch.device)

    def top_tokens(self, batch: Batch, count: int, among: int) -> tuple[Tensor, Tensor]:
        ids = torch.zeros((batch.num_tokens, count), dtype=torch.int64)
        logp = torch.full(
            (batch.num_tokens, count), torch.nan, dtype=torch.promote_types(self.model.dtype, torch.float32)
        )
        with self._on_compute_device() as forward, closing(self._passes(batch, forward.model)) as passes:
            for micro, at in passes:
                with torch.no_grad(), self._adapter_context():
                    top_ids, top_logp = forward.top_tokens(micro, count, among)
                ids[at[ColumnKind.TOKEN]], logp[at[ColumnKind.TOKEN]] = top_ids.to(ids), top_logp.to(logp)
        return ids.to(batch.device), logp.to(batch.device)

    def hidden(self, pack: Pack) -> Tensor:
        """[P, H]: compute the hidden states that `logits` takes. Only for a model that is not offloaded."""
        assert self._compute_device is None, (
            "an offloaded model computes log-probs: one copy serves a whole batch, and none is made for each pack"
        )
        with torch.no_grad(), self._adapter_context(), count_loads(None):  # within a pass of the policy
            return self._run(lambda: {"hidden": self._hidden(pack)})["hidden"]

    def _hidden(self, pack: Pack) -> Tensor:
        if self._shared_packs is not None:
            return self._shared_packs.hidden(pack)
        return compute_hidden(self.model, pack, self._pixels)

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, H] → [N, V]: compute the logits."""
        with torch.no_grad():
            return self.model.logits(hidden)

    def run_empty(self) -> None:
        """Take part in the exchanges of a `hidden` that other ranks compute."""
        if self._sharded is not None:
            with torch.no_grad(), self._adapter_context():
                self._sharded.run_empty()

    def release(self) -> None:
        """Release the weights that `hidden` left whole, unless they are the policy's."""
        if self._sharded is not None and not self._shares_weights:
            self._sharded.reset()

    def _passes(self, batch: Batch, model: Model) -> Generator[MicroBatch, None, None]:
        """Yield the micro-batches of this model's passes; see `iterate_passes`."""
        micros = iterate_micro_batches(batch, self._max_tokens_per_micro_batch, "rollout", model.device)
        if self._sharded is None:
            yield from micros
            return
        frame = partial(self._sharded.micro_pass, backward=False)
        yield from iterate_passes(micros, batch.select([]).to(model.device), self._sharded.ranks, frame)

    @contextmanager
    def _on_compute_device(self) -> Iterator[ForwardPass]:
        """Yield passes on the compute device: of a copy, released at the end, or of the shards, which move back."""
        device = self._compute_device
        if device is None:
            yield self._forward(self.model)
        elif self._sharded is None:
            model = self.model.copy(device=device)
            yield ForwardPass(model, self._pack, self._temperature, pixels=self._pixels)
        else:
            self._sharded.to(device)
            try:
                yield self._forward(self.model)
            finally:
                self._sharded.to("cpu")

    def _forward(self, model: Model) -> ForwardPass:
        """Return passes of this model, by the ranks that hold it."""
        return ForwardPass(
            model,
            self._pack,
            self._temperature,
            shared_packs=self._shared_packs,
            run=self._run,
            pixels=self._pixels,
        )
