"""The base of the searches for a prompt: what is served, what is stored, and the score of a prompt.

prompt ─► resource of the rollouts ─► the agent reads it ─► rewards ─► score
                                                              │
           next prompt ◄─ writer ◄─ description of rollouts ◄─┘
"""

from __future__ import annotations

import hashlib
import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.text import Text

from etude.agents.agent import Agent
from etude.data import Dataset
from etude.data.files import row_to_json
from etude.errors import ConfigError, RunError
from etude.launch import Tasks
from etude.observe import make_console
from etude.prompts.scoring import PromptScore, describe_rollout
from etude.prompts.search_log import SearchLog
from etude.prompts.writer import SERVED, Ask, Writer, open_writer
from etude.recipes.collect.rollouts import PlayedRollout
from etude.recipes.run.directory import lock_directory
from etude.recipes.served_model import ServedModel
from etude.trainer import Algorithm

BEST_FILE = "prompt.txt"
"""The best prompt, in the directory of a search."""
Purpose = Literal["train", "val"]


@dataclass(frozen=True)
class FoundPrompt:
    """The best prompt of a search."""

    text: str
    score: float
    """Its mean reward on all held-out tasks."""
    first_score: float | None
    """The score of the prompt with which the search began; None if more than half of its rollouts failed."""


@dataclass(eq=False)
class PromptTrial:
    """The means of one search: the served model, its tasks, the writer, and the log of results.

    A result is found again by its place in the search and by what it follows from. A call of the writer that failed is
    no result. A search that starts again makes it once more, and may then go another way.
    """

    served: ServedModel
    train: Dataset
    val: Dataset
    name: str
    ask: Ask
    log: SearchLog
    console: Console

    async def play(self, prompt: str, tasks: Dataset, rows: Sequence[int], use: Purpose = "val") -> list[PlayedRollout]:
        """Play tasks with a prompt."""
        return await self.served.play_rows(tasks, rows, {self.name: prompt}, use)

    async def score(self, prompt: str, rows: Sequence[int]) -> PromptScore:
        """Return the score of a prompt on rows of the held-out tasks. A score that is known is not computed again."""
        name = f"score of {_digest(prompt)} on {_digest(list(rows))}"
        result = self.log.find(name)
        if result is None:
            score = PromptScore.of(await self.play(prompt, self.val, rows))
            result = {"prompt": prompt, "rows": list(rows), **asdict(score)}
            self.log.add(name, result)
        return PromptScore(**{field: result[field] for field in PromptScore.__dataclass_fields__})

    async def describe(self, name: str, prompt: str, rows: Sequence[int]) -> str:
        """Play tasks for training with a prompt, and describe what happened. name: the place in the search."""
        name = f"{name} of {_digest(prompt)}"
        result = self.log.find(name)
        if result is None:
            played = await self.play(prompt, self.train, rows, "train")
            tokenizer = self.served.chat.tokenizer
            descriptions = [
                describe_rollout(self.train.task(row, row), rollout, tokenizer)
                for row, rollout in zip(rows, played, strict=True)
            ]
            result = {"prompt": prompt, "description": "\n\n".join(descriptions), "rollouts": len(played)}
            self.log.add(name, result)
        return str(result["description"])

    async def write(self, name: str, message: str) -> str:
        """Return the writer's answer to a message. name: the place in the search."""
        key = f"{name}, to {_digest(message)}"
        result = self.log.find(key)
        if result is None:
            result = {"text": await self.ask(message, name)}
            self.log.add(key, result)
        return str(result["text"])

    def tell(self, line: str) -> None:
        """Print a line."""
        self.console.print(Text(line), soft_wrap=True)


