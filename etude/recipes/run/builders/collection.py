"""Builds what collects the rollouts of a run and scores its policy: by an engine, or by agents."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

from etude.chat import ChatRenderer, PromptReader
from etude.data import Dataset
from etude.recipes.collect.collector import Collector
from etude.recipes.collect.engine_runner import EngineRunner, engine_limits
from etude.recipes.collect.evaluation_player import EvaluationPlayer
from etude.recipes.collect.newest_version import newest_version
from etude.recipes.collect.player import AttemptPlayer, EnginePlayer
from etude.recipes.collect.requested import RequestedRollouts
from etude.recipes.collect.rollout_images import RolloutImages
from etude.recipes.collect.rollouts import PutSamples
from etude.recipes.collect.sampling import SamplingConfig
from etude.recipes.collect.statistics import CollectionWarnings
from etude.recipes.collect.step_groups import StepGroupsBuilder
from etude.recipes.evaluate import Evaluator
from etude.recipes.event_loop import LoopThread
from etude.recipes.run.builders.episodes import EpisodePlayers, build_episode_players
from etude.recipes.run.builders.tasks import TaskLoader
from etude.recipes.run.rules.sources import DataSources
from etude.records import SamplingParams
from etude.rewards import BySourceReward, Judge
from etude.store import Journal, open_store
from etude.store.queue.local_queue import LocalRolloutQueue, open_own_queue
from etude.store.queue.rollout_limits import RolloutPurpose

if TYPE_CHECKING:
    from etude.agents.agent import Agent
    from etude.agents.hubs.pool import HubPool
    from etude.recipes.agents.services import AgentServices
    from etude.recipes.run.config import Run
    from etude.store.queue.rollout_queue import RolloutQueue


def step_groups_builder(run: Run, warnings: CollectionWarnings) -> StepGroupsBuilder:
    """Return what builds the records of a run's rollouts, also when they are read from its journal."""
    return StepGroupsBuilder(
        run.collect,
        warnings,
        episodic=run.is_episodic,
        tempered=run.sampling.temperature != 1,
        greedy=run.has_greedy_baseline,
        tags=run.agent.tags,
        max_staleness=run.max_staleness,
        batch_columns=run.data.batch_columns,
    )


class RolloutParts(NamedTuple):
    """The parts of a run that make its rollouts."""

    collector: Collector
    evaluator: Evaluator | None
    """Scores the policy, if the run has tasks for that."""
    new_client: Callable[[], RolloutQueue] | None
    """Makes further clients of the rollout queue of agents."""


