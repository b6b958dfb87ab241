"""An environment as an agent: runners play it, on any machine, by calls of the model endpoint.

    etude train … agent.path=my_game.py:Game          # instead of env.path: the run's own runners play it
    etude runner my_game.py:Game --url http://…       # and so do those of other machines

The class is that of `env.path`: anything with `reset` and `step` (`etude.protocols.Env`). What differs is who plays it.
The model's answers come over HTTP. The class may say by `max_turns` how many answers there are at most. A method that
is no coroutine is called on a thread that only this rollout uses.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from hashlib import blake2b
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

from etude.agents.agent import LLM, Agent, CallSignature, RolloutInfo, get_agent_spec, load_agent
from etude.agents.emit import reward as emit_reward
from etude.chat import CallThread
from etude.chat.messages import message_from_dict, message_to_dict
from etude.chat.transcript import ObservationContent, check_observation, observation_text
from etude.errors import AgentError
from etude.lazy import LazyModule
from etude.protocols import Env, Observation
from etude.records import Message, Outcome, Task
from etude.store.queue.rollout_queue import AttemptReport

if TYPE_CHECKING:
    import openai
else:
    openai = LazyModule("openai")

MAX_TURNS = 64
"""The most answers of a rollout whose environment does not say it by `max_turns`."""
TOO_LONG = "context_length_exceeded"
"""The code of the endpoint's error for a prompt that leaves no room for an answer."""


class EnvironmentAgent(Agent):
    """Plays the environments that a class makes, one for each attempt."""

    def __init__(
        self,
        factory: Callable[..., Env],
        arguments: Mapping[str, Any] = MappingProxyType({}),
        *,
        name: str = "",
        max_turns: int | None = None,
    ) -> None:
        """factory: a class with `reset` and `step`, or what else makes an environment, with these arguments. name: for
        messages, by default that of the class. max_turns: the most answers of a rollout; None leaves it to the
        class."""
        self._factory = factory
        self._arguments = arguments
        self._name = name = name or factory.__name__
        most = getattr(factory, "max_turns", MAX_TURNS) if max_turns is None else max_turns
        if not isinstance(most, int) or most < 1:
            raise AgentError(f"The environment {name} has max_turns={most!r}; it must be a number, 1 or more.")
        self._max_turns = most

    def __copy__(self) -> Self:
        return self  # all of a rollout is in its call

    def __reduce__(self) -> tuple[Callable[[str], Agent], tuple[str]]:
        return load_agent, (get_agent_spec(self._factory),)

    @property
    def title(self) -> str:
        return self._name

    def call_signature(self) -> CallSignature:
        return CallSignature(("task", "llm", "rollout"), True)

    def namespace(self) -> Mapping[str, Any]:
        names: Mapping[str, Any] = getattr(getattr(self._factory, "reset", None), "__globals__", {})
        return names

    async def run(self, task: Task, llm: LLM, rollout: RolloutInfo) -> AttemptReport:
        """Play one rollout, from `reset` to its end."""
        row = task.fields.get("row")
        if rollout.use == "val" and isinstance(row, int):  # the random numbers of a game are the same at any step
            task = replace(task, ordinal=row)
        with CallThread("etude-env") as thread:

            async def call(function: Callable[..., Any], *args: Any, **named: Any) -> Any:
                if inspect.iscoroutinefunction(function):
                    return await function(*args, **named)
                result = await thread.call(function, *args, **named)
                return await result if inspect.isawaitable(result) else result

            env = await call(self._factory, **self._arguments)
            try:
                first = self._checked(await call(env.reset, task))
                conversation = _Conversation(llm, first, first.content or task["prompt"])
                truncated = await self._play_turns(call, env, conversation)
            finally:
                if callable(close := getattr(env, "close", None)):
                    await call(close)
        return AttemptReport(Outcome.SUCCEEDED, truncated=truncated, role=first.role)

    async def _play_turns(self, call: Callable[..., Any], env: Env, conversation: _Conversation) -> bool:
        """Play turn after turn; return whether a limit ended the rollout, and not the environment.

        Each turn has the reward of its answer, 0 if the environment gave none. The run's `reward` may judge the last
        answer in addition.
        """
        for turn in range(self._max_turns):
            answer = await conversation.next_answer()
            if answer is None:
                if turn == 0:
                    raise AgentError(f"The first prompt of {self._name} leaves no room for an answer. Show less.")
                break
            observation = self._checked(await call(env.step, answer))
            emit_reward(0.0 if observation.reward is None else observation.reward, turn=turn)
            if observation.done or observation.truncated:
                return observation.truncated or conversation.was_cut_off
            conversation.show(observation)
        return True

    def _checked(self, value: Any) -> Observation:
        if not isinstance(value, Observation):
            raise AgentError(f"The environment {self._name} returned {type(value).__name__}; it returns Observations.")
        if value.opponent is not None:
            raise AgentError(
                f"The environment {self._name} leaves a turn of another player to the policy. An agent cannot play it, "
                "as each of its calls is trained. Name it by `env.path` or `env.hub`, in a run without agents."
            )
        return value


