"""From a run's options to the parts of its loop: the only place that knows which concrete part stands where.

What is heavy is imported when a run is built, so that whoever can start one need not load it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from etude.chat import Chat, Tokenizer
from etude.config.secrets import mask
from etude.config.tree import to_tree
from etude.data import Dataset
from etude.dispatch import LocalCrew
from etude.errors import ConfigError, DataError
from etude.lazy import loading
from etude.observe import RunInfo, get_log, last_step, open_run_log
from etude.protocols import Crew, Generate, Ids
from etude.recipes.episodes import Episodes
from etude.recipes.evaluate import Evaluator
from etude.recipes.headline import failures, headline
from etude.recipes.interrupt import Interrupt
from etude.recipes.play import Player, PromptIds
from etude.recipes.sources import AgentSource, EngineSource
from etude.records import Task
from etude.rewards import Judge, RewardFunction
from etude.store import Journal, open_store

if TYPE_CHECKING:
    from etude.agents.agent import Agent
    from etude.models import Model
    from etude.recipes.agents import Agents
    from etude.recipes.parts import Engine, Parts
    from etude.recipes.recipe import Recipe
    from etude.recipes.run import Run
    from etude.recipes.serving import Publisher
    from etude.recipes.workers import PolicyWorker
    from etude.rollout import TorchEngine
    from etude.store.desk import Desk

__all__ = [
    "agents_evaluator",
    "agents_of",
    "build",
    "chat_of",
    "episodes_of",
    "evaluator_of",
    "model_of",
    "policy",
    "prompts",
    "rank",
    "tasks",
]


@contextmanager
def build(
    run: Run, interrupt: Interrupt | None = None, agent: Agent | None = None, tasks: Mapping[str, str] | None = None
) -> Iterator[Parts]:
    """Every part of the run, checked against each other, open; and closed again in the end.

    Nothing is written of a run that cannot begin. One that somebody asked to stop ends in a `KeyboardInterrupt`.
    `interrupt`: who listens for that already, where several runs follow each other. `agent`: who plays rollouts, in
    place of what `agent.path` names. `tasks`: see `folder.take_tasks`.
    """
    from etude.recipes import folder
    from etude.recipes.hub import located

    run = located(run)

    def assembled(run: Run, directory: Path, interrupt: Interrupt, stack: ExitStack) -> Parts:
        folder.take_tasks(directory, tasks or {})
        return _assembled(run, directory, interrupt, stack, agent)

    with ExitStack() as stack:
        with loading():
            from etude.recipes import checks
            from etude.recipes.frame import framed

            kept = "; the answers drawn since are kept"
            frame = framed(run, assembled, interrupt, checked=checks.before, looks=("plot", "answers"), kept=kept)
            parts = stack.enter_context(frame)
        yield parts


def _assembled(run: Run, directory: Path, interrupt: Interrupt, stack: ExitStack, agent: Agent | None = None) -> Parts:
    """The parts, each open until the stack closes; and the run written down, once all of them are there."""
    from etude.checkpoint import Checkpoints
    from etude.recipes import checks, folder, inputs
    from etude.recipes.device import device_of
    from etude.recipes.frame import introduce
    from etude.recipes.parts import Learners, Parts, Scoring
    from etude.recipes.placement import engine_device, lines, placed
    from etude.recipes.saving import Saver, taken_up
    from etude.recipes.scoring import live
    from etude.recipes.workers import PolicyWorker

    chat = chat_of(run)
    _can_call(run, chat)
    agentic = run.agent.path is not None
    train, overlong = (given(run, run.data.train), 0) if agentic else tasks(run, chat, "data.train", run.data.train)
    where = placed(run.placement, "reward", policy=device_of(run), engine=engine_device(run))
    judge = stack.enter_context(Judge(live(run.reward, where), run.judging))
    crew, engine, publisher = _crew(run, chat, directory, stack)
    runner = stack.enter_context(asyncio.Runner())
    store = stack.enter_context(closing(open_store(directory / folder.JOURNAL)))
    longest = crew.call(PolicyWorker.longest)
    order = run.data.sampler.start(len(train), run.seed, train.sources)
    common: dict[str, Any] = {"seed": run.seed, "dataset": train, "order": order, "judge": judge, "store": store}
    common |= {"runner": runner, "keep": crew.keep} | _failure_rules(run, directory)
    source: AgentSource | EngineSource
    client: Callable[[], Desk] | None = None
    if agentic:
        agents = agents_of(run, chat, engine, judge, store, directory, longest, stack, runner, agent)
        source, client = AgentSource(run.collect, agents, **common), agents.client
        evaluator = scorer_of(run, agents, judge, store, runner)
    else:
        episodes = episodes_of(run, longest, chat)
        evaluator = evaluator_of(run, chat, engine, judge, runner, episodes)
        source = _engine_source(run, chat, engine, episodes, common)
    kept = Checkpoints(directory / "checkpoints", run.checkpoint.keep)
    learners = Learners(crew, checks.from_the_models(run), run.updates, run.loss.split_unit)
    step = taken_up(run.checkpoint, kept, learners, source, run.steps)
    inputs.keep_inputs(directory, run)
    folder.settle(directory, run)
    written = last_step(directory)
    info = RunInfo(directory.name, directory, run.steps, mask(to_tree(run)))
    log = stack.enter_context(open_run_log(run.observe, info, headline(run), written=written, failures=failures(run)))
    measured = inputs.yardstick(run, run.evaluate.yardstick(run.sampling))
    source.watch = log.progress
    scoring = Scoring(evaluator, directory, run.steps, store, engine, measured, log.progress)
    saver = Saver(
        *(run.checkpoint, kept, learners, source, run.steps, interrupt, log, scoring.best),
        measured=measured,
        step=step,
        saved=step,
    )
    introduce(run, *crew.call(PolicyWorker.parameters), f"tasks: {len(train)}", saver, written)
    _tell(lines(run, checks.roles(run)), source.replays)
    if run.train.offload:
        asleep: Callable[[], None]
        asleep = publisher.make_room if publisher is not None else partial(crew.call, PolicyWorker.make_room)
        learners.make_room = asleep
    beside = (chat.tokenizer.decode, client, publisher)
    return Parts(directory, log, source, learners, scoring, saver, engine, store, runner, overlong, *beside)


def _failure_rules(run: Run, directory: Path) -> dict[str, Any]:
    """The options of a source for rollouts that failed."""
    from etude.recipes import inputs
    from etude.recipes.groups import min_group

    return {"min_group": min_group(run), "code_changed": bool(inputs.code_changed(directory, run))}


def _tell(placement: Sequence[str], replays: int) -> None:
    """Say who is where, and up to which step nothing is drawn."""
    for line in placement:
        get_log("recipes").info("%s", line)
    if replays:
        told = "The answers of what was collected since, up to step %d, are read back and not drawn again."
        get_log("recipes").info(told, replays)


def _engine_source(
    run: Run, chat: Chat, engine: Generate, episodes: Episodes | None, common: Mapping[str, Any]
) -> EngineSource:
    return EngineSource(
        run.collect,
        run.sampling,
        prompt_ids=prompts(run, chat),
        engine=engine,
        at_once=run.rollout.at_once(run.ranks),
        episodes=episodes,
        greedy="greedy_reward" in run.needs(),
        **common,
    )


def agents_of(
    run: Run,
    chat: Chat,
    engine: Any,
    judge: Judge,
    store: Journal,
    directory: Path,
    longest: int,
    stack: ExitStack,
    runner: asyncio.Runner,
    agent: Agent | None,
) -> Agents:
    """Who asks agents for rollouts; and the agents, at work."""
    from etude.store import serving_installed

    serving_installed()
    from etude.recipes.agency import agency
    from etude.recipes.agents import Agents

    cursor = store.position if run.agent.store is None else 0
    found = stack.enter_context(agency(run, chat, engine, store, directory, longest, runner, agent))
    agents = Agents(run.agent, run.collect.retries, found.desk, judge, chat.tokenizer, cursor)
    agents.check, agents.endpoint, agents.client = found.check, found.metrics, found.client
    return agents


def scorer_of(run: Run, agents: Agents, judge: Judge, store: Journal, runner: asyncio.Runner) -> Evaluator | None:
    """Whoever has agents score the policy on `data.val`, if there are such tasks."""
    from etude.recipes import inputs
    from etude.recipes.agents import Scorings

    if not run.data.val:
        return None
    dataset = given(run, run.data.val)
    player = Scorings(agents, store, inputs.yardstick(run, run.evaluate.yardstick(run.sampling)))
    sampling = run.evaluate.sampling.beside(run.sampling)
    return Evaluator(
        run.evaluate, sampling=sampling, seed=run.seed, dataset=dataset, player=player, judge=judge, runner=runner
    )


def agents_evaluator(
    run: Run, chat: Chat, engine: Engine, judge: Judge, runner: asyncio.Runner, longest: int, stack: ExitStack
) -> Evaluator | None:
    """Whoever has agents score a model that belongs to no run that is under way: with runners of its own, on this
    machine. What they did is kept in no journal: a run's own is none of theirs."""
    place = Path(stack.enter_context(TemporaryDirectory(prefix="etude-")))
    store = stack.enter_context(closing(open_store()))
    here = {"store": None, "listen": "127.0.0.1:0", "runners": run.agent.runners or 1}
    run = run.model_copy(update={"agent": run.agent.model_copy(update=here)})
    agents = agents_of(run, chat, engine, judge, store, place, longest, stack, runner, None)
    return scorer_of(run, agents, judge, store, runner)


