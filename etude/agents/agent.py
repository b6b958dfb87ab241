"""What an agent is: a function that plays one attempt at a task, or a class with a set-up around it.

    @etude.agent
    def guess(task, llm):                   # what it is given is what its parameters name
        said = llm.client.completions.create(model=llm.model, prompt=task["question"]).choices[0].text
        return {"right": float(said == task["answer"])}

    class Searcher(etude.Agent):            # for what is worth having once and not for each attempt
        def setup(self): self.index = load_index()
        async def run(self, task, llm): …
        def teardown(self): self.index.close()

A coroutine runs on the runner's loop, beside others; a function runs on a thread of its own. What is returned is the
final reward: a number, named parts that are added up, or None where it was said by `etude.emit`, or is to be judged.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, overload
from weakref import WeakKeyDictionary

from etude.agents import load_openai_clients
from etude.config.plugin import is_file_module, load_object
from etude.errors import AgentError
from etude.store.rollout_queue import Claim, RolloutPurpose

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI

__all__ = [
    "AGENT_PARAMETERS",
    "LLM",
    "Agent",
    "CallSignature",
    "FunctionAgent",
    "RolloutInfo",
    "agent",
    "as_agent",
    "get_agent_spec",
    "get_llm",
    "is_importable",
    "load_agent",
    "locate_module",
]

AGENT_PARAMETERS = ("task", "llm", "rollout", "resources")
"""What an agent may ask for, by the names of its parameters."""
UNIMPORTABLE_PREFIX = "given by a program:"
"""How the agent of a run is called that no other process finds."""
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class RolloutInfo(NamedTuple):
    """Which attempt it is."""

    id: int
    """Of the rollout."""
    attempt: int
    """0 for the first try; a rollout that failed may be tried again."""
    use: RolloutPurpose
    """`train` or `val`."""


@dataclass(frozen=True, slots=True)
class LLM:
    """Where the model is that is trained, and how this attempt is let in."""

    base_url: str
    """As OpenAI's clients take it; Anthropic's take it without its `/v1`."""
    api_key: str = field(repr=False)
    """Good for this attempt alone."""
    model: str

    @property
    def client(self) -> OpenAI:
        """A client of the package openai, ready."""
        return _client(self.base_url).with_options(api_key=self.api_key)

    @property
    def async_client(self) -> AsyncOpenAI:
        """Its twin for coroutines."""
        return _async_client(self.base_url).with_options(api_key=self.api_key)


@cache
def _client(base_url: str) -> OpenAI:
    """One for all attempts, which share its connections."""
    return load_openai_clients()[0](base_url=base_url, api_key="none")


_async_clients: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, AsyncOpenAI]] = WeakKeyDictionary()


def _async_client(base_url: str) -> AsyncOpenAI:
    """One for all attempts on the loop that runs: connections belong to a loop."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        raise AgentError(
            "`llm.async_client` was asked for where no event loop runs; a function that is no coroutine has "
            "`llm.client`."
        ) from None
    clients = _async_clients.setdefault(loop, {})
    if base_url not in clients:
        clients[base_url] = load_openai_clients()[1](base_url=base_url, api_key="none")
    return clients[base_url]


@dataclass(frozen=True, slots=True)
class CallSignature:
    """What an agent is given, and how it is called."""

    parameters: tuple[str, ...]
    is_async: bool
    """Whether calling it makes a coroutine."""


