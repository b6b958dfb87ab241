"""The learner: owner of a model's weights, their optimizer and their version.

    update batch ──► micro-batches ──► forward ──► objective ──► backward ──┐   until all are through
                                                                            ▼
                                     weights ◄── AdamW ◄── clip ◄── one gradient

An update is one optimizer step. The split of its batch into micro-batches, packs and ranks changes only time and
memory. The reason: the objective divides by counts of the whole update batch, and gradients add up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from etude.algorithms import Denominators, LossValue, Outputs, View
from etude.algorithms.view import Ranks
from etude.batch import COLUMNS as KINDS
from etude.batch import Batch, ColumnKind, Pack
from etude.checkpoint import Checkpoint, CheckpointManager, TensorTree, flat
from etude.data.pack import pack_prefix_tree
from etude.errors import ConfigError, TrainingError
from etude.images.pixel_cache import PixelCache
from etude.models import Model
from etude.observe import Last, Max, Mean, Metrics, Sum
from etude.protocols import Gather, Split, dispatch_mode
from etude.train.backend import Backend, HeldModel, model_of
from etude.train.balance_loss import BalanceLoss
from etude.train.config import TrainConfig
from etude.train.expert_loads import ExpertLoads
from etude.train.flops import ModelFlops
from etude.train.forward import LISTED_BY, ROUTES, ReferenceModel
from etude.train.fsdp import FsdpBackend
from etude.train.local import LocalBackend
from etude.train.memory import OffloadedTensors, peak_memory, total_memory
from etude.train.micro_batches import MicroBatch, iterate_frames, iterate_micro_batches, iterate_passes, split_update
from etude.train.optim import GradientWatcher, compute_learning_rate, local_part
from etude.train.ranks import sum_denominators
from etude.train.router_replay import RouterReplay

LM_HEAD_COLUMNS = {
    "old_logp": "logp",
    "entropy": "entropy",
    "sum_pi_squared": "sum_pi_squared",
    "old_alternative_logp": "alternative_logp",
}
SCORE_HEAD_COLUMNS = {"value": "value", "final_value": "score"}
"""The batch columns that a model with either head computes, and the forward outputs that they come from.

`final_value`, the value of the state after a rollout's last token, is read where a score is."""


class Objective(Protocol):
    """The function to minimize. It may change between updates: the learner does not store it."""

    @property
    def split_unit(self) -> Literal["rollout", "group"]:
        """The unit that must stay within one micro-batch."""
        ...

    def required_columns(self) -> frozenset[str]:
        """Return the batch columns that `loss` reads."""
        ...

    def forward_outputs(self) -> frozenset[str]:
        """Return the outputs that the forward pass must compute: names of fields of `Outputs`."""
        ...

    def loss(self, batch: Batch, outputs: Outputs, whole: Denominators) -> LossValue:
        """Return a micro-batch's share of the loss. whole: the counts of the update batch."""
        ...


