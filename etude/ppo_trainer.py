"""`etude.PPOTrainer`: your own loop over collect, reward and optimize, with a model that is already loaded.

    config = RLConfig(algorithm="ppo", batch_size=32, learning_rate=5e-5, clip_epsilon=0.2)
    env = LanguageModelEnv(tokenizer, model, prompts=["2 + 2 ="], reward=lambda prompt, answer: float("4" in answer))
    trainer = PPOTrainer(config=config, env=env)
    for epoch in range(100):
        trajectories = trainer.collect_rollouts()
        rewards = trainer.compute_rewards(trajectories)
        trainer.optimize(trajectories, rewards)

The parts are those of `etude train`: the inference engine, the judge, the algorithm of a preset and the training
engine. Your program does the rest: steps, evaluation and checkpoints. There is no journal to resume from. The model is
trained in place; save it with its own `save_pretrained`.
"""

from __future__ import annotations

import asyncio
import inspect
import re
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from etude.chat import ChatConfig, Tokenizer
from etude.config.compose import compose
from etude.config.suggestions import suggest_name
from etude.data import Dataset
from etude.data.samples import build_samples
from etude.dispatch import LocalCrew
from etude.envs import LanguageModelEnv
from etude.errors import ConfigError, DataError, RewardError, UnknownChoiceError
from etude.launch import refuse_duplicates
from etude.models import Model
from etude.models.loading import copy_with_score_head, wrap_module
from etude.recipes.collect.rollouts import ScoredRollout
from etude.recipes.collect.sampling import derived_seed
from etude.recipes.event_loop import run_outside_event_loop
from etude.recipes.presets import PRESETS
from etude.recipes.run.builders import lengths
from etude.recipes.run.builders.auxiliary_models import build_policy_worker
from etude.recipes.run.config import Run
from etude.recipes.run.rules import checks
from etude.recipes.run.steps.components import Learners
from etude.recipes.servers.reward_models import load_reward_models
from etude.recipes.workers.policy_worker import PolicyWorker
from etude.records import Outcome, Rollout, Task, Turn
from etude.rewards import Judge, RewardFunction, Verdict
from etude.rollout import TorchEngine, TorchEngineConfig
from etude.running_time import EventLoop
from etude.train import FrozenModel
from etude.train.optim import PRECISIONS

DEFAULT_MAX_TOKENS = 64
"""The default length of an answer, in tokens: short, so that a first program is fast."""
SUPPORTED_OPTIONS = frozenset(
    ["advantage", "loss", "kl", "correction", "entropy", "overlong", "mask_truncated", "critic.warmup"]
) | {
    *("critic.loss", "critic.loss.clip", "critic.loss.reduction", "critic.train", "critic.train.learning_rate"),
    *("train", "rollout", "sampling", "judging", "steps", "mini_batches", "ppo_epochs", "seed", "collect.tasks"),
    "collect.group_size",
}
"""The options of a run that also have an effect here. A name without a dot covers all options below it."""
UNSUPPORTED_COLUMNS = frozenset({"greedy_reward", "anchor", "reward_parts"})
"""The columns that some algorithms need and the three calls cannot provide."""
DERIVED_OPTIONS = ("train.precision", "data.max_prompt_length")
"""Options that follow from the model and the prompts."""