class Agent(ABC):
    """What plays attempts. Each runner has one of its own; `run` may be under way several times at once."""

    max_concurrency: ClassVar[int | None] = None
    """How many attempts of it one runner plays at once; None leaves it to the runner."""
    timeout_s: ClassVar[float | None] = None
    """Seconds that an attempt may take, where its rollout does not allow less; None is without a limit of its own."""
    grace_s: ClassVar[float] = 0.0
    """Seconds that an attempt has to end once it is cancelled, beyond what its runner gives it."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG004
        """An agent, unless its `run` asks for what nobody gives."""
        self = super().__new__(cls)
        self.call_signature()
        return self

    def setup(self) -> Any:  # noqa: B027
        """Called once, before the first attempt; a function or a coroutine."""

    @abstractmethod
    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Play one attempt, given what its parameters name: see `AGENT_PARAMETERS`. A function or a coroutine."""

    def teardown(self) -> Any:  # noqa: B027
        """Called once, after the last attempt; a function or a coroutine."""

    @property
    def title(self) -> str:
        """How sentences name it."""
        return type(self).__name__

    def call_signature(self) -> CallSignature:
        """What `run` asks for."""
        return read_signature(self.run, f"{self.title}.run")


class FunctionAgent(Agent):
    """A function as an agent. Called, it is the function."""

    def __new__(cls, *_: Any, **__: Any) -> FunctionAgent:
        return object.__new__(cls)  # what it asks for is seen once it has its function

    def __init__(
        self, function: Callable[..., Any], *, max_concurrency: int | None = None, timeout_s: float | None = None
    ) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self._signature = read_signature(function, self.title)
        for name, value in (("max_concurrency", max_concurrency), ("timeout_s", timeout_s)):
            if value is not None and not value > 0:
                raise AgentError(f"The agent {self.title} has {name}={value!r}; it must be above 0, or None.")
        self.max_concurrency, self.timeout_s = max_concurrency, timeout_s  # type: ignore[misc]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __copy__(self) -> FunctionAgent:
        return self

    def __reduce__(self) -> tuple[Callable[[str], Agent], tuple[str]]:
        return load_agent, (_function_agent_spec(self),)

    def run(self, **arguments: Any) -> Any:
        return self._function(**arguments)

    @property
    def title(self) -> str:
        return getattr(self._function, "__name__", repr(self._function))

    def call_signature(self) -> CallSignature:
        return self._signature


@overload
def agent(function: Callable[..., Any], /) -> FunctionAgent: ...


@overload
def agent(
    *, max_concurrency: int | None = None, timeout_s: float | None = None
) -> Callable[[Callable[..., Any]], FunctionAgent]: ...


def agent(
    function: Callable[..., Any] | None = None, /, *, max_concurrency: int | None = None, timeout_s: float | None = None
) -> FunctionAgent | Callable[[Callable[..., Any]], FunctionAgent]:
    """Make an agent of a function. It can still be called like one.

    max_concurrency: how many attempts of it one runner plays at once. timeout_s: seconds that an attempt may take,
    where its rollout does not allow less.
    """

    def decorate(function: Callable[..., Any]) -> FunctionAgent:
        return FunctionAgent(function, max_concurrency=max_concurrency, timeout_s=timeout_s)

    return decorate if function is None else decorate(function)


def read_signature(function: Callable[..., Any], title: str) -> CallSignature:
    """What a function asks for by its parameters; `AgentError` where it asks for what nobody gives."""
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise AgentError(
            f"The agent {title} yields, so that calling it would run nothing. Return the reward; what is to be said on "
            "the way goes through `etude.emit`."
        )
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise AgentError(f"The agent {title} does not say what its parameters are: {error}.") from error
    names = []
    for parameter in parameters:
        if parameter.kind in _VARIADIC or (
            parameter.name not in AGENT_PARAMETERS and parameter.default is not parameter.empty
        ):
            continue
        if parameter.name not in AGENT_PARAMETERS:
            raise AgentError(
                f"The agent {title} takes `{parameter.name}`, which nobody gives: an agent is given "
                f"{', '.join(AGENT_PARAMETERS[:-1])} and {AGENT_PARAMETERS[-1]}, whichever it names. Rename it, or "
                "give it a default."
            )
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise AgentError(
                f"The agent {title} takes `{parameter.name}` by position alone; leave out the `/` behind it."
            )
        names.append(parameter.name)
    return CallSignature(tuple(names), inspect.iscoroutinefunction(function))


