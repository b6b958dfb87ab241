"""Builds what collects the rollouts of a run and scores its policy: by an engine, or by agents."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from etude.chat import ChatRenderer, PromptReader
from etude.data import Dataset
from etude.protocols import Crew, TokenGenerator
from etude.recipes.collect.collector import Collector
from etude.recipes.collect.engine_source import EngineSource
from etude.recipes.collect.episodes import EpisodePlayer
from etude.recipes.collect.newest_version import newest_version
from etude.recipes.collect.player import AttemptPlayer, EnginePlayer
from etude.recipes.collect.rollouts import RolloutSource
from etude.recipes.evaluate import Evaluator
from etude.recipes.event_loop import LoopThread
from etude.recipes.run.builders.episodes import build_episode_player
from etude.recipes.run.builders.tasks import load_agent_tasks, load_tasks
from etude.rewards import Judge
from etude.store import Journal, open_store

if TYPE_CHECKING:
    from etude.agents.agent import Agent
    from etude.recipes.collect.agent_source import AgentSource
    from etude.recipes.run.config import Run
    from etude.recipes.run.steps.components import Engine
    from etude.store.queue.rollout_queue import RolloutQueue


def build_collector(
    run: Run,
    directory: Path,
    chat: ChatRenderer,
    dataset: Dataset,
    crew: Crew,
    engine: Engine,
    judge: Judge,
    store: Journal,
    loop: LoopThread,
    max_total_tokens: int,
    stack: ExitStack,
    agent: Agent | None,
) -> tuple[Collector, Evaluator | None, Callable[[], RolloutQueue] | None]:
    """Return the collector of a run's rollouts, and the evaluator of its policy if it has one.

    If agents make the rollouts, the third value makes further clients of the rollout queue.
    """
    from etude.recipes.run.resume import inputs
    from etude.recipes.run.rules.group_size import min_group_size

    code_changed = bool(inputs.RunInputs(directory, run).code_changed())
    agentic = run.agent.path is not None
    source: RolloutSource
    client: Callable[[], RolloutQueue] | None = None
    if agentic:
        agents = start_agents(run, chat, engine, judge, store, directory, max_total_tokens, stack, loop, agent)
        source, client = agents, agents.new_client
        evaluator = _build_agent_scorer(run, agents, PromptReader(chat), judge, store, loop)
    else:
        episodes = build_episode_player(run, max_total_tokens, chat)
        evaluator = build_evaluator(run, chat, engine, judge, loop, episodes)
        player, retries = build_player(run, chat, engine, judge, episodes), run.collect.retries
        source = EngineSource(
            player, run.sampling.params(), store, seed=run.seed, retries=retries, code_changed=code_changed
        )
    collector = Collector(
        run.collect,
        source,
        dataset=dataset,
        order=run.data.sampler.start(len(dataset), run.seed, dataset.sources),
        judge=judge,
        store=store,
        loop=loop,
        episodic=agentic or run.env.is_enabled,
        greedy=not agentic and "greedy_reward" in run.required_columns(),
        min_group_size=min_group_size(run),
        code_changed=code_changed,
        tags=run.agent.tags if agentic else (),
        max_staleness=run.max_staleness,
        last_step=run.steps,
        keep=crew.put,
    )
    return stack.enter_context(closing(collector)), evaluator, client


def build_player(
    run: Run, chat: ChatRenderer, engine: TokenGenerator, judge: Judge, episodes: EpisodePlayer | None
) -> EnginePlayer:
    """Return the player of a run's attempts with its engine."""
    return EnginePlayer(
        prompt_ids=chat.prompt_ids,
        truncate=run.data.truncate,
        engine=engine,
        judge=judge,
        timeout=run.collect.timeout,
        max_concurrency=run.rollout.max_concurrency(run.ranks),
        episodes=episodes,
        newest_version=newest_version(engine),
    )


def build_evaluator(
    run: Run,
    chat: ChatRenderer,
    engine: TokenGenerator,
    judge: Judge,
    loop: LoopThread,
    episodes: EpisodePlayer | None,
) -> Evaluator | None:
    """Return the evaluator of the policy on `data.val`; None without such tasks."""
    if not run.data.val:
        return None
    dataset, _ = load_tasks(run, chat, "data.val", run.data.val)
    player = build_player(run, chat, engine, judge, episodes)
    return _evaluator(run, dataset, player, judge, loop, PromptReader(chat) if run.env.is_enabled else None)


def _evaluator(
    run: Run, dataset: Dataset, player: AttemptPlayer, judge: Judge, loop: LoopThread, prompts: PromptReader | None
) -> Evaluator:
    sampling = run.evaluate.sampling.fill_from(run.sampling).params()
    return Evaluator(
        run.evaluate,
        sampling=sampling,
        seed=run.seed,
        dataset=dataset,
        player=player,
        judge=judge,
        loop=loop,
        prompts=prompts,
    )


def start_agents(
    run: Run,
    chat: ChatRenderer,
    engine: Any,
    judge: Judge,
    store: Journal,
    directory: Path,
    max_total_tokens: int,
    stack: ExitStack,
    loop: LoopThread,
    agent: Agent | None,
) -> AgentSource:
    """Start the agent services, and return the source that requests rollouts from agents."""
    from etude.store import check_serving_installed

    check_serving_installed()
    from etude.recipes.agents.services import agent_source

    services = agent_source(run, chat, engine, judge, store, directory, max_total_tokens, loop, agent)
    return stack.enter_context(services)


def _build_agent_scorer(
    run: Run, agents: AgentSource, prompts: PromptReader, judge: Judge, store: Journal, loop: LoopThread
) -> Evaluator | None:
    """Return the evaluator that scores the policy on `data.val` by agents; None without such tasks."""
    from etude.recipes.collect.agent_player import AgentPlayer
    from etude.recipes.run.resume import inputs

    if not run.data.val:
        return None
    dataset = load_agent_tasks(run, run.data.val)
    player = AgentPlayer(agents, store, inputs.evaluation_id(run.data.val, run.evaluate.score_settings(run.sampling)))
    return _evaluator(run, dataset, player, judge, loop, prompts)


def build_agent_evaluator(
    run: Run,
    chat: ChatRenderer,
    engine: Engine,
    judge: Judge,
    loop: LoopThread,
    max_total_tokens: int,
    stack: ExitStack,
) -> Evaluator | None:
    """Return an evaluator by agents for a model that no run is training now, with its own runners on this machine.

    Its rollouts go to a temporary journal, and not to the run's own.
    """
    directory = Path(stack.enter_context(TemporaryDirectory(prefix="etude-")))
    store = stack.enter_context(closing(open_store()))
    overrides = {"store": None, "listen": "127.0.0.1:0", "runners": run.agent.runners or 1}
    run = run.model_copy(update={"agent": run.agent.model_copy(update=overrides)})
    agents = start_agents(run, chat, engine, judge, store, directory, max_total_tokens, stack, loop, None)
    return _build_agent_scorer(run, agents, PromptReader(chat), judge, store, loop)