def given(run: Run, files: Sequence[str]) -> Dataset:
    """Tasks as agents are given them: whatever their rows hold."""
    return Dataset.load(files, run.data.columns, prompted=False)


def _crew(run: Run, chat: Chat, directory: Path, stack: ExitStack) -> tuple[Crew, Engine, Publisher | None]:
    """Whoever trains and samples: here, or in as many processes or Ray actors as there are to be ranks; or servers
    sample, which somebody is to bring weights to."""
    from etude.recipes import folder
    from etude.recipes.replicas import Replicas, start
    from etude.recipes.serving import serving
    from etude.rollout import ServerConfig

    crew: Crew
    engine: Engine | None
    if run.ranks == 1 and run.cluster == "local":
        worker, embedded = _rank(run, chat)
        if embedded is not None:
            stack.enter_context(closing(embedded))
        stack.callback(worker.close)
        crew, engine = stack.enter_context(closing(LocalCrew(worker))), embedded
    else:
        several = stack.enter_context(closing(start(rank, run, directory / folder.RANKS)))
        crew, engine = several, Replicas(several)
    if isinstance(run.rollout, ServerConfig):
        served, publisher = stack.enter_context(serving(run, run.rollout, chat.tokenizer, crew, directory))
        return crew, served, publisher
    assert engine is not None, "what is not served is sampled by the workers"
    return crew, engine, None


