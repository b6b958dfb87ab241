"""Builds the components of a training run from its options. With `collection`, it chooses the concrete classes.

Heavy modules are imported when a run is built, so that starting a run need not load them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.chat import ChatRenderer, Tokenizer
from etude.config.secrets import mask
from etude.config.tree import to_tree
from etude.dispatch import LocalCrew
from etude.errors import ConfigError
from etude.lazy import pause_gc
from etude.observe import RunInfo, RunLog, get_logger, open_run_log, read_last_step
from etude.protocols import Crew
from etude.recipes.interrupt import Interrupt
from etude.recipes.run.builders.episodes import refuse_uncallable_tools
from etude.recipes.run.builders.tasks import load_agent_tasks, load_tasks
from etude.recipes.run.steps.console_metrics import failure_metrics, headline
from etude.rewards import Judge, RewardFunction
from etude.store import Journal, open_store

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from etude.agents.agent import Agent
    from etude.models import Model
    from etude.recipes.evaluate import Evaluator
    from etude.recipes.recipe import Recipe
    from etude.recipes.run.config import Run
    from etude.recipes.run.steps.components import Engine, RunComponents
    from etude.recipes.run.steps.evaluation import PeriodicEvaluation
    from etude.recipes.servers.server_weights import WeightPublisher
    from etude.recipes.workers.policy_worker import PolicyWorker
    from etude.rollout import TorchEngine
    from etude.train.backend import HeldModel


@contextmanager
def build(
    run: Run, interrupt: Interrupt | None = None, agent: Agent | None = None, tasks: Mapping[str, str] | None = None
) -> Iterator[RunComponents]:
    """Yield the components of a run, checked against each other and open; close them at the end.

    Nothing is written for a run that cannot start. An interrupted run ends in a `KeyboardInterrupt`. interrupt: the
    signal listener to use, when several runs follow each other. agent: the agent that makes rollouts, instead of the
    one that `agent.path` names. tasks: see `run_directory.write_tasks`.
    """
    from etude.recipes.hub import resolve_hub_names
    from etude.recipes.run import directory as run_directory

    run = resolve_hub_names(run)

    def assemble(run: Run, directory: Path, interrupt: Interrupt, stack: ExitStack) -> RunComponents:
        run_directory.write_tasks(directory, tasks or {})
        return _assemble_parts(run, directory, interrupt, stack, agent)

    with ExitStack() as stack:
        with pause_gc():
            from etude.recipes.run.rules import checks
            from etude.recipes.run.session import run_session

            note = "; the answers sampled since are kept"
            shown: dict[str, Any] = {"inspect_commands": ("plot", "answers"), "interrupted_note": note}
            parts = stack.enter_context(run_session(run, assemble, interrupt, check=checks.check_run, **shown))
        yield parts


def _assemble_parts(
    run: Run, directory: Path, interrupt: Interrupt, stack: ExitStack, agent: Agent | None = None
) -> RunComponents:
    """Build the components, which stay open until the stack closes, and write the run's options once all of them
    exist."""
    from etude.checkpoint import CheckpointManager
    from etude.recipes.event_loop import LoopThread
    from etude.recipes.run import directory as run_directory
    from etude.recipes.run.builders.collection import build_collector
    from etude.recipes.run.builders.placement_report import describe_placement
    from etude.recipes.run.resume import inputs
    from etude.recipes.run.session import log_start
    from etude.recipes.run.steps.components import Learners, RunComponents
    from etude.recipes.run.steps.save_resume import CheckpointSaver, resume_run
    from etude.recipes.workers.policy_worker import PolicyWorker
    from etude.rollout.engine_thread import release_omp_workers

    run_directory.check_journal(directory)
    chat = build_chat_renderer(run)
    refuse_uncallable_tools(run, chat)
    agentic = run.agent.path is not None
    if agentic:
        train, overlong = load_agent_tasks(run, run.data.train), 0
    else:
        train, overlong = load_tasks(run, chat, "data.train", run.data.train)
    judge = stack.enter_context(Judge(_load_reward(run), run.judging))
    threads = run.describe_threads()
    crew, engine, publisher = _crew(run, chat, directory, stack)
    loop = stack.enter_context(LoopThread(release_omp_workers))
    store = stack.enter_context(closing(open_store(directory / run_directory.JOURNAL)))
    max_total_tokens = crew.call(PolicyWorker.max_total_tokens)
    collector, evaluator, client = build_collector(
        run, directory, chat, train, crew, engine, judge, store, loop, max_total_tokens, stack, agent
    )
    checkpoints = CheckpointManager(directory / run_directory.CHECKPOINTS, run.checkpoint.keep)
    learners = Learners(crew, run.model_columns(), run.mini_batches, run.loss.split_unit, run.ess_floor)
    step = resume_run(run.checkpoint, checkpoints, learners, collector, run.steps)
    inputs.RunInputs(directory, run).record(threads)
    run_directory.write_options(directory, run)
    last_written_step = read_last_step(directory)
    log = stack.enter_context(_open_log(run, directory, last_written_step))
    collector.progress = log.progress
    evaluation = _build_evaluation(run, evaluator, directory, store, engine, log)
    saver = CheckpointSaver(
        run.checkpoint,
        checkpoints,
        learners,
        collector,
        run.steps,
        interrupt,
        log,
        evaluation.score_at,
        evaluation_id=evaluation.evaluation_id,
        step=step,
        saved_step=step,
    )
    saver.before_save = evaluation.before_save
    evaluation.mark_best = saver.mark_best
    stack.push(saver.close)
    log_start(run, *crew.call(PolicyWorker.parameters), f"tasks: {len(train)}", saver, last_written_step)
    _log_placement(describe_placement(run, run.active_roles()), collector.last_replayed_step)
    if run.train.offload:
        on_ranks = partial(crew.call, PolicyWorker.free_engine_memory)
        learners.free_engine_memory = on_ranks if publisher is None else publisher.free_engine_memory
    return RunComponents(
        directory,
        log,
        collector,
        learners,
        evaluation,
        saver,
        engine,
        store,
        loop,
        overlong,
        chat.tokenizer.decode,
        client,
        shown_rollouts=run.observe.rollouts if run.observe.has_tracker else 0,
        publisher=publisher,
    )


def _build_evaluation(
    run: Run, evaluator: Evaluator | None, directory: Path, store: Journal, engine: Engine, log: RunLog
) -> PeriodicEvaluation:
    """Return the evaluation of the run's steps, between them or beside them."""
    from etude.recipes.run.resume import inputs
    from etude.recipes.run.steps.evaluation import PeriodicEvaluation
    from etude.rollout.held_adapters import adapter_count

    evaluation_id = inputs.evaluation_id(run.data.val, run.evaluate.score_settings(run.sampling))
    return PeriodicEvaluation(
        evaluator,
        directory,
        run.steps,
        store,
        engine.stats,
        evaluation_id,
        log.progress,
        shares_engine=run.max_staleness > 0,
        kept_versions=adapter_count(run.max_staleness) if run.evaluate.when == "beside" else 0,
        add_late=log.add_late,
    )


