"""Environments in a few lines: a base class for games of text, and one for functions that the model may call.

    class Guess(TextEnv):
        def begin(self) -> str:
            self.secret = self.rng.randrange(10)
            return "I think of a digit."

        def play(self, answer: str) -> Observation:
            return Observation("Wrong.", done=answer == str(self.secret), reward=float(answer == str(self.secret)))

Nobody has to derive from either: an environment is whatever has `reset` and `step` (`etude.protocols.Env`). A run plays
one with `env.path=my_game.py:Guess`.
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
from etude.protocols import Env, Observation
from etude.records import Message, Task, ToolCall

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["Env", "LanguageModelEnv", "Observation", "TextEnv", "ToolEnv"]


class TextEnv(ABC):
    """A game of text: it begins with something to show, and says what comes of each answer."""

    task: Task
    """What is tried."""
    rng: random.Random
    """Follows from the task, so that the tries at one task meet the same chance, and a resumed run meets it again."""

    def reset(self, task: Task) -> Observation:
        """What the model is shown first."""
        self.task = task
        self.rng = random.Random(json.dumps([task.ordinal, task.source, dict(task.fields)], sort_keys=True))
        return _as_observation(self.begin())

    def step(self, answer: Message) -> Observation:
        """What comes of an answer."""
        text = content_text(answer.content)
        assert text is not None, "what a model says is text"
        return _as_observation(self.play(text))

    def begin(self) -> str | Observation:
        """What the model is shown first; nothing stands for the task's own prompt."""
        return ""

    @abstractmethod
    def play(self, answer: str) -> str | Observation:
        """What comes of an answer. Text alone is shown, and the game goes on."""


class ToolEnv:
    """Functions that the model may call; an answer without a call is the last.

    They may be methods of a subclass, which share what a rollout has come to:

        class Shop(ToolEnv):
            def __init__(self) -> None:
                super().__init__([self.search, self.buy])

    The calls of one answer are made in their order, one after the other. Where nothing is shared, `parallel` makes them
    at once. Whatever goes wrong with a call is told to the model, also that it took longer than `timeout` seconds.
    """

    task: Task
    """What is tried."""

    def __init__(
        self, tools: Sequence[Callable[..., Any]] = (), *, timeout: float = 30.0, parallel: bool = False
    ) -> None:
        self.toolbox = Toolbox(tools, timeout, parallel=parallel)

    def reset(self, task: Task) -> Observation:
        """The task's own prompt, and what may be called."""
        self.task = task
        return Observation(tools=self.toolbox.schemas)

    async def step(self, answer: Message) -> Observation:
        """The results of the calls in an answer; or the end, where there are none."""
        calls = self.calls(answer)
        if not calls:
            return self.final(answer)
        return Observation(self.format_results(await self.toolbox.run_calls(calls, self.task)))

    def calls(self, answer: Message) -> Sequence[ToolCall]:
        """The calls in an answer. Override it to read another form than the chat template's."""
        return answer.tool_calls

    def format_results(self, results: Sequence[Message]) -> str | Sequence[Message]:
        """What the model is shown of the results of its calls: messages by `tool`. Override it to show text."""
        return results

    def final(self, answer: Message) -> Observation:  # noqa: ARG002
        """What comes of an answer without a call. Override it to pay for what was done, or to go on."""
        return Observation(done=True)


@dataclass
class LanguageModelEnv:
    """A model that writes, what it is asked, and what an answer is worth: what `etude.PPOTrainer` practises in."""

    tokenizer: PreTrainedTokenizerBase
    model: PreTrainedModel
    """Trained in place, in the dtype that it was loaded in."""
    prompts: Sequence[str | Sequence[Mapping[str, Any]] | Mapping[str, Any]] | None = None
    """Texts, conversations (lists of messages), or rows of a dataset; None has the model write from the beginning."""
    reward: Callable[..., Any] | None = None
    """`f(prompt, answer)` or `f(answer)` gives a number; or a reward of `etude.rewards`."""


def _as_observation(value: str | Observation) -> Observation:
    return Observation(value) if isinstance(value, str) else value