def rank(run: Run) -> PolicyWorker:
    """The worker of one rank, made in its own process."""
    return _rank(run, chat_of(run))[0]


def _rank(run: Run, chat: Chat) -> tuple[PolicyWorker, TorchEngine | None]:
    """A model, the engine that samples from it unless servers do, and whoever trains it."""
    from etude.recipes import checks
    from etude.recipes.placement import engine_device
    from etude.rollout import EngineConfig, TorchEngine

    model = model_of(run, chat, trained=True)
    checks.room(run, model)
    if not isinstance(run.rollout, EngineConfig):
        return _worker(run, model, None), None
    sampled = model if run.placement.layout == "colocated" else model.copy(device=engine_device(run))
    engine = TorchEngine(sampled, chat.tokenizer, run.rollout, merge=run.lora.publish == "merged")
    try:
        return _worker(run, model, engine), engine
    except BaseException:
        engine.close()
        raise


def policy(run: Recipe, *, trained: bool = False) -> tuple[Model, Chat]:
    """The model of a run, and how it is spoken to: with the adapters that are trained in place of its weights, and with
    what is frozen frozen. To be trained, it brings its weights as exactly as its files do."""
    chat = chat_of(run)
    return model_of(run, chat, trained=trained), chat


def chat_of(run: Recipe) -> Chat:
    """How the model of a run is spoken to."""
    from etude.recipes.folder import check_model

    if run.model.path is None:
        raise ConfigError("A run needs a model: give a Hugging Face model directory with `model.path=…`.")
    check_model(run.model.path)
    return run.chat.chat(Tokenizer.load(run.model.tokenizer or run.model.path))


def model_of(run: Recipe, chat: Chat, *, trained: bool) -> Model:
    """The model of a run, which is spoken to so."""
    from etude.models import adapt, load
    from etude.recipes.device import device_of
    from etude.train.optim import PRECISIONS

    assert run.model.path is not None, "a run has a model"
    tokenizer, exact = chat.tokenizer, trained and not run.lora.on
    model = load(
        run.model.path, dtype=PRECISIONS[run.train.precision], device=device_of(run), exact=exact, head=run.head
    )
    if tokenizer.size > model.vocabulary:
        remedy = "Leave `model.tokenizer` out." if run.model.tokenizer else "Set `model.tokenizer`."
        raise ConfigError(
            f"The tokenizer in {tokenizer.directory} has {tokenizer.size} tokens, and the model in {run.model.path} "
            f"knows {model.vocabulary}: they belong to different models. {remedy}"
        )
    if run.lora.on:
        model = adapt(model, run.lora, seed=run.seed)
    if run.model.freeze:
        model.freeze(run.model.freeze)
    return model


def prompts(run: Run, chat: Chat) -> PromptIds:
    """How a task's prompt becomes ids."""

    def ids(task: Task) -> Ids:
        asked: Any = task.fields["prompt"]
        return run.data.cut(chat.prompt_ids(asked))

    return ids


