"""The steps of the embedded engine: its memory, its schedule, and their computation.

A step computes a token of each generating request and a chunk of a prompt for the others. On a GPU, a step in which all
requests draw their next token is a static one, launched before the last one's tokens are read (see `step_pipeline`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from etude.errors import ConfigError
from etude.models import EngineModel, Model
from etude.models.routes import RouteShape
from etude.observe import Last, Metrics, Min
from etude.rollout.batch_invariance import (
    UNPADDED_SHAPES,
    ProductShapes,
    find_batch_invariant_shapes,
    max_context_padding,
)
from etude.rollout.block_pool import BlockPool, KeptStates
from etude.rollout.config import TorchEngineConfig
from etude.rollout.engine_thread import return_unused_memory, to_engine_error
from etude.rollout.features import FeatureCache
from etude.rollout.kv_cache import count_blocks, count_slots
from etude.rollout.prompt_pixels import PromptPixels
from etude.rollout.request import Request
from etude.rollout.sampling import sample_tokens
from etude.rollout.scheduler import Scheduler, SchedulerStats
from etude.rollout.slot_state import SlotState
from etude.rollout.static_step import StaticStep, supports_static
from etude.rollout.step_batch import EngineCaches, StepBatch
from etude.rollout.step_graphs import create_launcher
from etude.rollout.step_kernels import make_kernels
from etude.rollout.step_pipeline import DrawnTokens, StepPipeline
from etude.token_routes import TokenRoutes


class EngineSteps:
    """The steps of one engine. Only its thread uses them."""

    def __init__(
        self,
        model: Model,
        config: TorchEngineConfig,
        *,
        version: int,
        routes: RouteShape | None = None,
        pixels: PromptPixels | None = None,
    ) -> None:
        """routes: the size of the choices of experts to keep; None keeps none. pixels: of the images of prompts, for a
        model that takes some."""
        self._model = model
        self._routes = routes
        self._pixels = pixels
        self.features = FeatureCache(pixels)
        self._config = config
        self._num_blocks = count_blocks(model, config)
        self._has_static = has_static_steps(model, config)
        self.cache: EngineCaches | None = self._allocate()
        """None while the engine sleeps."""
        self.scheduler = self._new_scheduler(version)
        self._shapes: ProductShapes | None = None
        self._pipeline: StepPipeline | None = None
        self._peak_cache_usage = 0.0

    @property
    def cache_tokens(self) -> int:
        """The number of tokens that the cache holds."""
        return self._num_blocks * self._config.block_size

    @property
    def exact(self) -> bool:
        """True if a request gets the same bits in every batch; known after the first step."""
        return self._shapes is not None and self._shapes.batch_invariant

    @property
    def has_work(self) -> bool:
        """True if there is something to compute, or to read."""
        return self.scheduler.has_work or self.has_unread

    @property
    def has_unread(self) -> bool:
        """True if a step was launched whose tokens are not read."""
        return self._pipeline is not None and self._pipeline.is_under_way

    def read_ahead(self) -> Sequence[tuple[Request, BaseException]]:
        """Have the images of the next requests read. Return those that cannot be computed, each with the error."""
        if self._pixels is None:
            return []
        return self._pixels.read_ahead(self.scheduler.running, self.scheduler.waiting, self._config.max_num_seqs)

    def run(self, resident: EngineModel) -> Iterator[DrawnTokens]:
        """Compute a step. Yield drawn tokens, each to be appended before the next are taken.

        resident: the weights to compute with.
        """
        assert self.cache is not None, "an engine that sleeps has no work"
        shapes = self._shapes = self._shapes or self._find_shapes(resident.model)
        if self._has_static and not shapes.batch_invariant:
            self._pipeline = self._pipeline or self._new_pipeline(resident.model, self.cache)
            start = time.perf_counter()
            if self._pipeline.launch():
                yield from self._pipeline.read(leave=1)
                self.scheduler.stats.host_seconds += time.perf_counter() - start
                self._note_cache_usage()
                return
        yield from self.read_launched()
        if self.scheduler.has_work:
            yield from self._run_mixed(resident.model, self.cache, shapes)
            self._note_cache_usage()

    def read_launched(self) -> Iterator[DrawnTokens]:
        """Wait for the steps that were launched, and yield their tokens."""
        if self._pipeline is not None:
            yield from self._pipeline.read()

    def _run_mixed(self, model: Model, cache: EngineCaches, shapes: ProductShapes) -> Iterator[DrawnTokens]:
        """Compute one token for each generating request, and a chunk of the prompt for the others."""
        scheduler = self.scheduler
        works = scheduler.schedule(shapes.rows.max_tokens)
        images = self.features.for_pass(works, model)
        batch = StepBatch(cache, works, scheduler.table, shapes, images=images)
        hidden = batch.compute_hidden(model)
        scheduler.advance(works)
        requests = [work.request for work in batch.sampled]
        rows = shapes.rows.logit_rows(self._model.vocab_size)
        for start in range(0, len(requests), rows):
            part = requests[start : start + rows]
            logits = self._model.logits(hidden[batch.last_rows[start : start + rows]])
            sampled = sample_tokens(
                logits[: len(part)],
                [request.sampling_state for request in part],
                [request.generated for request in part],
                [request.length for request in part],
            )
            yield DrawnTokens(part, sampled)

    def read_routes(self, request: Request) -> TokenRoutes | None:
        """Return the experts of a running request's tokens, from where it asks for them; None if it does not."""
        start = request.sampling.routes_start
        if start is None or self._routes is None or self.cache is None or self.cache.routes is None:
            return None
        if not request.generated:
            return None
        shape = self._routes
        last = request.length - 1  # the newest token is not computed
        positions = np.arange(min(start, last), min(request.computed, last))
        size = self._config.block_size
        places = np.array(request.blocks, np.int64)[positions // size] * size + positions % size
        routes = shape.blank(last - min(start, last))
        kept = self.cache.routes.index_select(0, torch.from_numpy(places).to(self.cache.routes.device))
        routes[: len(places)] = kept.cpu()
        return TokenRoutes(routes.view(-1, shape.mixtures, shape.per_token).numpy(), min(start, last))

    # -- its memory ---------------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Free the memory of the cache, until `restart`."""
        self.cache = None
        self._pipeline = None
        self.features.clear()
        return_unused_memory(self._model.device)

    def restart(self) -> None:
        """Allocate the memory again, and begin without requests."""
        return_unused_memory(self._model.device)  # many small blocks of an update leave no room for a large one
        self.cache = self._allocate()
        self._pipeline = None
        self.scheduler = self._new_scheduler(self.scheduler.version, self.scheduler.stats)

    def recover(self) -> None:
        """Allocate the cache again after a failed step.

        Values that are not finite must not stay behind the end of later keys.
        """
        self._pipeline = None
        self.features.clear()
        self.cache = self._allocate()

    def renew(self, resident: EngineModel, *, is_tower_new: bool = False) -> None:
        """Adapt to new weights, with which no step is under way. is_tower_new: those of the tower are among them."""
        if is_tower_new:
            self.features.clear()
        if self._shapes is not None and not self._shapes.tested:
            self._shapes = None
        if self._pipeline is None:
            return
        if self._pipeline.model is resident.model:
            self._pipeline.launcher.check_addresses()
        else:
            self._pipeline = None

    def pop_metrics(self) -> Metrics:
        """Return the metrics since the last call, and the current load."""
        scheduler = self.scheduler
        metrics = scheduler.stats.metrics()
        metrics.add("engine/running", Last.of(len(scheduler.running)))
        metrics.add("engine/waiting", Last.of(len(scheduler.waiting)))
        metrics.add("engine/cache_used", Last.of(self._peak_cache_usage))
        if self._pipeline is not None:
            metrics.add("engine/graphs", Last.of(self._pipeline.launcher.graphs))
        if self._shapes is not None:
            metrics.add("engine/exact", Min.of(int(self.exact)))
        scheduler.stats = SchedulerStats()
        self._peak_cache_usage = 0.0
        return metrics

    def _find_shapes(self, model: Model) -> ProductShapes:
        """Return the shapes of the products. Called before the first step, as divided weights may be absent earlier."""
        needed = self._config.deterministic and model.dtype == torch.float32 and self.scheduler.keeps_to_chunks
        return find_batch_invariant_shapes(model) if needed else UNPADDED_SHAPES

    def _note_cache_usage(self) -> None:
        blocks = self.scheduler.blocks
        self._peak_cache_usage = max(self._peak_cache_usage, blocks.in_use / blocks.count)

    def _allocate(self) -> EngineCaches:
        try:
            return EngineCaches(
                self._model,
                blocks=self._num_blocks + self._has_static,  # one for rows without a request
                size=self._config.block_size,
                max_num_seqs=self._config.max_num_seqs,
                routes=self._routes,
            )
        except RuntimeError as error:
            raise to_engine_error(error, self._config) from error

    def _new_scheduler(self, version: int, stats: SchedulerStats | None = None) -> Scheduler:
        max_num_seqs = self._config.max_num_seqs
        kept = KeptStates(range(max_num_seqs, count_slots(max_num_seqs)))
        scheduler = Scheduler(
            BlockPool(self._num_blocks, self._config.block_size, kept),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=self._config.max_num_batched_tokens,
            max_total_tokens=min(self._model.context_length, self.cache_tokens)
            + max_context_padding(self._config.block_size),
            has_states=self._model.state_bytes > 0,
            replays=self._config.deterministic,
            is_ready=None if self._pixels is None else self._pixels.is_ready,
        )
        scheduler.version = version
        scheduler.stats = stats or scheduler.stats
        return scheduler

    def _new_pipeline(self, model: Model, cache: EngineCaches) -> StepPipeline:
        state = SlotState(
            model,
            slots=self._config.max_num_seqs,
            max_blocks=-(-min(model.context_length, self.cache_tokens) // self._config.block_size),
            scratch_block=self._num_blocks,
        )
        step = StaticStep(model, cache.kv[0], state, make_kernels(model, cache.kv[0], state))
        return StepPipeline(self.scheduler, step, create_launcher(step))


def has_static_steps(model: Model, config: TorchEngineConfig) -> bool:
    """Return True if an engine has static steps; refuse them where they are asked for and cannot be."""
    reason = supports_static(model)
    if config.static_steps is None:
        return model.device.type == "cuda" and reason is None
    if not config.static_steps:
        return False
    if reason is not None:
        raise ConfigError(
            f"`rollout.static_steps=true` has our own layers draw tokens, and {reason}. Leave `rollout.static_steps` "
            "out."
        )
    if config.deterministic and model.dtype == torch.float32:
        raise ConfigError(
            "`rollout.static_steps=true` computes a drawn token otherwise than a prompt, so a request in float32 would "
            "not have the same bits in every batch, which `rollout.deterministic=true` promises. Set "
            "`rollout.deterministic=false`, or leave `rollout.static_steps` out."
        )
    return True