class _Conversation:
    """The text or the messages that the model has read and written. The first observation decides which."""

    def __init__(self, llm: LLM, first: Observation, content: Any) -> None:
        self._llm = llm
        self._tools = [dict(tool) for tool in first.tools]
        self._text = ""
        self._messages: list[dict[str, Any]] = []
        self.was_cut_off = False
        """True if the last answer reached its length limit."""
        checked = check_observation(content)
        self._is_text = isinstance(checked, str)
        self._add(checked, first.anchor)

    async def next_answer(self) -> Message | None:
        """Return the model's next answer; None if there is no room for one."""
        headers = {"x-etude-state": self._state}
        client = self._llm.async_client
        try:
            if self._is_text:
                completion = await client.completions.create(
                    model=self._llm.model, prompt=self._text, max_tokens=None, extra_headers=headers
                )
                self.was_cut_off = completion.choices[0].finish_reason == "length"
                self._text += completion.choices[0].text
                return Message("assistant", completion.choices[0].text)
            tools: Mapping[str, Any] = {"tools": self._tools} if self._tools else {}
            request: Any = {"model": self._llm.model, "messages": self._messages, **tools}
            reply = await client.chat.completions.create(**request, extra_headers=headers)
        except openai.BadRequestError as error:
            if error.code == TOO_LONG:
                return None
            raise
        answered = reply.choices[0].message.model_dump(exclude_none=True)
        self.was_cut_off = reply.choices[0].finish_reason == "length"
        self._messages.append(answered)
        return message_from_dict(answered)

    def show(self, observation: Observation) -> None:
        """Add an observation for the model to read."""
        self._add(check_observation(observation.content), observation.anchor)

    def _add(self, content: ObservationContent, anchor: str | None) -> None:
        self._state = _state_name(anchor, observation_text(content))
        if self._is_text:
            if not isinstance(content, str):
                raise AgentError("An environment that began with text shows messages. Show text, or begin with them.")
            self._text += content
        elif isinstance(content, str):
            self._messages.append({"role": "user", "content": content})
        else:
            self._messages += [
                message_to_dict(message, parts=True, arguments_as_text=True, addresses=True) for message in content
            ]


def _state_name(anchor: str | None, shown: str) -> str:
    """Return the name of the state in which the next answer is given, as a header takes it."""
    text = f"named {anchor}" if anchor is not None else f"shown {shown}"
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def is_environment(source: Any) -> bool:
    """Return whether a class is an environment: it has `reset` and `step`, and is no agent."""
    return (
        isinstance(source, type)
        and not issubclass(source, Agent)
        and all(callable(getattr(source, name, None)) for name in ("reset", "step"))
    )