def _can_call(run: Run, chat: Chat) -> None:
    """Refuse tools that the model could never call."""
    if run.env.tools and chat.calls is None:
        raise ConfigError(
            "`env.tools` offers functions to a model whose chat template teaches no form of calls that is known here "
            "(those of Hermes, Qwen, Llama, Mistral and LFM 2), so none would ever be called. Set `chat.template`, or "
            "read calls of another form in an environment: a `ToolEnv` with `calls` of its own."
        )


def episodes_of(run: Run, longest: int, chat: Chat) -> Episodes | None:
    """Who plays rollouts of several turns, where there is anybody to speak with; of so many tokens at most."""
    _can_call(run, chat)
    if run.env.max_tokens is not None and run.env.max_tokens > longest:
        raise ConfigError(
            f"`env.max_tokens={run.env.max_tokens}` is more than the {longest} tokens that the model's context and the "
            f"engine's memory have room for. Lower it, leave it out, or raise `rollout.kv_gib`."
        )
    return Episodes(run.env, chat, longest) if run.env.asked else None


def tasks(run: Run, chat: Chat, name: str, files: Sequence[str]) -> tuple[Dataset, int]:
    """The tasks of some files, without those whose prompts are too long, if that is wanted; and how many those are."""
    whole = _judged(run, Dataset.load(files, run.data.columns), name)
    toolbox = run.env.toolbox()
    if toolbox is not None and run.env.path is None and isinstance(whole.task(0, 0).fields["prompt"], str):
        raise ConfigError(
            f"`env.tools` offers functions by the chat template, and {whole.where(0)} has text for a prompt, which is "
            f"continued without one. Give prompts as messages."
        )
    asked = partial(chat.prompt_ids, tools=() if toolbox is None else toolbox.schemas)
    fitting, counts = whole.fitting(asked, run.data.max_prompt, run.data.overlong)
    over = int(counts.reduce()["overlong_prompts"])
    if over:
        done = "left out" if run.data.overlong == "filter" else "cut at the beginning"
        get_log("recipes").warning(
            f"{over} of {len(whole)} prompts in {name} are longer than `data.max_prompt={run.data.max_prompt}`: {done}."
        )
    return fitting, over


def _judged(run: Run, dataset: Dataset, name: str) -> Dataset:
    """The tasks that the reward can judge an answer to; refuses files that have none."""
    if type(run.reward).check is RewardFunction.check:
        return dataset
    wanted, why = np.ones(len(dataset), dtype=bool), ""
    for row in range(len(dataset)):
        task = dataset.task(row, row)
        try:
            run.reward.check(task)
        except DataError as error:
            wanted[row], why = False, why or f"{dataset.where(row)}: {error}"
    if wanted.all():
        return dataset
    if not wanted.any():
        remedy = " Where the environment pays, and nothing else is to be judged: `reward=environment`."
        none = f"None of the {len(dataset)} tasks in {name} can be judged."
        raise DataError(f"{none} {why}{remedy if run.env.path else ''}")
    left = int((~wanted).sum())
    get_log("recipes").warning(f"{left} of {len(dataset)} tasks in {name} cannot be judged: left out. {why}")
    return dataset.only(wanted)


def evaluator_of(
    run: Run, chat: Chat, engine: Generate, judge: Judge, runner: asyncio.Runner, episodes: Episodes | None
) -> Evaluator | None:
    """Whoever scores the policy on `data.val`, if there are such tasks."""
    if not run.data.val:
        return None
    dataset, _ = tasks(run, chat, "data.val", run.data.val)
    player = Player(
        prompt_ids=prompts(run, chat),
        engine=engine,
        judge=judge,
        timeout=run.collect.timeout,
        at_once=run.rollout.at_once(run.ranks),
        episodes=episodes,
    )
    sampling = run.evaluate.sampling.beside(run.sampling)
    return Evaluator(
        run.evaluate, sampling=sampling, seed=run.seed, dataset=dataset, player=player, judge=judge, runner=runner
    )


def _worker(run: Run, model: Model, engine: TorchEngine | None) -> PolicyWorker:
    """The learner, and what stands beside it."""
    from etude.recipes import checks, models

    warmth, mesh = run.sampling.temperature, models.mesh_of(run)
    reference, teacher = None, None
    if checks.compares(run):
        reference = models.reference(run, model, run.reference.path, warmth, mesh=mesh)
    if checks.imitates(run):
        teacher = models.frozen(run, model, "teacher", run.teacher.path, warmth, mesh=mesh)
    return models.worker_of(
        run,
        model,
        engine,
        mesh=mesh,
        reference=reference,
        teacher=teacher,
        critic=models.critic(run, model) if checks.foresees(run) else None,
    )
