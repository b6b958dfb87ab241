"""Refuses runs that are known to fail, before anything is loaded, and says what to change."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial

from etude.algorithms import AlgorithmConfig
from etude.config.only_with import idle_options
from etude.config.together import problems_of, told_together
from etude.dispatch import CrewConfig
from etude.errors import ConfigError
from etude.observe import MlflowConfig, ObserveConfig, WandbConfig, get_logger
from etude.recipes.collect.environment import EnvConfig
from etude.recipes.collect.sampling import SamplingConfig
from etude.recipes.evaluate import EvaluationConfig
from etude.recipes.recipe import Recipe
from etude.recipes.run.config import CriticConfig, Run
from etude.recipes.run.machine.placement import ROLES, PlacementConfig
from etude.recipes.run.roles import ENVIRONMENT_COLUMNS
from etude.recipes.run.rules.batch_columns import check_batch_columns, check_columns_provided
from etude.recipes.run.rules.group_size import TRIAL_REWARDS, trial_advantages
from etude.recipes.run.rules.placement import check_placement
from etude.recipes.run.rules.programs import check_programs
from etude.recipes.run.rules.required import find_missing_options
from etude.recipes.run.rules.router_replay import check_router_replay
from etude.recipes.run.rules.stale_data import check_stale_ratios, check_staleness
from etude.recipes.run.rules.token_sets import check_token_sets
from etude.recipes.run.rules.turns import check_turns
from etude.recipes.run.rules.vision import check_vision
from etude.rewards import BySourceReward, CombinedReward, NoReward, RewardFunction
from etude.rollout import ServerConfig, TorchEngineConfig

MAX_RANKS_PER_CORE = 8
"""Most ranks per processor; a run with more is refused."""


def check_run(run: Run) -> None:
    """Refuse a run that cannot work, and log warnings of unlikely settings and of options that do nothing."""
    for warning in find_warnings(run):
        get_logger("recipes").warning("%s", warning)


def find_warnings(run: Run) -> list[str]:
    """Refuse a run that cannot work, and return warnings of unlikely settings and of options that do nothing."""
    _check_options(run)
    warnings = algorithm_warnings(run, run.env, run.sampling, run.collect.group_size)
    warnings += check_ranks(run, run.collect.tasks, "collect.tasks") + idle_tracker_warnings(run.observe)
    if run.evaluate != EvaluationConfig() and not run.data.val:
        warnings.append(
            "`evaluate` says how to score on held-out tasks, and there are none, so nothing is scored. Give them with "
            "`data.val=[held_out.parquet]`."
        )
    return warnings


@told_together
def _check_options(run: Run) -> Iterator[ConfigError]:
    """Refuse options that do not fit together, or that lack something."""
    yield from find_missing_options(run)
    if isinstance(run.reward, NoReward) and "reward" in run.required_columns():
        yield ConfigError(
            "`reward=nothing` gives every answer 0, and this advantage reads the reward: nothing would be learned. "
            "Choose a reward, or `advantage=distillation`."
        )
    yield from idle_options(run)
    elsewhere = run.env.has_environment or run.has_agents
    yield from problems_of(_check_metric, run.collect.metric, run.reward, rewards_elsewhere=elsewhere)
    if not run.has_agents:
        yield from problems_of(check_turns, run, run.env)
    yield from problems_of(check_batch_columns, run.data.batch_columns, run.required_columns())
    for check in (
        check_agents,
        check_servers,
        check_token_sets,
        _check_environment,
        check_staleness,
        _check_algorithm_options,
        check_placement,
        check_vision,
    ):
        yield from problems_of(check, run)
    yield from problems_of(check_engine, run.train.choose_engine(run.ranks), run.critic, run.placement)


def check_algorithm(run: Run) -> None:
    """Refuse an algorithm that cannot run as configured, and log warnings of unlikely settings."""
    _check_algorithm_and_models(run)
    for warning in algorithm_warnings(run, run.env, run.sampling, run.collect.group_size):
        get_logger("recipes").warning("%s", warning)


@told_together
def _check_algorithm_and_models(run: Run) -> Iterator[ConfigError]:
    """Refuse an algorithm that cannot run as configured, and auxiliary models that it does not use."""
    yield from problems_of(_check_algorithm_options, run)
    yield from idle_options(run, ("reference", "teacher", "critic"))


@told_together
def _check_algorithm_options(run: Run) -> Iterator[ConfigError]:
    """Refuse an algorithm that cannot run as configured."""
    yield from problems_of(check_columns_provided, run.required_columns(), run.data.batch_columns)
    yield from problems_of(check_router_replay, run)
    unbounded = run.allow_unbounded_ratios
    yield from problems_of(check_stale_ratios, run, run.max_staleness, allow_unbounded=unbounded)
    if run.uses_teacher and not run.teacher.is_given:
        yield ConfigError(
            "This advantage needs a teacher, and none is named: give a model directory with `teacher.path=…`, or one "
            "for each data source with `teacher.paths={…}`."
        )
    alone = trial_advantages(run.advantage) if run.collect.group_size == 1 else None
    if alone is not None and not any(alone):
        yield ConfigError(
            "`collect.group_size=1` leaves this advantage nothing to compare a rollout with, so that nothing "
            "would be learned. Raise `collect.group_size` (8 is usual), or choose `advantage=reinforce++`."
        )


def algorithm_warnings(
    algorithm: AlgorithmConfig, env: EnvConfig, sampling: SamplingConfig, group_size: int
) -> list[str]:
    """Return warnings of unlikely settings of the algorithm, for these rollouts."""
    warnings = algorithm.warnings()
    overlong = algorithm.overlong
    if env.max_played_turns > 1 and overlong and overlong.max_length <= sampling.max_tokens:
        warnings.append(
            f"`overlong.max_length={overlong.max_length}` counts the tokens of all turns of a rollout, and one turn "
            f"alone may have {sampling.max_tokens}. Raise it to what a whole rollout may have."
        )
    if group_size == 1 and trial_advantages(algorithm.advantage) == TRIAL_REWARDS:
        warnings.append(
            "`collect.group_size=1` leaves this advantage nothing to compare a rollout with: its bare reward is "
            "its advantage. Raise `collect.group_size` (8 is usual), or choose `advantage=reinforce++`."
        )
    return warnings


def idle_tracker_warnings(observe: ObserveConfig) -> list[str]:
    """Return warnings about trackers that have options but are off."""
    warnings = []
    if observe.wandb.mode == "disabled" and observe.wandb != WandbConfig():
        warnings.append("`observe.wandb.mode` is disabled, so nothing is sent: `online` or `offline` would send it.")
    if not observe.mlflow.enabled and observe.mlflow != MlflowConfig():
        warnings.append("`observe.mlflow.enabled` is false, so nothing is sent there.")
    if observe.rollouts and not observe.has_tracker:
        warnings.append("`observe.rollouts` is for trackers, and none is on. Set `observe.tensorboard`, for example.")
    return warnings


def check_ranks(run: Recipe, groups: int, option: str) -> list[str]:
    """Refuse more ranks than this machine can run, and return warnings about ranks that would be idle.

    groups: the number of groups in a step. option: the option that sets it.
    """
    if run.ranks == 1:
        idle_crew = "`crew` says how several ranks wait for each other, and there is one. Set `ranks`, or leave it out."
        return [idle_crew] if run.crew != CrewConfig() and run.in_process else []
    warnings = _check_cores(run.ranks, run.rank_threads()) if run.cluster == "local" else []
    together = run.mesh.ranks_per_rollout
    if groups < run.ranks // together:
        trained_by = "one rank trains" if together == 1 else f"{together} ranks train together"
        warnings.append(
            f"A step has {groups} groups, each of which {trained_by} on, and there are {run.ranks} ranks: some will "
            f"be idle. Lower `ranks`, or raise `{option}`."
        )
    return warnings


@told_together
def check_engine(engine: str, critic: CriticConfig, placement: PlacementConfig) -> Iterator[ConfigError]:
    """Refuse models on another engine than the policy's, and models that are placed beside sharded ones."""
    if critic.train.engine not in ("auto", engine):
        yield ConfigError(
            f"`critic.train.engine={critic.train.engine}`: the critic is on the policy's engine, which is "
            f"`{engine}` here. Leave it out, or set `train.engine`."
        )
    for role in ROLES if engine == "fsdp" else ():
        location = getattr(placement, role)
        if role != "reward" and location != "policy":
            yield ConfigError(
                f"`placement.{role}={location}`: `train.engine=fsdp` shards every model over the ranks, on the "
                f"policy's devices. Leave it out; `train.offload` keeps idle models in the processor's memory."
            )


