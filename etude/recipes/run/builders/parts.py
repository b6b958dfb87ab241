"""Builds all components of a training run, in their order."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

from etude.agents.agent import Agent
from etude.algorithms.advantages.token import OnPolicyDistillation
from etude.checkpoint import CheckpointManager
from etude.config.secrets import mask
from etude.config.tree import to_tree
from etude.data import Dataset
from etude.data.batch_columns import check_numbers
from etude.observe import RunInfo, get_logger, open_run_log, read_last_step
from etude.protocols import Crew
from etude.recipes.diagnosis.step_findings import StepFindings
from etude.recipes.event_loop import LoopThread
from etude.recipes.interrupt import Interrupt
from etude.recipes.run import directory as run_directory
from etude.recipes.run.builders.collection import RolloutBuilder
from etude.recipes.run.builders.crew import build_crew
from etude.recipes.run.builders.episodes import refuse_uncallable_tools
from etude.recipes.run.builders.hubs import open_hubs
from etude.recipes.run.builders.placement_report import describe_placement
from etude.recipes.run.builders.policy import build_chat_renderer
from etude.recipes.run.builders.tasks import TaskLoader
from etude.recipes.run.config import Run
from etude.recipes.run.resume import inputs
from etude.recipes.run.rules.sources import DataSources
from etude.recipes.run.session import log_start
from etude.recipes.run.steps.components import Learners, RunComponents
from etude.recipes.run.steps.console_metrics import failure_metrics, headline
from etude.recipes.run.steps.evaluation import PeriodicEvaluation
from etude.recipes.run.steps.save_resume import CheckpointSaver, resume_run
from etude.recipes.servers.reward_models import load_reward_models
from etude.recipes.servers.server_weights import WeightPublisher
from etude.recipes.workers.policy_worker import PolicyWorker
from etude.rewards import BySourceReward, Judge
from etude.rollout.engine_thread import release_omp_workers
from etude.rollout.held_adapters import adapter_count
from etude.store import open_store
from etude.store.http.listener import check_address
from etude.train import TrainConfig


def assemble_parts(
    run: Run,
    directory: Path,
    interrupt: Interrupt,
    stack: ExitStack,
    *,
    agent: Agent | None,
    tasks: Mapping[str, str],
) -> RunComponents:
    """Build the components, which stay open until the stack closes, and write the run's options once all of them
    exist."""
    check_address(*run.agent.address, "agent.listen=")
    run_directory.write_tasks(directory, tasks)
    run_directory.check_journal(directory)
    chat = build_chat_renderer(run)
    refuse_uncallable_tools(run.env, chat)
    hubs = stack.enter_context(open_hubs(run))
    loader = TaskLoader(
        run.data,
        run.env,
        run.reward,
        chat,
        for_agents=run.has_agents,
        max_images=run.vision.max_images,
    )
    train, overlong = loader.load("data.train", run.data.train)
    check_numbers(train, run.data.batch_columns)
    _check_sources(run, train)
    reward = load_reward_models(run.reward, run.role_device("reward", run.compute_device()))
    judge = stack.enter_context(Judge(reward, run.judging))
    threads = run.describe_threads()
    crew, engine, publisher = build_crew(run, chat, directory, stack)
    loop = stack.enter_context(LoopThread(release_omp_workers))
    store = stack.enter_context(closing(open_store(directory / run_directory.JOURNAL)))
    rollouts = RolloutBuilder(run, chat, engine, judge, loop, crew.call(PolicyWorker.max_total_tokens), hubs)
    collector, evaluator, new_client = rollouts.build_parts(directory, train, store, crew.put, stack, agent)
    checkpoints = CheckpointManager(directory / run_directory.CHECKPOINTS, run.checkpoint.keep)
    learners = Learners(
        crew,
        run.model_columns(),
        run.mini_batches,
        run.loss.split_unit,
        run.ess_floor,
        _free_engine_memory(run.train, crew, publisher),
        store.images,
    )
    step = resume_run(run.checkpoint, checkpoints, learners, collector, run.steps)
    inputs.RunInputs(directory, run).record(threads)
    run_directory.write_options(directory, run)
    last_written_step = read_last_step(directory)
    open_log = open_run_log(
        run.observe,
        RunInfo(directory.name, directory, run.steps, mask(to_tree(run))),
        headline(run.evaluate.samples, single_update=run.mini_batches * run.ppo_epochs == 1),
        last_written_step=last_written_step,
        failures=failure_metrics(run.evaluate.samples),
        notes=StepFindings(),
    )
    log = stack.enter_context(open_log)
    collector.progress = log.progress
    evaluation = PeriodicEvaluation(
        evaluator,
        directory,
        run.steps,
        store,
        engine.stats,
        inputs.evaluation_id(run.data.val, run.evaluate.score_settings(run.sampling)),
        log.progress,
        shares_engine=run.max_staleness > 0,
        kept_versions=adapter_count(run.max_staleness) if run.evaluate.when == "beside" else 0,
        add_late=log.add_late,
        mark_best=checkpoints.mark_best,
    )
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
        before_save=evaluation.before_save,
    )
    stack.push(saver.close)
    log_start(run, *crew.call(PolicyWorker.parameters), f"tasks: {len(train)}", saver, last_written_step)
    _log_placement(describe_placement(run, run.active_roles()), collector.last_replayed_step)
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
        new_client,
        shown_rollouts=run.observe.rollouts if run.observe.has_tracker else 0,
        publisher=publisher,
    )


def _check_sources(run: Run, train: Dataset) -> None:
    """Refuse data sources without a teacher or a reward, and options that name none of the data's sources."""
    named: dict[str, Collection[str]] = {
        "teacher.paths": run.teacher.paths,
        "advantage.weights": run.advantage.weights if isinstance(run.advantage, OnPolicyDistillation) else (),
        "reward.sources": run.reward.sources if isinstance(run.reward, BySourceReward) else (),
        "env.sources": run.env.sources,
        "agent.sources": run.agent.sources,
        "sampling.max_tokens_of": run.sampling.max_tokens_of,
    }
    if any(named.values()):
        sources = DataSources("data.train", train.sources(), run.data.sampler)
        sources.check_teachers(run.teacher.paths)
        sources.check_rewards(named["reward.sources"])
        for option, names in named.items():
            sources.refuse_others(option, names)
        if not run.reward.scores_answers:
            sources.check_players(run.rewards_source)


def _free_engine_memory(train: TrainConfig, crew: Crew, publisher: WeightPublisher | None) -> Callable[[], None]:
    """Return what makes the engine on the trainer's device free its memory, before training begins."""
    if not train.offload:
        return lambda: None
    if publisher is not None:
        return publisher.free_engine_memory
    return partial(crew.call, PolicyWorker.free_engine_memory)


def _log_placement(placement: Sequence[str], replays: int) -> None:
    """Log the device of each model, and the last step whose rollouts are read back."""
    for line in placement:
        get_logger("recipes").info("%s", line)
    if replays:
        message = "The answers collected since, up to step %d, are read back and not sampled again."
        get_logger("recipes").info(message, replays)