@dataclass(frozen=True, kw_only=True)
class RLConfig:
    """The options of a `PPOTrainer`. Each field sets an option of `etude train`; None keeps the preset's value.

    A field without effect on the algorithm is refused, like its option.
    """

    algorithm: str = "ppo"
    """A preset: `ppo`, `grpo`, `dapo`, … (`etude.recipes.presets.PRESETS`)."""
    batch_size: int = 32
    """Prompts of a step; more give a less noisy gradient and take longer."""
    group_size: int | None = None
    """Answers for each prompt, compared with each other; more give better baselines and take longer."""
    learning_rate: float | None = None
    clip_epsilon: float | None = None
    """Clip range of the probability ratio to the old policy, around 1; larger allows larger policy changes."""
    mini_batches: int | None = None
    """Optimizer steps per pass over the answers of a step; from the second on the data is off-policy."""
    ppo_epochs: int | None = None
    """Passes over the answers of a step; more reuse the data, and are more off-policy."""
    max_tokens: int = DEFAULT_MAX_TOKENS
    """Longest answer, in tokens; more takes more memory and time."""
    temperature: float | None = None
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    """Other options of a run by their names: `{"kl": "reverse", "critic.warmup": 5}`."""

    RUN_OPTIONS: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "batch_size": ("collect.tasks",),
        "group_size": ("collect.group_size",),
        "learning_rate": ("train.learning_rate",),
        "clip_epsilon": ("loss.clip_low", "loss.clip_high"),
        "mini_batches": ("mini_batches",),
        "ppo_epochs": ("ppo_epochs",),
        "max_tokens": ("sampling.max_tokens",),
        "temperature": ("sampling.temperature",),
        "seed": ("seed",),
    }
    """The options that each field sets."""

    def __post_init__(self) -> None:
        """Check the options, and name the fields of this class in an error."""
        for option in DERIVED_OPTIONS:
            if option in self.options:
                raise ConfigError(f"`{option}` follows from the model and the prompts. Leave it out.")
        try:
            self.compose_run()
        except ConfigError as error:
            raise type(error)(self._translate_options(str(error))) from None

    def _translate_options(self, message: str) -> str:
        """Replace option names by the fields that set them. A field that sets two options gets one sentence."""
        for name, options in self.RUN_OPTIONS.items():
            for option in options:
                if option not in self.options:
                    message = re.sub(rf"(?<![\w.]){re.escape(option)}(?![\w.]*\w)", f"RLConfig.{name}", message)
        problems = list(dict.fromkeys(line for line in message.splitlines() if line.startswith("- ")))
        return problems[0].removeprefix("- ") if len(problems) == 1 else message

    def compose_run(self, **derived: Any) -> Run:
        """Return the run of this configuration. derived: the options that follow from the model."""
        if self.algorithm not in PRESETS:
            hint = suggest_name(self.algorithm, PRESETS)
            raise UnknownChoiceError(
                f"There is no algorithm '{self.algorithm}'.{hint} RLConfig(algorithm=…) is one of {', '.join(PRESETS)}."
            )
        for option in self.options:
            first = option.partition(".")[0]
            if first in Run.model_fields and not {option, first} & SUPPORTED_OPTIONS:
                raise ConfigError(
                    f"`{option}` has no effect in a PPOTrainer, which has no loop. Leave it out, or start "
                    f"the run with `etude train {option}=…`."
                )
        names = {option: name for name, options in self.RUN_OPTIONS.items() for option in options}
        given = {option: name for option, name in names.items() if getattr(self, name) != getattr(type(self), name)}
        refuse_duplicates({option: f"`{name}=…`" for option, name in given.items()}, self.options)
        values = {option: value for option, name in names.items() if (value := getattr(self, name)) is not None}
        return compose(Run, values={**values, **self.options, **derived}, preset=PRESETS[self.algorithm])


@dataclass(frozen=True, eq=False)
class Trajectories:
    """The sampled answers of a step: the groups of all prompts, one after the other."""

    tasks: Sequence[Task]
    """The task of each answer; the answers of a group repeat it."""
    turns: Sequence[Turn]
    """The token ids of each prompt and answer, with the log-probs of the answer."""
    version: int
    """The policy version that sampled them."""

    @property
    def prompts(self) -> list[Any]:
        """The prompt of each answer: text or messages. Without prompts it is the token that a text begins with."""
        return [task.fields["prompt"] for task in self.tasks]

    @property
    def answers(self) -> list[str]:
        """The text of each answer."""
        return [turn.completion.text for turn in self.turns]

    def __len__(self) -> int:
        return len(self.turns)