def _load_reward(run: Run) -> RewardFunction:
    """Load the reward's models, if any, on the device that `placement.reward` names."""
    from etude.recipes.run.machine.placement import role_device
    from etude.recipes.servers.reward_models import load_reward_models

    where = role_device(run.placement, "reward", policy=run.compute_device(), engine=run.engine_device())
    return load_reward_models(run.reward, where)


def _open_log(run: Run, directory: Path, last_written_step: int) -> AbstractContextManager[RunLog]:
    """Return the run's log, which shows its headline and writes its metrics."""
    info = RunInfo(directory.name, directory, run.steps, mask(to_tree(run)))
    from etude.recipes.diagnosis.step_findings import StepFindings

    last, failures = last_written_step, failure_metrics(run)
    return open_run_log(
        run.observe, info, headline(run), last_written_step=last, failures=failures, notes=StepFindings()
    )


def _log_placement(placement: Sequence[str], replays: int) -> None:
    """Log the device of each model, and the last step whose rollouts are read back."""
    for line in placement:
        get_logger("recipes").info("%s", line)
    if replays:
        message = "The answers collected since, up to step %d, are read back and not sampled again."
        get_logger("recipes").info(message, replays)


def _crew(
    run: Run, chat: ChatRenderer, directory: Path, stack: ExitStack
) -> tuple[Crew, Engine, WeightPublisher | None]:
    """Return the workers that train, the engine that samples, and the weight publisher if servers sample.

    The workers are in this process, or in one process or Ray actor per rank.
    """
    from etude.recipes.run import directory as run_directory
    from etude.recipes.servers.rank_engines import RankEngines, start_ranks
    from etude.recipes.servers.server_weights import serve_run
    from etude.rollout import ServerConfig

    crew: Crew
    engine: Engine | None
    if run.in_process:
        worker, embedded = _rank(run, chat)
        if embedded is not None:
            stack.enter_context(closing(embedded))
        stack.callback(worker.close)
        crew, engine = stack.enter_context(closing(LocalCrew(worker))), embedded
    else:
        rank_crew = stack.enter_context(
            closing(start_ranks(build_rank_worker, run, directory / run_directory.RANK_LOGS))
        )
        crew, engine = rank_crew, RankEngines(rank_crew)
    if isinstance(run.rollout, ServerConfig):
        server_pool, publisher = stack.enter_context(serve_run(run, run.rollout, chat.tokenizer, crew, directory))
        return crew, server_pool, publisher
    assert engine is not None, "without servers the workers sample"
    return crew, engine, None


def build_rank_worker(run: Run) -> PolicyWorker:
    """Build the worker of one rank, in the rank's own process."""
    return _rank(run, build_chat_renderer(run))[0]


def build_trainer(run: Run) -> PolicyWorker:
    """Build the worker that trains a run's policy in this process. It has no engine, and so it publishes nothing."""
    return _worker(run, load_trained_model(run, build_chat_renderer(run), None), None, None)