class Learner:
    """Trainer of one model: it computes outputs, losses and gradients of batches, and steps the weights.

    A `Backend` holds the weights: whole on this device, or in shards over all ranks. A model
    that was loaded with `keep_float32` gives up its float32 weights to its first learner.
    """

    def __init__(
        self,
        model: HeldModel,
        config: TrainConfig,
        *,
        temperature: float = 1.0,
        steps: int | None = None,
        peak: float | None = None,
        pack: Callable[[Batch], Pack] = pack_prefix_tree,
        reference: ReferenceModel | None = None,
        option: str = "train",
        pixels: PixelCache | None = None,
    ) -> None:
        """temperature: the sampler's. steps: the number of updates in the learning-rate schedule; None for a learner
        that only annotates. peak: the device's operations per second, for the metric `mfu`. reference: the model whose
        distributions an objective compares with. option: the configuration section that errors name. pixels: of the
        images of batches, for a model that takes images."""
        self.model = model_of(model)
        _check_learner(self.model, config, temperature, steps, option)
        self.replay = RouterReplay(self.model, config, option)
        options: Any = {
            "temperature": temperature,
            "pack": pack,
            "reference": reference,
            "option": option,
            "routes": self.replay.shape,
            "pixels": pixels,
        }
        self._backend: Backend = (
            LocalBackend(model, config, **options)
            if isinstance(model, Model)
            else FsdpBackend(model, config, **options)
        )
        self._config = config
        self._option = option
        self._steps = steps
        self._peak = peak
        self._columns = dict(SCORE_HEAD_COLUMNS if self.model.has_score_head else LM_HEAD_COLUMNS)
        self._columns |= {} if self.replay.shape is None else {ROUTES: ROUTES}
        self._outputs = {"value", "score"} if self.model.has_score_head else {"logp", "entropy", *LISTED_BY}
        self._outputs |= set() if reference is None else {"full_kl"}
        self.ranks = self._backend.ranks
        """The ranks that hold the rest of a batch."""
        self._version = torch.tensor(0)
        self._loads = ExpertLoads(self.model)
        self._cost = ModelFlops.from_model(self.model)
        self._on_gpu = self.model.device.type == "cuda"
        self._offloaded = (
            OffloadedTensors(self._backend.optimizer.offloadable_tensors(), self.model.device, torch.device("cpu"))
            if config.offload
            else None
        )

    @property
    def columns(self) -> frozenset[str]:
        """The batch columns that this learner's model computes."""
        return frozenset(self._columns)

    @property
    def version(self) -> int:
        """The policy version of the weights: the number of updates so far."""
        return int(self._version)

    @dispatch_mode(Split.ROLLOUTS, Gather.CONCAT)
    def annotate(self, batch: Batch, columns: frozenset[str]) -> Batch:
        """Return the batch with these columns, computed with the current weights; NaN at other tokens than actions.

        The column `routes` records the experts of every token. Later passes over the batch replay them.
        """
        self.replay.check(batch)
        unknown = sorted(columns - self._columns.keys())
        if unknown:
            raise ConfigError(
                f"This model cannot compute the column `{unknown[0]}`. It computes {', '.join(self._columns)}. Choose "
                f"an algorithm that does not need it."
            )
        dtype = torch.promote_types(self._backend.dtype, torch.float32)
        results = {name: _nan_column(name, batch, dtype) for name in sorted(columns - {ROUTES})}
        results |= {name: self.replay.blank_column(batch) for name in columns & {ROUTES}}
        wanted = frozenset(self._columns[name] for name in columns)
        with closing(self._passes(batch, "rollout", wanted)) as passes:
            for micro, at in passes:
                with torch.no_grad(), self._name_memory_options(micro):
                    result = self._backend.forward(micro, wanted)
                for name, column in results.items():
                    column[at[_level(name)]] = result.columns[self._columns[name]].to(column)
        return batch.replace(**{name: column.to(batch.device) for name, column in results.items()})

    def watch_gradient(self, watcher: GradientWatcher) -> None:
        """Call this in each update, with the gradient before it is clipped."""
        self._backend.optimizer.watch = watcher

    def working(self) -> AbstractContextManager[None]:
        """Keep the tensors that updates need on the device within this context; several updates then move them once."""
        return nullcontext() if self._offloaded is None else self._offloaded.loaded()

    @dispatch_mode(Split.GROUPS, Gather.METRICS)
    def update(self, batch: Batch, objective: Objective, *, step_scale: float = 1.0) -> Metrics:
        """Make one optimizer step over an update batch, or over this rank's share of it, and return its metrics.

        step_scale: a factor of the learning rate. If the step fails, the weights and the version are unchanged.
        """
        self.replay.check(batch)
        with self.working():
            start = self._start_update()
            own_counts = Denominators.from_view(View(batch))
            metrics = Metrics()
            flops = 0.0
            whole = sum_denominators(own_counts, self.ranks)
            loss = torch.zeros((), dtype=torch.float64, device=self.model.device)
            self._check_outputs(objective)
            scale = float(self._backend.optimizer.scale)
            balance = self.replay.balance(batch, self.ranks, scale)
            tokens = self._config.max_tokens_per_micro_batch
            micros = split_update(batch, tokens, objective.split_unit, self.model)
            for micro, shows_images in iterate_frames(micros, self.ranks, compares_images=self.model.trains_tower):
                with self._backend.micro_pass(objective.forward_outputs(), shows_images, backward=True):
                    if micro is not None:
                        with self._name_memory_options(micro):
                            value, cost = self._run_micro_batch(micro, objective, whole, balance, backward=True)
                        metrics.merge(value.metrics)
                        loss = loss + value.loss.detach()
                        flops += cost
            learning_rate = step_scale * compute_learning_rate(self._config, self.version, self._steps)
            result = self._backend.optimizer.step(learning_rate)
            self._version += 1
            metrics.add("loss", Mean.of(self.ranks.all_reduce(loss)))
            if balance is not None:
                metrics.add("moe/balance_loss", Mean.of(balance.total(self._backend.all_ranks)))
            metrics.add("learning_rate", Last.of(learning_rate))
            metrics.add("micro_batches", Sum.of(len(micros)))
            if self._config.precision == "fp16":
                metrics.merge(
                    {"loss_scale": Last.of(scale), "skipped_updates": Sum.of(result.skipped / self.ranks.count)}
                )
            if not result.skipped:
                metrics.add("grad_norm", Mean.of(result.norm))
            metrics.merge(self._update_metrics(batch, own_counts, flops, start))
            return metrics

    @dispatch_mode(Split.GROUPS, Gather.METRICS)
    def measure(
        self, batch: Batch, objective: Objective, annotated: Callable[[Batch], Batch] = lambda micro: micro
    ) -> Metrics:
        """Return the metrics of an objective over a batch, without learning from it.

        annotated: a function that adds, to a micro-batch, columns that the objective reads and the batch lacks. They
        are then never held for the whole batch.
        """
        self._check_outputs(objective)
        self.replay.check(batch)
        whole, metrics = sum_denominators(Denominators.from_view(View(batch)), self.ranks), Metrics()
        loss = torch.zeros((), dtype=torch.float64, device=self.model.device)
        with closing(self._passes(batch, objective.split_unit, objective.forward_outputs())) as passes:
            for micro, _ in passes:
                with torch.no_grad(), self._name_memory_options(micro):
                    annotated_micro = annotated(micro)  # on every rank: the model that computes columns may be sharded
                    if not micro.num_rollouts:
                        continue
                    value, _cost = self._run_micro_batch(annotated_micro, objective, whole, None, backward=False)
                metrics.merge(value.metrics)
                loss = loss + value.loss
        metrics.add("loss", Mean.of(self.ranks.all_reduce(loss)))
        return metrics

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights by their published names, in the dtype of forward passes.

        They are the tensors themselves, or copies of sharded weights, which all ranks consume together."""
        return self._backend.weights()

    def merged_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights of the equal model without adapters, for `PublishedNames.publish`; see `Backend`."""
        return self._backend.merged_weights()

    def base_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the base model's weights, without the adapters', as `weights` does."""
        return ((name, weight) for name, weight in self.weights() if ".lora_" not in name)

    def adapter_weights(self) -> dict[str, Tensor]:
        """Return the adapters' weights, by peft's names without its prefix. All ranks call it together."""
        return self._backend.adapter_weights()

    @property
    def is_sharded(self) -> bool:
        """True if each rank holds shards of the weights, so that ranks gather whole weights together."""
        return self._backend.is_sharded

    def state(self) -> TensorTree:
        """Return everything that the next update depends on, as the tensors themselves and not as copies."""
        return {**self._backend.optimizer.state(), "learner": {"version": self._version}}

    def restore(self, state: TensorTree) -> None:
        """Continue from a state: another learner's, or this learner's own after a checkpoint was read into it."""
        # the state is read inside `working`: read before, its tensors would share the offloaded storage
        with torch.no_grad(), self.working():
            own_state, new_state = flat(self.state()), flat(state)
            mismatched = sorted(own_state.keys() ^ new_state.keys())
            if mismatched:
                raise ConfigError(
                    f"This state is of another model or precision: only one of them has `{mismatched[0]}`. Restore it "
                    f"with the model and precision that it was saved with."
                )
            for name, tensor in own_state.items():
                local_part(tensor).copy_(local_part(new_state[name]))  # the source may be on another device
            self._backend.optimizer.refresh_copy()

    # -- inside an update -----------------------------------------------------------------------------------------

    def _check_outputs(self, objective: Objective) -> None:
        unavailable = sorted(objective.forward_outputs() - self._outputs)
        if unavailable:
            raise ConfigError(
                f"The objective needs the model's `{unavailable[0]}`, for which this learner has no second model or "
                f"head. It computes {', '.join(sorted(self._outputs))}. Choose another loss or another KL."
            )

    def _run_micro_batch(
        self, micro: Batch, objective: Objective, whole: Denominators, balance: BalanceLoss | None, *, backward: bool
    ) -> tuple[LossValue, float]:
        """Run the forward and backward pass of one micro-batch, and return its loss and its FLOPs."""
        observations = "observation" in objective.required_columns()
        with self._loads.counting():
            result = self._backend.forward(
                micro, objective.forward_outputs(), observations=observations, balance=balance
            )
        value = objective.loss(micro, Outputs(**result.columns), whole)
        if backward:
            self._backend.backward(value.loss)
        return value, self._cost.update(result.pack, result.predicted) if result.predicted else 0.0

    def _passes(
        self, batch: Batch, by: Literal["rollout", "group"], wanted: frozenset[str]
    ) -> Generator[MicroBatch, None, None]:
        """Yield the micro-batches, each within the backend's `micro_pass`; see `iterate_passes`."""
        micros = iterate_micro_batches(batch, self._config.max_tokens_per_micro_batch, by, self.model.device)
        frame = partial(self._backend.micro_pass, wanted, backward=False)
        yield from iterate_passes(micros, batch.select([]).to(self.model.device), self.ranks, frame)

    @contextmanager
    def _name_memory_options(self, micro: Batch) -> Iterator[None]:
        """Turn an out-of-memory error into one that names the options to change."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            ran_out = isinstance(error, torch.OutOfMemoryError | MemoryError)
            if not ran_out and "can't allocate memory" not in str(error):
                raise
            self._backend.optimizer.zero_grad()
            cause = (str(error) or type(error).__name__).splitlines()[0]
            kind = self._config.activation_checkpointing
            smaller = "full" if kind in ("none", "selective") else "offload" if kind == "full" and self._on_gpu else ""
            also = f", or set `{self._option}.activation_checkpointing={smaller}`" if smaller else ""
            raise TrainingError(
                f"Memory ran out on {self.model.device} in a micro-batch of {micro.num_rollouts} rollouts and "
                f"{micro.num_tokens} tokens. The weights are unchanged. Lower "
                f"`{self._option}.max_tokens_per_micro_batch`, now {self._config.max_tokens_per_micro_batch}{also}. "
                f"({cause})"
            ) from error

    # -- measuring ------------------------------------------------------------------------------------------------

    def _start_update(self) -> float:
        """Drop the last gradient, reset the peak of GPU memory, and return the time."""
        self._backend.optimizer.zero_grad()
        self._loads.reset()
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats(self.model.device)
        return self._now()

    def _now(self) -> float:
        if self._on_gpu:
            torch.cuda.synchronize(self.model.device)
        return time.perf_counter()

    def _update_metrics(self, batch: Batch, own_counts: Denominators, flops: float, start: float) -> Metrics:
        """Return this rank's metrics of an update.

        Tokens add up over ranks. Seconds are divided by the number of ranks, because they pass on all of them at once.
        """
        seconds = self._now() - start
        peak = peak_memory(self.model.device)
        metrics = Metrics(
            {
                "trained_tokens": Sum.of(batch.num_tokens),
                "action_tokens": Sum.of(own_counts.tokens),
                "update_seconds": Sum.of(seconds / self.ranks.count),
                "trained_tokens_per_second": Mean.over(batch.num_tokens, seconds / self.ranks.count),
                "peak_memory_gb": Max.of(peak / 1e9),
                "memory_share": Max.of(peak / total_memory(self.model.device)),
            }
        )
        if self.ranks.count > 1:
            metrics.add("imbalance", Mean.of(_imbalance(flops, self.ranks)))
        if (load := self._loads.sum_over(self._backend.all_ranks)) is not None:
            metrics.merge(load.metrics())
        if self._config.compile is True and self._backend.is_sharded:
            metrics.add("compiled_graphs", Max.of(self.model.compiled_graphs))
        if self._peak is not None:
            metrics.add("mfu", Mean.over(flops / self._backend.ranks_per_rollout / self._peak, seconds))
        return metrics


def _imbalance(work: float, ranks: Ranks) -> float:
    """Return the excess of the busiest rank's work over the mean, relative to the mean: 0 if all are equal."""
    all_work = ranks.all_gather(torch.tensor([work], dtype=torch.float64))
    return float(all_work.max() / all_work.mean()) - 1 if float(all_work.max()) else 0.0