class PPOTrainer:
    """The three calls of a training step: `collect_rollouts`, `compute_rewards`, `optimize`.

    PPO is the most common name, and not the only algorithm: the trainer runs every preset that needs answers and one
    reward for each. It works in a notebook too, because a separate thread does the waiting. Call `close`, or use a
    `with` block, to end the engine and the threads before the program ends.
    """

    def __init__(self, config: RLConfig, env: LanguageModelEnv) -> None:
        self._exit_stack = ExitStack()
        self._tokenizer = _load_tokenizer(env.tokenizer, self._exit_stack)
        model = wrap_module(env.model)
        self._chat = ChatConfig().build_renderer(self._tokenizer)
        _check_prompts(env.prompts)
        bos_id = self._tokenizer.bos_id
        self._first_id = self._tokenizer.eos_ids[0] if bos_id is None else bos_id
        self._without_prompts = env.prompts is None
        prompts = [str(self._tokenizer.id_to_token(self._first_id))] if env.prompts is None else list(env.prompts)
        rows = [prompt if isinstance(prompt, Mapping) else {"prompt": prompt} for prompt in prompts]
        self._dataset = Dataset.load(rows)
        self._reward = env.reward
        longest = max(len(self._ids(self._dataset.task(row, row))) for row in range(len(self._dataset)))
        precision = next(name for name, dtype in PRECISIONS.items() if dtype == model.dtype)
        self.run = config.compose_run(**{"train.precision": precision, "data.max_prompt_length": longest})
        if self.run.uses_teacher:
            raise ConfigError("A teacher is a model directory: train on one with `etude train distillation`.")
        if self.run.required_columns() & UNSUPPORTED_COLUMNS:
            raise ConfigError(
                f"`{config.algorithm}` needs more than answers and one reward for each (greedy answers, rewards in "
                f"parts, or named states of an environment): run it with `etude train`."
            )
        checks.check_algorithm(self.run)
        lengths.check_context_length(self.run, model)
        self._order = self.run.data.sampler.start(len(self._dataset), self.run.seed, self._dataset.sources)
        self._device = model.device
        if not isinstance(self.run.rollout, TorchEngineConfig):
            raise ConfigError("A PPOTrainer samples within its own process: leave `rollout` at `embedded`.")
        engine = TorchEngine(model, self._tokenizer, self.run.rollout, records_routes=self.run.records_routes)
        self._engine = self._exit_stack.enter_context(closing(engine))
        crew = self._exit_stack.enter_context(closing(LocalCrew(_worker(self.run, model, self._engine))))
        run, columns = self.run, self.run.model_columns()
        self._learners = Learners(crew, columns, run.mini_batches, run.loss.split_unit, run.ess_floor)
        # One event loop for all calls: a reward's clients may belong to it.
        self._loop_runner = asyncio.Runner(loop_factory=EventLoop)
        self._exit_stack.callback(run_outside_event_loop, self._loop_runner.close)
        self._judge: Judge | None = None
        self._step = self._collected = 0
        weakref.finalize(self, self._exit_stack.close)

    def collect_rollouts(self) -> Trajectories:
        """Sample answers to the next prompts with the current policy."""
        first = self._collected * self.run.collect.tasks
        ordinals = range(first, first + self.run.collect.tasks)
        selected = [self._dataset.task(self._order.advance_to(ordinal), ordinal) for ordinal in ordinals]
        tasks = [task for task in selected for _ in range(self._group_size)]
        sampling = [
            self.run.training_params(derived_seed(self.run.seed, "train", task.ordinal, index % self._group_size, 0))
            for index, task in enumerate(tasks)
        ]
        self._collected += 1
        prompts = [self._ids(task) for task in tasks]
        completions = self._engine.generate_all(prompts, sampling)
        turns = [Turn(prompt, completion, 0) for prompt, completion in zip(prompts, completions, strict=True)]
        return Trajectories(tasks, turns, self._step)

    def compute_rewards(self, trajectories: Trajectories) -> NDArray[np.float64]:
        """Return the reward of each answer, from the environment's reward function. A failed reward raises."""
        if self._reward is None:
            raise ConfigError(
                "This LanguageModelEnv has no reward, so nothing can be learned. Pass one: "
                "LanguageModelEnv(tokenizer, model, reward=f), where f(prompt, answer), or f(answer), returns a number."
            )
        if self._judge is None:
            self._judge = self._exit_stack.enter_context(
                Judge(_wrap_reward(self._reward, self._device), self.run.judging)
            )
        pairs = zip(trajectories.tasks, trajectories.answers, strict=True)

        async def judge_all(judge: Judge) -> list[Verdict]:
            return await asyncio.gather(*(judge.judge(task, answer) for task, answer in pairs))

        scoring = judge_all(self._judge)
        verdicts = run_outside_event_loop(lambda: self._loop_runner.run(scoring))
        for verdict in verdicts:
            if verdict.outcome is not Outcome.SUCCEEDED:
                raise RewardError(verdict.error)
        return np.array([verdict.reward for verdict in verdicts])

    def optimize(self, trajectories: Trajectories, rewards: ArrayLike) -> dict[str, float]:
        """Train on the answers and their rewards, and return the metrics. Answers of an older policy version are
        refused."""
        values = np.asarray(rewards, dtype=np.float64)
        if values.shape != (len(trajectories),) or not np.isfinite(values).all():
            raise DataError(
                f"optimize needs one finite reward for each of the {len(trajectories)} trajectories; an array of shape "
                f"{values.shape} was given{'' if np.isfinite(values).all() else ', with values that are not finite'}."
            )
        if trajectories.version != self._step:
            raise DataError(
                f"These trajectories were sampled by version {trajectories.version} of the policy, which is at version "
                f"{self._step} now. Collect new ones before each call of optimize."
            )
        batch = self._learners.annotate(self._score(trajectories, values), self._step)
        batch = self._learners.estimate(batch, self._step + 1)
        metrics = self._learners.update(batch)
        self._step += 1
        publish = asyncio.to_thread(self._learners.crew.call, PolicyWorker.publish, self._step)
        metrics.merge(run_outside_event_loop(lambda: self._loop_runner.run(publish)))
        return metrics.reduce()

    def close(self) -> None:
        """Stop the engine and the threads. The model keeps its trained weights."""
        self._exit_stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    @property
    def _group_size(self) -> int:
        return self.run.collect.group_size

    def _ids(self, task: Task) -> NDArray[np.int32]:
        """Return the prompt's token ids; without prompts, the one token that begins a text."""
        if self._without_prompts:
            return np.array([self._first_id], dtype=np.int32)
        prompt: Any = task.fields["prompt"]
        return self._chat.prompt_ids(prompt)

    def _score(self, trajectories: Trajectories, rewards: NDArray[np.float64]) -> list[ScoredRollout]:
        scored: list[ScoredRollout] = []
        for index, (task, turn) in enumerate(zip(trajectories.tasks, trajectories.turns, strict=True)):
            id = self._step * len(trajectories) + index
            rollout = Rollout(
                id,
                task.ordinal,
                task.ordinal,
                float(rewards[index]),
                truncated=turn.completion.finish_reason == "length",
                source=task.source,
            )
            scored.append(ScoredRollout.from_samples(build_samples([turn], id), rollout))
        return scored