def _rank(run: Run, chat: ChatRenderer) -> tuple[PolicyWorker, TorchEngine | None]:
    """Build a model, its engine unless servers sample, and the worker that trains it."""
    import torch

    from etude.recipes.run.builders import auxiliary_models, lengths
    from etude.rollout import TorchEngine, TorchEngineConfig
    from etude.train.backend import model_of

    mesh = auxiliary_models.build_mesh(run)
    model = model_of(policy := load_trained_model(run, chat, mesh))
    lengths.check_context_length(run, model)
    if not isinstance(run.rollout, TorchEngineConfig):
        return _worker(run, policy, None, mesh), None
    if mesh is not None:  # the engine has its own whole weights
        engine_model = load_model(run, chat, device=run.engine_device())
    else:
        engine_model = model if run.placement.layout == "colocated" else model.copy(device=run.engine_device())
    config = run.rollout
    if run.max_staleness and engine_model.device.type == "cpu":  # both compute at the same time
        shares = run.share_threads(torch.get_num_threads())
        config = config.model_copy(update={"threads": shares.engine})
        torch.set_num_threads(shares.trainer)
    engine = TorchEngine(engine_model, chat.tokenizer, config, merge=run.lora.publish == "merged")
    try:
        return _worker(run, policy, engine, mesh), engine
    except BaseException:
        engine.close()
        raise


def load_policy(run: Recipe) -> tuple[Model, ChatRenderer]:
    """Return the model of a run and its chat renderer, with adapters attached and frozen weights frozen."""
    chat = build_chat_renderer(run)
    return load_model(run, chat), chat


def build_chat_renderer(run: Recipe) -> ChatRenderer:
    """Return the chat renderer of a run's model."""
    from etude.recipes.run.directory import check_model
    from etude.recipes.run.rules.checks import NO_MODEL

    if run.model.path is None:
        raise ConfigError(NO_MODEL)
    check_model(run.model.path)
    return run.chat.build_renderer(Tokenizer.load(run.model.tokenizer or run.model.path))


def load_model(run: Recipe, chat: ChatRenderer, *, device: torch.device | None = None) -> Model:
    """Load the model of a run to compute with, whole, and check that the tokenizer fits it."""
    from etude.models import load
    from etude.train.optim import PRECISIONS

    assert run.model.path is not None, "a run has a model"
    where, dtype = run.model.path, PRECISIONS[run.train.precision]
    model = load(where, dtype=dtype, device=device or run.compute_device(), head=run.head)
    return _choose_trained(run, chat, model)


def load_trained_model(run: Recipe, chat: ChatRenderer, mesh: DeviceMesh | None) -> HeldModel:
    """Load the model of a run to train it, in the full precision of its files: whole, or this rank's shards."""
    from etude.recipes.run.builders.auxiliary_models import load_trained
    from etude.train.optim import PRECISIONS

    assert run.model.path is not None, "a run has a model"
    where, dtype = run.model.path, PRECISIONS[run.train.precision]
    options: dict[str, Any] = {"keep_float32": not run.lora.is_enabled, "prepare": partial(_choose_trained, run, chat)}
    return load_trained(where, dtype, mesh, device=run.compute_device(), head=run.head, **options)


def _choose_trained(run: Recipe, chat: ChatRenderer, model: Model) -> Model:
    """Attach adapters to a model and freeze parts, by the run's options. Refuse a tokenizer of another model."""
    from etude.models import adapt

    if (tokenizer := chat.tokenizer).vocab_size > model.vocab_size:
        remedy = "Leave `model.tokenizer` out." if run.model.tokenizer else "Set `model.tokenizer`."
        raise ConfigError(
            f"The tokenizer in {tokenizer.directory} has {tokenizer.vocab_size} tokens, and the model in "
            f"{run.model.path} knows {model.vocab_size}: they belong to different models. {remedy}"
        )
    if run.lora.is_enabled:
        model = adapt(model, run.lora, seed=run.seed)
    if run.model.freeze:
        model.freeze(run.model.freeze)
    return model


def _worker(run: Run, policy: HeldModel, engine: TorchEngine | None, mesh: DeviceMesh | None) -> PolicyWorker:
    """Build the policy worker of a rank with its auxiliary models."""
    from etude.recipes.run.builders import auxiliary_models
    from etude.train.backend import model_of

    temperature, model = run.sampling.temperature, model_of(policy)
    reference, teacher = None, None
    if run.uses_reference():
        reference = auxiliary_models.load_reference(run, policy, run.reference.path, temperature, mesh=mesh)
    if run.uses_teacher():
        teacher = auxiliary_models.load_frozen(run, model, "teacher", run.teacher.path, temperature, mesh=mesh)
    critic = auxiliary_models.load_critic(run, model, mesh) if run.uses_critic() else None
    return auxiliary_models.build_policy_worker(
        run, policy, engine, reference=reference, teacher=teacher, critic=critic
    )