def get_llm(claim: Claim) -> LLM | None:
    """The model as an attempt reaches it; None where no endpoint is told of."""
    endpoint: Mapping[str, Any] | None = claim.resources.get("endpoint")
    return None if endpoint is None else LLM(endpoint["base_url"], claim.model_key, endpoint["model"])


# -- agents by name ----------------------------------------------------------------------------------------------------


def as_agent(source: Any, title: str) -> Agent:
    """An agent, whatever form it has: one that is made, a class of them, or a function."""
    if isinstance(source, Agent):
        return source
    if isinstance(source, type):
        if not issubclass(source, Agent):
            raise AgentError(f"{title} is a class, and none that is derived from etude.Agent. Derive it from that.")
        try:
            instance: Agent = source()
        except TypeError as error:
            raise AgentError(f"{title} cannot be made without arguments ({error}). Name one that is made.") from error
        return instance
    if callable(source):
        return FunctionAgent(source)
    raise AgentError(f"{title} is of type {type(source).__name__}; an agent is a function, or an etude.Agent.")


def load_agent(spec: str) -> Agent:
    """The agent that `module:name` or `path/to/file.py:name` names."""
    if not is_importable(spec):
        raise AgentError(
            f"The agent{spec.removeprefix(UNIMPORTABLE_PREFIX)} was given to `etude.Trainer` by a program, and no "
            "other process finds it. Run that program again: its `fit`, with this run's `directory`, goes on. An agent "
            "at the top level of a file is found by its name."
        )
    return as_agent(load_object(spec, "agent", "etude runner my_agent.py:agent"), f"The agent '{spec}'")


def _function_agent_spec(wrapped: FunctionAgent) -> str:
    """The name by which another process finds the agent of a function: `load_agent` takes it."""
    module, name = wrapped.__module__, wrapped.__qualname__  # type: ignore[attr-defined]
    location = locate_module(module) if module in sys.modules else module
    target: Any = sys.modules.get(module)
    for attribute in name.split("."):
        target = getattr(target, attribute, None)
    if location is None or target not in (wrapped, wrapped._function):
        reason = (
            "it was written at a prompt" if location is None else f"{module} has no such agent under the name {name}"
        )
        raise AgentError(
            f"The agent {wrapped.title} cannot be sent to another process, because {reason}. Define it by "
            "`@etude.agent` at the top level of a file."
        )
    return f"{location}:{name}"


def get_agent_spec(source: Any) -> str:
    """The name by which a command finds what a program has for an agent: its file where that can be, so that it is
    found from anywhere. What stands at no top level is told of, and not found: see `named`."""
    definition = source if hasattr(source, "__qualname__") else type(source)
    for module in dict.fromkeys((definition.__module__, "__main__")):
        namespace = vars(sys.modules[module]) if module in sys.modules else {}
        name = next((name for name, value in namespace.items() if value is source), None)
        if name is not None and (location := locate_module(module)) is not None:
            return f"{location}:{name}"
    return f"{UNIMPORTABLE_PREFIX} {as_agent(source, 'The agent').title}"


def is_importable(spec: str) -> bool:
    """Whether other processes find an agent that is called so."""
    return not spec.startswith(UNIMPORTABLE_PREFIX)


def locate_module(module: str) -> Path | str | None:
    """Where a command finds a module: a file that is of no package and not installed by its path, others by name."""
    if module == "__main__":
        return main_file()
    file = Path(getattr(sys.modules[module], "__file__", None) or "")
    installed = {"site-packages", "dist-packages"} & set(file.parts)
    alone = not getattr(sys.modules[module], "__package__", "") and not installed
    return file.absolute() if file.suffix == ".py" and (alone or is_file_module(module)) else module


def main_file() -> Path | None:
    """The file that this process was started with, if with one."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return Path(file).absolute() if file and Path(file).suffix == ".py" else None