def _check_cores(ranks: int, threads: int) -> list[str]:
    """Refuse more ranks than this machine can run, and return a warning if they compete for processors."""
    cores = os.cpu_count() or 1
    if ranks > MAX_RANKS_PER_CORE * cores:
        raise ConfigError(
            f"`ranks={ranks}` are {ranks} processes, and this machine has {cores} "
            "processors: nothing would make progress. Lower it."
        )
    if ranks * threads > cores:
        return [
            f"`ranks={ranks}` want {ranks * threads} processors, {threads} each, and this machine has "
            f"{cores}: they will slow each other down. Lower `ranks` or `threads`."
        ]
    return []


@told_together
def check_agents(run: Run) -> Iterator[ConfigError]:
    """Refuse runs that agents cannot do, and agent options without an agent."""
    if not run.has_agents:
        if run.agent != type(run.agent)():
            yield ConfigError(
                "`agent` has options, and names no agent: they would do nothing. Give `agent.path=my_agent.py:solve`, "
                "or leave them out."
            )
        return
    named = "agent.path" if run.agent.path is not None else "agent.sources"
    if run.env.is_enabled:
        yield ConfigError(
            f"`{named}` has an agent make the rollouts, and `env` an environment: one of them would do nothing. Leave "
            "one out. In a mix, `agent.sources` takes environment classes too; and an agent may call any environment."
        )
    yield from problems_of(check_programs, run.env, run.agent)
    if run.cluster != "local" and isinstance(run.rollout, TorchEngineConfig):
        yield ConfigError(
            f"`cluster={run.cluster}` puts the engine into another process, and the endpoint that agents call needs "
            "it in this one so far. Leave `cluster` out, or sample by servers: `rollout=vllm`."
        )
    if run.train.choose_engine(run.ranks) == "fsdp" and isinstance(run.rollout, TorchEngineConfig):
        yield ConfigError(
            f"With `ranks={run.ranks}` and `train.engine={run.train.engine}`, engines are in the processes of ranks, "
            "and the endpoint that agents call needs one in this process. Leave both out, or sample by servers: "
            "`rollout=vllm`."
        )
    if run.has_greedy_baseline:
        yield ConfigError(
            "This advantage compares with a greedy answer to each task, which agents do not give. Choose "
            "another, such as `advantage=grpo`."
        )