@dataclass
class PromptSearch(Algorithm):
    """A search for a better prompt of an agent, which reads it as `resources["prompt"]`. No weights are trained."""

    prompt: str
    """The prompt with which the search begins."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of a run by their names, with `model.path`."""
    writer: str | Writer = SERVED
    """The model that writes prompts: `served`, a name of `agent.external`, or a function of a message."""
    directory: Path | str | None = None
    """The directory of the results and the rollouts. A search that was stopped continues in it. None stores nothing."""
    name: str = "prompt"
    """The name of the resource."""
    seed: int = 0
    best: FoundPrompt | None = field(default=None, init=False)
    """The best prompt, after the search."""

    def run(self, train: Tasks | None, val: Tasks | None) -> dict[str, float]:
        """Search, and return the score of the best prompt and of the first one, and the number of rollouts.

        val: the tasks that prompts are scored on; None is those of `train`.
        """
        if train is None:
            raise ConfigError("There is nothing to play: give tasks, `trainer.fit(agent, train=tasks)`.")
        if self.context is not None:
            check_agent(self.context.agent)
        with ExitStack() as stack:
            directory = None if self.directory is None else Path(self.directory)
            if directory is not None:
                stack.enter_context(lock_directory(directory))
            served = stack.enter_context(self.serving(self.options, directory))
            return self.search(served, train, val, directory)

    def search(self, served: ServedModel, train: Tasks, val: Tasks | None, directory: Path | None) -> dict[str, float]:
        """Do the same with a model that is served already."""
        played = served.load(train)
        scored = played if val is None else served.load(val)
        ask = open_writer(self.writer, served)
        with SearchLog(directory, self._settings(served, played, scored)) as log:
            console = make_console(served.run.observe.console)
            trial = PromptTrial(served, played, scored, self.name, ask, log, console)
            if len(log):
                trial.tell(f"The search continues after {len(log)} results in {directory}.")
            self.best = self.find(trial)
        if directory is not None:
            write_best(directory, self.best.text)
        first = {} if self.best.first_score is None else {"first_score": self.best.first_score}
        return {"score": self.best.score, **first, "rollouts": float(log.rollouts)}

    def check_counts(self, *names: str) -> None:
        """Refuse fields that are no whole numbers, 1 or more."""
        for name in names:
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} is {value!r}; it is a whole number, 1 or more.")

    @abstractmethod
    def find(self, trial: PromptTrial) -> FoundPrompt:
        """Return the best prompt that the search finds."""

    @property
    @abstractmethod
    def settings(self) -> Mapping[str, Any]:
        """The settings of the algorithm that a search which continues must have again."""

    def _settings(self, served: ServedModel, train: Dataset, val: Dataset) -> dict[str, Any]:
        run = served.run
        settings = {"algorithm": type(self).__name__, "prompt": self.prompt, "name": self.name, "seed": self.seed}
        writer = self.writer if isinstance(self.writer, str) else "a function"
        tasks = {"number of tasks": len(train), "number of held-out tasks": len(val)}
        contents = {"digest of the tasks": _digest_rows(train), "digest of the held-out tasks": _digest_rows(val)}
        score = run.evaluate.score_settings(run.sampling)["sampling"]
        sampled = {f"sampling.{name}": value for name, value in run.sampling.model_dump(mode="json").items()}
        scored = {f"evaluate.sampling.{name}": value for name, value in score.items()}
        own = {**settings, "writer": writer, "model": str(run.model.path), **tasks, **self.settings}
        return {**own, **contents, **sampled, **scored}


def check_agent(agent: Agent) -> None:
    """Refuse an agent that cannot read the prompt: every prompt would have the same score."""
    if not any({"resources", "claim"}.intersection(member.call_signature().parameters) for member in agent.members()):
        raise ConfigError(
            f"The agent {agent.title} has no parameter `resources`, so it cannot read the prompt. Add it, and read the "
            "prompt from it by its name."
        )


def write_best(directory: Path, prompt: str) -> None:
    """Write the best prompt into the directory of a search."""
    draft = directory / f".{BEST_FILE}"
    draft.write_text(prompt, encoding="utf-8")
    draft.replace(directory / BEST_FILE)


def require_score(score: PromptScore, what: str) -> float:
    """Return the score; raise if more than half of a prompt's rollouts failed."""
    if score.value is None:
        raise RunError(
            f"{score.failed} of {score.rollouts} rollouts of {what} failed, so it has no score. The last one: "
            f"{score.failure.rstrip('.')}. Correct the agent: it must read the prompt as `resources`."
        )
    return score.value


def _digest_rows(tasks: Dataset) -> str:
    return _digest([row_to_json(tasks.row(row), tasks.location(row)) for row in range(len(tasks))])


def _digest(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=6).hexdigest()