@dataclass(frozen=True)
class RolloutBuilder:
    """Builds what collects the rollouts of a run, and what scores its policy, with the engine that samples for both."""

    run: Run
    chat: ChatRenderer
    engine: Any
    """The engine that samples; agents need one that streams."""
    judge: Judge
    loop: LoopThread
    max_total_tokens: int
    """The most tokens of a rollout."""
    hubs: Mapping[str, HubPool]
    """The guests of each section of options that names a hub."""

    def build_parts(
        self,
        directory: Path,
        dataset: Dataset,
        store: Journal,
        keep: PutSamples,
        stack: ExitStack,
        agent: Agent | None,
    ) -> RolloutParts:
        """Return the collector of a run's rollouts, and the evaluator of its policy. keep: stores the samples of a
        step."""
        from etude.recipes.run.resume import inputs
        from etude.recipes.run.rules.group_size import min_group_size

        run = self.run
        code_changed = bool(inputs.RunInputs(directory, run).code_changed())
        new_client: Callable[[], RolloutQueue] | None = None
        if run.has_agents:
            requested, new_client = self.start_agents(directory, store, stack, agent, code_changed=code_changed)
            evaluator = self._build_evaluator(self._recorded(requested, directory, store))
        else:
            queue = stack.enter_context(open_own_queue(store))
            requested, scoring = self._request_from_engine(queue, store, code_changed=code_changed)
            recorded = self._recorded(requested, directory, store, scoring.start_scoring)
            evaluator = self._build_evaluator(recorded, scoring)
        warnings = CollectionWarnings(one_by_one=self.judge.one_by_one, pays=self.judge.has_reward)
        collector = Collector(
            requested,
            step_groups_builder(run, warnings),
            dataset=dataset,
            order=run.data.sampler.start(len(dataset), run.seed, dataset.sources),
            judge=self.judge,
            store=store,
            loop=self.loop,
            min_group_size=min_group_size(run.advantage, run.collect.group_size),
            code_changed=code_changed,
            last_step=run.steps,
            keep=keep,
        )
        return RolloutParts(stack.enter_context(closing(collector)), evaluator, new_client)

    def build_evaluator(self, stack: ExitStack) -> Evaluator | None:
        """Return the evaluator of a model that no run is training now; None without tasks to score it on.

        Agents get their own runners on this machine, and a temporary journal, not the run's own.
        """
        config = self.run.agent
        if not self.run.has_agents:
            sampling = self.run.evaluate.sampling.fill_from(self.run.sampling)
            images = RolloutImages(max_images=self.run.vision.max_images)
            return self._build_evaluator(self._build_player(self._build_episodes(), sampling, images))
        directory = Path(stack.enter_context(TemporaryDirectory(prefix="etude-")))
        store = stack.enter_context(closing(open_store()))
        overrides = {"store": None, "listen": "127.0.0.1:0", "runners": config.runners or 1}
        run = self.run.model_copy(update={"agent": config.model_copy(update=overrides)})
        here = replace(self, run=run)
        agents = here.start_agents(directory, store, stack, None)
        return here._build_evaluator(here._recorded(agents.requested, directory, store))

    def start_agents(
        self, directory: Path, store: Journal, stack: ExitStack, agent: Agent | None, *, code_changed: bool = False
    ) -> AgentServices:
        """Start the agent services, and return the rollouts that are requested from agents. code_changed: failures of
        the rollouts so far do not count."""
        from etude.store import check_serving_installed

        check_serving_installed()
        from etude.recipes.agents.environments import add_environments
        from etude.recipes.agents.services import agent_services

        if self.run.env.has_programs:
            agent = add_environments(agent, self.run, self.hubs)
        services = agent_services(
            self.run,
            self.chat,
            self.engine,
            self.judge,
            store,
            directory,
            self.max_total_tokens,
            self.loop,
            agent,
            tuple(self.hubs.values()),
            code_changed=code_changed,
        )
        return stack.enter_context(services)

    def _request_from_engine(
        self, queue: LocalRolloutQueue, store: Journal, *, code_changed: bool
    ) -> tuple[RequestedRollouts, EnginePlayer]:
        """Return the rollouts that are requested from the run's engine, and the player of those that are scored."""
        run = self.run
        episodes = self._build_episodes()
        images = RolloutImages(queue, run.vision.max_images)
        scored_with = run.evaluate.sampling.fill_from(run.sampling)
        scoring = self._build_player(episodes, scored_with, images)
        players: Mapping[RolloutPurpose, tuple[EnginePlayer, SamplingParams]] = {
            "train": (
                self._build_player(episodes, run.sampling, images),
                run.training_params(),
            ),
            "val": (scoring, scored_with.params()),
        }
        runner = EngineRunner(queue, players, run.seed)
        limits = engine_limits(run.collect.retries)
        return RequestedRollouts(queue, store, self.judge, runner, limits, code_changed=code_changed), scoring

    def _recorded(
        self,
        requested: RequestedRollouts,
        directory: Path,
        store: Journal,
        on_start: Callable[[int], None] = lambda _: None,
    ) -> EvaluationPlayer:
        """Return what makes the attempts of a run's evaluations in its journal. With other code of the agent, the
        environment or the reward it asks for other answers. on_start: called with each step that is scored."""
        from etude.recipes.run.resume import inputs

        run = self.run
        measured = inputs.evaluation_id(run.data.val, run.evaluate.score_settings(run.sampling))
        code = inputs.RunInputs(directory, run).hash_code()
        return EvaluationPlayer(requested, store, f"{measured} {sorted(code.items())}", on_start)

    def _build_evaluator(self, player: AttemptPlayer, unrecorded: AttemptPlayer | None = None) -> Evaluator | None:
        """Return the evaluator of the policy on `data.val`; None without such tasks. unrecorded: makes attempts that
        are not written to the run's journal."""
        run = self.run
        if not run.data.val:
            return None
        loader = TaskLoader(
            run.data,
            run.env,
            run.reward,
            self.chat,
            for_agents=run.has_agents,
            max_images=run.vision.max_images,
        )
        dataset, _ = loader.load("data.val", run.data.val)
        sources = DataSources("data.val", dataset.sources())
        if isinstance(run.reward, BySourceReward):
            sources.check_rewards(run.reward.sources)
        if not run.reward.scores_answers:
            sources.check_players(run.rewards_source)
        return Evaluator(
            run.evaluate,
            sampling=run.evaluate.sampling.fill_from(run.sampling).params(),
            seed=run.seed,
            dataset=dataset,
            player=player,
            judge=self.judge,
            loop=self.loop,
            prompts=PromptReader(self.chat) if run.is_episodic else None,
            unrecorded=unrecorded,
        )

    def _build_episodes(self) -> EpisodePlayers:
        return build_episode_players(self.run.env, self.max_total_tokens, self.chat, self.hubs)

    def _build_player(self, episodes: EpisodePlayers, sampling: SamplingConfig, images: RolloutImages) -> EnginePlayer:
        """Return the player of the run's attempts with its engine. sampling: has the lengths of answers."""
        run = self.run
        return EnginePlayer(
            render=self.chat.render_prompt,
            truncate=run.data.truncate,
            max_tokens_of=sampling.max_tokens_of,
            engine=self.engine,
            judge=self.judge,
            timeout=run.collect.timeout,
            max_concurrency=run.rollout.max_concurrency(run.ranks),
            episodes=episodes.default,
            episodes_of=episodes.of_sources,
            newest_version=newest_version(self.engine),
            images=images,
        )
