"""Base classes for environments: `TextEnv` for text games, `ToolEnv` for tools that the model may call.

    class Guess(TextEnv):
        def begin(self) -> str:
            self.secret = self.rng.randrange(10)
            return "I think of a digit."

        def play(self, answer: str) -> Observation:
            return Observation("Wrong.", done=answer == str(self.secret), reward=float(answer == str(self.secret)))

No base class is required: an environment is any class with `reset` and `step` (`etude.protocols.Env`). A run uses one
with `env.path=my_game.py:Guess`.
"""

from __future__ import annotations

import json
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from etude.chat import Toolbox
from etude.chat.messages import content_text
from etude.images.addresses import from_data_url
from etude.images.decoding import open_image
from etude.protocols import Env, Observation
from etude.records import Message, Task, ToolCall

if TYPE_CHECKING:
    from PIL import Image
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["Env", "LanguageModelEnv", "Observation", "TextEnv", "ToolEnv", "read_image"]


def read_image(url: str) -> Image.Image:
    """Return an image of a task, which has it as a data URL: upright, in RGB, and of an animation the first frame."""
    return open_image(from_data_url(url))


class TextEnv(ABC):
    """A text game: `begin` returns the first observation, and `play` the observation after each answer."""

    task: Task
    """The task of this rollout."""
    rng: random.Random
    """Random numbers seeded by the task. The rollouts of a task see the same ones, and so does a resumed run."""

    def reset(self, task: Task) -> Observation:
        """Return the first observation."""
        self.task = task
        self.rng = random.Random(json.dumps([task.ordinal, task.source, dict(task.fields)], sort_keys=True))
        return _as_observation(self.begin())

    def step(self, answer: Message) -> Observation:
        """Return the observation after an answer."""
        text = content_text(answer.content)
        assert text is not None, "a model's answer is text"
        return _as_observation(self.play(text))

    def begin(self) -> str | Observation:
        """Return the first text or observation; an empty text stands for the task's prompt."""
        return ""

    @abstractmethod
    def play(self, answer: str) -> str | Observation:
        """Return the reply to an answer. A plain text is shown to the model, and the game continues."""


class ToolEnv:
    """Tools that the model may call. An answer without a call ends the rollout.

    The tools may be methods of a subclass, and share the state of the rollout:

        class Shop(ToolEnv):
            def __init__(self) -> None:
                super().__init__([self.search, self.buy])

    The calls of one answer run one after the other. With `parallel` they run at the same time, for tools without shared
    state. The model sees the error of a failed call, also of a call that took longer than `timeout` seconds.
    """

    task: Task
    """The task of this rollout."""

    def __init__(
        self, tools: Sequence[Callable[..., Any]] = (), *, timeout: float = 30.0, parallel: bool = False
    ) -> None:
        self.toolbox = Toolbox(tools, timeout, parallel=parallel)

    def reset(self, task: Task) -> Observation:
        """Return the tools. The empty content stands for the task's prompt."""
        self.task = task
        return Observation(tools=self.toolbox.schemas)

    async def step(self, answer: Message) -> Observation:
        """Return the results of the calls in an answer; without calls, the end of the rollout."""
        calls = self.calls(answer)
        if not calls:
            return self.final(answer)
        return Observation(self.format_results(await self.toolbox.run_calls(calls, self.task)))

    def calls(self, answer: Message) -> Sequence[ToolCall]:
        """Return the calls in an answer. Override it to parse another format than the chat template's."""
        return answer.tool_calls

    def format_results(self, results: Sequence[Message]) -> str | Sequence[Message]:
        """Return the results of the calls as the model sees them: `tool` messages. Override it to return text."""
        return results

    def final(self, answer: Message) -> Observation:  # noqa: ARG002
        """Return the observation after an answer without a call. Override it to add a reward, or to continue."""
        return Observation(done=True)


@dataclass
class LanguageModelEnv:
    """The model, the prompts and the reward of an `etude.PPOTrainer`."""

    tokenizer: PreTrainedTokenizerBase
    model: PreTrainedModel
    """The model to train, in place and in the dtype that it was loaded in."""
    prompts: Sequence[str | Sequence[Mapping[str, Any]] | Mapping[str, Any]] | None = None
    """Texts, conversations (lists of messages), or rows of a dataset. None: the model writes from an empty text."""
    reward: Callable[..., Any] | None = None
    """A function `f(prompt, answer)` or `f(answer)` that returns a number, or a reward of `etude.rewards`."""


def _as_observation(value: str | Observation) -> Observation:
    return Observation(value) if isinstance(value, str) else value
