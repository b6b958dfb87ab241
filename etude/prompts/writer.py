"""The writer of a search: the model that criticizes a prompt and writes the next one.

A writer is the served model itself, a model of another provider, or a function of the program.
"""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from etude.agents.proxy.external import ExternalModel, external_models
from etude.config.env import read_api_key
from etude.errors import ConfigError, UnknownChoiceError
from etude.recipes.run.config import Run
from etude.recipes.served_model import ServedModel
from etude.rewards.judge_client import JudgeClient

SERVED = "served"
"""The name of the served model as a writer."""
MAX_CONCURRENCY = 8
"""The most calls to another provider at once."""
RETRIES = 4
"""The tries after the first one, of a call to another provider."""
TIMEOUT_S = 300.0
"""Seconds of one try."""
MAX_PROMPT_CHARACTERS = 20_000
PLACEHOLDER = re.compile(r"\{[A-Za-z_]\w*\}")
"""A place that the agent fills in, as by `prompt.format(question=…)`."""
TAGGED = re.compile(r"<prompt>(.*)</prompt>", re.DOTALL)

Writer = Callable[[str], str | Awaitable[str]]
"""A function, or a coroutine, that answers a message with a text."""
Ask = Callable[[str, str], Awaitable[str]]
"""Answers a message. The second text names the call: the served model samples with a seed that depends on it."""


class UnusablePromptError(Exception):
    """A text that cannot take the place of a prompt. The message is a sentence about it."""


def open_writer(writer: str | Writer, served: ServedModel) -> Ask:
    """Return the function that asks a writer: a function of the program, `served`, or a name of `agent.external`."""
    if callable(writer):
        return lambda message, _: _call(writer, message)
    model = find_writer(writer, served.run)
    return served.ask if model is None else _Provider(model.url, model.model or writer, model.api_key_env, writer).ask


def find_writer(writer: str, run: Run) -> ExternalModel | None:
    """Return the model of another provider that writes; None for the served model. Raise for an unknown name."""
    models = external_models(run.agent.external)
    if writer != SERVED and writer not in models:
        known = ", ".join([SERVED, *models])
        raise UnknownChoiceError(
            f"There is no writer '{writer}'. The writers are: {known}. Other names are models of `agent.external`."
        )
    return models.get(writer) if writer != SERVED else None


def read_prompt(text: str, old: str) -> str:
    """Return the prompt in a writer's answer; raise if it cannot take the place of the old one."""
    tagged = TAGGED.search(text)
    prompt = (tagged.group(1) if tagged else text).strip()
    if not prompt:
        raise UnusablePromptError("The writer's prompt is empty.")
    if len(prompt) > MAX_PROMPT_CHARACTERS:
        raise UnusablePromptError(
            f"The writer's prompt has {len(prompt)} characters; {MAX_PROMPT_CHARACTERS} are allowed."
        )
    if prompt == old.strip():
        raise UnusablePromptError("The writer repeated the prompt.")
    if lost := find_lost(prompt, old):
        raise UnusablePromptError(f"The writer's prompt lacks {', '.join(lost)}, which the agent fills in.")
    return prompt


def find_lost(prompt: str, old: str) -> list[str]:
    """Return the placeholders of the old prompt that the new one lacks."""
    return sorted(set(PLACEHOLDER.findall(old)) - set(PLACEHOLDER.findall(prompt)))


async def _call(writer: Writer, message: str) -> str:
    """Call a function of the program: a coroutine on this event loop, any other on a thread."""
    answered = await asyncio.to_thread(writer, message)
    text = await answered if inspect.isawaitable(answered) else answered
    if not isinstance(text, str):
        raise ConfigError(f"The writer returned {text!r}; it returns a text.")
    return text


@dataclass
class _Provider:
    """A model of another provider."""

    url: str
    model: str
    key_name: str | None
    name: str

    def __post_init__(self) -> None:
        key = read_api_key(self.key_name, f"the writer '{self.name}'")
        self._client = JudgeClient(self.url, key, MAX_CONCURRENCY, RETRIES, TIMEOUT_S, None, None)

    async def ask(self, message: str, _: str) -> str:
        """Answer a message."""
        body = {"model": self.model, "messages": [{"role": "user", "content": message}]}
        async with self._client.slot():
            return await self._client.complete(body, str)