def _level(name: str) -> ColumnKind:
    """Return the level that a column has its entries for: tokens, or rollouts."""
    return ColumnKind.UNIT if KINDS[name] is ColumnKind.UNIT else ColumnKind.TOKEN


def _nan_column(name: str, batch: Batch, dtype: torch.dtype) -> Tensor:
    """Return a column of the batch with NaN everywhere."""
    shape: tuple[int, ...] = (batch.num_rollouts if KINDS[name] is ColumnKind.UNIT else batch.num_tokens,)
    if KINDS[name] is ColumnKind.TOKEN_K:
        shape = (*shape, batch.require("alternative_ids", needed_by=f"The column `{name}`").shape[1] + 1)
    return torch.full(shape, torch.nan, dtype=dtype)


def load_weights(model: Model, checkpoints: CheckpointManager, checkpoint: Checkpoint) -> None:
    """Load the weights of a learner's checkpoint into a model without an optimizer, to sample from it or export it.

    A checkpoint holds the trained weights. The model must have been loaded as for training: with the same weights
    frozen, and with adapters if it had any.
    """
    weights = read_weights(model, checkpoints, checkpoint)
    with torch.no_grad():
        for name, weight in model.trained_weights():
            weight.copy_(weights[name])


def read_weights(model: Model, checkpoints: CheckpointManager, checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Return the trained weights of a learner's checkpoint, by their published names, in float32 or wider."""
    weights = {
        name: torch.empty_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32), requires_grad=False)
        for name, weight in model.trained_weights()
    }
    checkpoints.load(checkpoint, {"weights": weights})
    return weights


def _check_learner(model: Model, config: TrainConfig, temperature: float, steps: int | None, option: str) -> None:
    """Refuse options that contradict each other or the model."""
    if config.lr_scheduler != "constant" and steps is not None and config.warmup_steps >= steps:
        raise ConfigError(
            f"`{option}.warmup_steps={config.warmup_steps}` leaves nothing of the {steps} updates for "
            f"`{option}.lr_scheduler={config.lr_scheduler}`. Shorten the warm-up, or choose "
            f"`{option}.lr_scheduler=constant`."
        )
    if temperature <= 0:
        raise ConfigError(
            f"The temperature is {temperature:g}: greedy answers have no log-prob to train on. Set it above 0."
        )
    if config.offload and model.device.type == "cpu":
        raise ConfigError(
            f"`{option}.offload` keeps the optimizer in CPU memory while a GPU samples, and this run computes on the "
            "CPU, where the optimizer already is. Leave the option out."
        )
    if config.activation_checkpointing == "offload" and model.device.type == "cpu":
        raise ConfigError(
            f"`{option}.activation_checkpointing=offload` keeps the inputs of layers in CPU memory while a GPU trains, "
            "and this run computes on the CPU, where they already are. Choose `full`, which needs as little memory "
            "here."
        )