@told_together
def _check_environment(run: Run) -> Iterator[ConfigError]:
    """Refuse an environment that cannot be created, and environment options without one."""
    missing = sorted(run.required_columns() & ENVIRONMENT_COLUMNS)
    if missing and not run.env.is_enabled and not run.has_agents:
        yield ConfigError(
            f"This algorithm needs the column `{missing[0]}`: the states in which turns began, which an environment "
            "provides. Give one with `env.path`, `env.hub` or `env.tools`, or choose another advantage."
        )
    if not run.env.has_environment and not run.has_agents and not run.reward.scores_answers:
        yield ConfigError(
            "`reward=environment` leaves rewards to the environment, and there is none that gives rewards. Give one "
            "with `env.path` or `env.hub`, or choose a reward."
        )
    if isinstance(run.reward, BySourceReward):
        members = run.reward.sources.items()
        left = [name for name, reward in members if not reward.scores_answers and not run.rewards_source(name)]
        if left:
            named = f"`env.sources.{left[0]}.path` or `env.sources.{left[0]}.hub`"
            yield ConfigError(
                f"`reward.sources.{left[0]}=environment` leaves the rewards of the data source `{left[0]}` to an "
                f"environment, and none that gives rewards plays it. Name one by "
                f"{f'`agent.sources.{left[0]}`' if run.agent.is_enabled else named}, or choose a reward."
            )
    if run.env.is_enabled and run.data.overlong == "truncate":
        yield ConfigError(
            "`data.overlong=truncate` cuts off the beginning of a prompt, and a multi-turn rollout keeps its own. "
            "Choose `data.overlong=filter`."
        )
    for environment in run.env.environments():
        yield from problems_of(environment.prepare)


@told_together
def _check_metric(name: str, reward: RewardFunction, *, rewards_elsewhere: bool) -> Iterator[ConfigError]:
    """Refuse a `collect.metric` that the reward does not have. rewards_elsewhere: players give rewards too."""
    if name and not rewards_elsewhere and isinstance(reward, CombinedReward) and name not in reward.parts:
        yield ConfigError(
            f"`collect.metric={name}` names no part of this reward, which has {', '.join(reward.parts)}. Name one of "
            f"them, or leave it out."
        )


def _check_update_timeout(bound: float, crew: CrewConfig, ranks: int, waits_for: str) -> None:
    """Refuse an `update_timeout` that ends the run before the engine fails. waits_for: the wait that it bounds."""
    if ranks > 1 and crew.timeout < 2 * bound:
        raise ConfigError(
            f"`rollout.update_timeout={bound:g}`: a rank waits so long for {waits_for}. The other ranks wait for that "
            f"rank `crew.timeout={crew.timeout:g}` s, and then end the run. `crew.timeout` must be at least twice "
            "as long: raise it, or lower `rollout.update_timeout`."
        )


@told_together
def check_servers(run: Run) -> Iterator[ConfigError]:
    """Refuse options that engines cannot serve."""
    update_timeout_fits = partial(_check_update_timeout, run.rollout.update_timeout, run.crew, run.ranks)
    if isinstance(run.rollout, TorchEngineConfig):
        if run.rollout.running == "finish":
            yield from problems_of(update_timeout_fits, "answers that finish before a weight update")
        return
    if run.train.precision == "fp64":
        yield ConfigError(
            "`train.precision=fp64` is a precision that no server computes in. Choose another, or `rollout=embedded`."
        )
    if run.lora.publish != type(run.lora)().publish:
        yield ConfigError(
            "`lora.publish` says how adapters reach the embedded engine, and servers get merged weights. Leave it out."
        )
    if isinstance(run.rollout, ServerConfig) and run.rollout.adapters == "only" and not run.lora.is_enabled:
        yield ConfigError(
            "`rollout.adapters=only` sends servers the trained adapters, and there are none. Set `lora.rank` (16 is "
            "usual), or leave it out."
        )
    if isinstance(run.rollout, ServerConfig) and run.rollout.weight_transport != "files":
        yield from problems_of(update_timeout_fits, "a server that hangs during a weight update")
    if run.train.offload and run.compute_device().type == "cpu":
        yield ConfigError(
            "`train.offload` has servers free their memory while the policy is trained, which they can do on a GPU "
            "only. Leave it out."
        )