def _load_tokenizer(tokenizer: Any, stack: ExitStack) -> Tokenizer:
    """Convert a tokenizer of transformers to Etude's."""
    directory = Path(stack.enter_context(TemporaryDirectory()))
    tokenizer.save_pretrained(directory)
    if not (directory / "tokenizer.json").is_file():
        raise ConfigError(
            f"{type(tokenizer).__name__} writes no tokenizer.json: it is not a fast tokenizer. Load it with "
            f"`AutoTokenizer.from_pretrained(…, use_fast=True)`."
        )
    return Tokenizer.load(directory)


def _check_prompts(prompts: Any) -> None:
    if isinstance(prompts, str):
        raise ConfigError("The prompts of a LanguageModelEnv are a list, and one text was given: put it into a list.")
    if prompts is not None and len(prompts) == 0:
        raise ConfigError("The list of prompts is empty. Give some, or leave `prompts` out to begin from nothing.")


def _wrap_reward(reward: Any, device: torch.device) -> Any:
    """Return a reward as the judge calls it.

    A function of two parameters gets the prompt and the answer, a function of one parameter the answer. A function with
    the parameters of a run's reward function stays as it is. Parameters with defaults keep them.
    """
    if isinstance(reward, RewardFunction):
        return load_reward_models(reward, device)
    parameters = inspect.signature(reward).parameters
    if {"task", "data_source", "solution_str"} & set(parameters):
        return reward
    positional = [p for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p.name for p in positional if p.default is p.empty]
    keywords = [p.name for p in parameters.values() if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    if len(required) > 2 or keywords:
        raise ConfigError(
            f"The reward function takes ({', '.join(parameters)}), and it is called as f(prompt, answer), or f(answer)."
            f" Give the others a default, or take (task, answer): `task.fields` has every column of a prompt's row."
        )
    answer_only = len(required) == 1 or len(positional) == 1

    def score(task: Task, answer: str) -> Any:
        return reward(answer) if answer_only else reward(task.fields["prompt"], answer)

    async def score_async(task: Task, answer: str) -> Any:
        return await score(task, answer)

    wrapped = score_async if inspect.iscoroutinefunction(reward) else score
    wrapped.__qualname__ = getattr(reward, "__qualname__", type(reward).__qualname__)  # errors use this name
    return wrapped


def _worker(run: Run, model: Model, engine: TorchEngine) -> PolicyWorker:
    """Build the worker that trains the policy. The reference and the critic begin as copies of the model."""
    reference = critic = None
    if run.uses_reference:
        reference = FrozenModel(
            model.copy(), run.train.max_tokens_per_micro_batch, temperature=run.sampling.temperature
        )
    if run.uses_critic:
        critic = copy_with_score_head(model, model.dtype)
        trained = run.critic.train.model_copy(update={"precision": run.train.precision})
        run = run.model_copy(update={"critic": run.critic.model_copy(update={"train": trained})})
    return build_policy_worker(run, model, engine, reference=reference, critic=critic)
