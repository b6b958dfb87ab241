"""Refusals of runs whose rollouts are too stale for what learns from them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from etude.algorithms import AlgorithmConfig
from etude.config.together import problems_of, told_together
from etude.errors import ConfigError
from etude.recipes.collect.config import CollectionConfig
from etude.rollout import RolloutConfig, ServerConfig, TorchEngineConfig

if TYPE_CHECKING:
    from etude.recipes.run.config import Run


def check_stale_ratios(algorithm: AlgorithmConfig, max_staleness: int, *, allow_unbounded: bool) -> None:
    """Refuse stale rollouts if nothing bounds the ratio to the policy that sampled them.

    allow_unbounded: the option `allow_unbounded_ratios`. It is refused where it allows nothing.
    """
    unbounded = max_staleness > 0 and not algorithm.bounds_sampler_ratio()
    if unbounded and not allow_unbounded:
        raise ConfigError(
            f"`max_staleness={max_staleness}` trains on rollouts of older policies, and nothing here bounds the ratio "
            "to the policy that sampled them: such runs are known to collapse. Set `correction.weight=truncate`, or "
            "choose a loss that compares with the sampler, such as `loss=decoupled_ppo` or `loss=ipo`, or have "
            "`correction.policies=two` put the sampler in the place of π_old. `allow_unbounded_ratios=true` trains "
            "without a bound."
        )
    if allow_unbounded and not unbounded:
        why = "the ratio to the sampler is bounded" if max_staleness else "`max_staleness=0` has no stale rollouts"
        raise ConfigError(f"`allow_unbounded_ratios=true` changes nothing here: {why}. Leave it out.")


def check_window(collect: CollectionConfig, max_staleness: int) -> None:
    """Refuse `collect.order=windowed` if the staleness bound lets no group be left behind."""
    window, tasks = collect.candidates, collect.tasks
    if window is None or window <= max_staleness * tasks:
        return
    least = -(-window // tasks)
    raise ConfigError(
        f"`collect.order=windowed` has {window} groups wait for steps of {tasks}, and with `max_staleness="
        f"{max_staleness}` none of them may wait longer than in the order of tasks. Set `max_staleness` to {least} "
        "or more, or leave `collect.order` out."
    )


@told_together
def check_staleness(run: Run) -> Iterator[ConfigError]:
    """Refuse rollouts during training where an engine cannot sample then."""
    yield from problems_of(check_window, run.collect, run.max_staleness)
    if run.max_staleness == 0:
        yield from problems_of(_check_publishing_between_steps, run.rollout)
        return
    makes = f"`max_staleness={run.max_staleness}` makes rollouts while the policy trains"
    if run.train.offload:
        sleepers = "servers" if isinstance(run.rollout, ServerConfig) else "the engine"
        yield ConfigError(
            f"{makes}, and `train.offload` has {sleepers} sleep then. Leave `train.offload` out, or set "
            "`max_staleness=0`."
        )
    if isinstance(run.rollout, ServerConfig):
        return
    if run.placement.layout == "colocated" and run.train.choose_engine(run.ranks) == "local":
        yield ConfigError(
            f"{makes}, and with `placement.layout=colocated` the engine samples from the very weights that change. "
            "Set `placement.layout=split`, which gives the engine separate weights, or `max_staleness=0`."
        )


def _check_publishing_between_steps(engine: RolloutConfig) -> None:
    """Refuse options of publishing in flight where no request of the embedded engine runs during a publish."""
    if not isinstance(engine, TorchEngineConfig):
        return
    for name in ("running", "kv"):
        if getattr(engine, name) != type(engine).model_fields[name].default:
            raise ConfigError(
                f"`rollout.{name}={getattr(engine, name)}` is for answers under way when weights arrive, and with "
                "`max_staleness=0` there are none. Leave it out, or set `max_staleness`."
            )
