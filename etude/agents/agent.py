"""Agents: a function that plays one attempt at a task, or a class with a set-up around it.

    @etude.agent
    def guess(task, llm):                   # the parameters' names select the arguments
        text = llm.client.completions.create(model=llm.model, prompt=task["question"]).choices[0].text
        return {"right": float(text == task["answer"])}

    class Searcher(etude.Agent):            # for resources that are loaded once, not per attempt
        def setup(self): self.index = load_index()
        async def run(self, task, llm): …
        def teardown(self): self.index.close()

A coroutine runs on the runner's event loop, beside others. A function runs on its own thread. The return value is the
final reward: a number, or named parts that are added up. It is None if `etude.emit` gave the reward, or if a judge
will.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, overload
from weakref import WeakKeyDictionary

from etude.agents import load_openai_clients
from etude.config.plugin import is_file_module, load_object
from etude.errors import AgentError
from etude.lazy import LazyModule
from etude.records import Task
from etude.store.queue.rollout_queue import Claim, RolloutPurpose

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI

    from etude.agents import environment_agent
else:
    environment_agent = LazyModule("etude.agents.environment_agent")

AGENT_PARAMETERS = ("task", "llm", "rollout", "resources")
"""The parameters that an agent may have, by name."""
UNIMPORTABLE_PREFIX = "given by a program:"
"""The prefix of the name of a run's agent that no other process can import."""
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class RolloutInfo(NamedTuple):
    """The attempt that the agent plays."""

    id: int
    """The rollout's id."""
    attempt: int
    """0 for the first attempt; a rollout that failed may get further ones."""
    use: RolloutPurpose
    """`train` or `val`."""


@dataclass(frozen=True, slots=True)
class LLM:
    """The address of the model that is trained, and the key of this attempt."""

    base_url: str
    """In the form that OpenAI's clients take; Anthropic's clients take it without `/v1`."""
    api_key: str = field(repr=False)
    """Valid for this attempt only."""
    model: str

    @property
    def client(self) -> OpenAI:
        """A ready client of the package openai."""
        return _client(self.base_url).with_options(api_key=self.api_key)

    @property
    def async_client(self) -> AsyncOpenAI:
        """Its asynchronous counterpart."""
        return _async_client(self.base_url).with_options(api_key=self.api_key)


@cache
def _client(base_url: str) -> OpenAI:
    """Return the client that all attempts share, with its connections."""
    return load_openai_clients()[0](base_url=base_url, api_key="none")


_async_clients: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, AsyncOpenAI]] = WeakKeyDictionary()


def _async_client(base_url: str) -> AsyncOpenAI:
    """Return the client that all attempts on the running loop share: connections belong to one loop."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        raise AgentError(
            "`llm.async_client` was used where no event loop runs. Use `llm.client` in a function that is not a "
            "coroutine."
        ) from None
    clients = _async_clients.setdefault(loop, {})
    if base_url not in clients:
        clients[base_url] = load_openai_clients()[1](base_url=base_url, api_key="none")
    return clients[base_url]


@dataclass(frozen=True, slots=True)
class CallSignature:
    """The arguments that an agent takes, and how it is called."""

    parameters: tuple[str, ...]
    is_async: bool
    """True if a call returns a coroutine."""


class Agent(ABC):
    """Code that plays attempts. Each runner has one instance; several calls of `run` may be active at once."""

    max_concurrency: ClassVar[int | None] = None
    """The most attempts that one runner plays at once; None leaves it to the runner."""
    timeout_s: ClassVar[float | None] = None
    """Seconds that an attempt may take, if its rollout does not allow less; None sets no limit."""
    grace_s: ClassVar[float] = 0.0
    """Seconds that a cancelled attempt has to end, in addition to the runner's own grace period."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG004
        """Create an agent; raise `AgentError` if its `run` takes an argument that does not exist."""
        self = super().__new__(cls)
        self.call_signature()
        return self

    def setup(self) -> Any:  # noqa: B027
        """Prepare the agent, once, before the first attempt. A function or a coroutine."""

    @abstractmethod
    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Play one attempt. A function or a coroutine; its parameters are among `AGENT_PARAMETERS`."""

    def teardown(self) -> Any:  # noqa: B027
        """Release the agent's resources, once, after the last attempt. A function or a coroutine."""

    @property
    def title(self) -> str:
        """The agent's name in messages."""
        return type(self).__name__

    def call_signature(self) -> CallSignature:
        """Return the arguments that `run` takes."""
        return read_signature(self.run, f"{self.title}.run")

    def namespace(self) -> Mapping[str, Any]:
        """Return the names of the file that the agent is written in, in which its hooks are."""
        names: Mapping[str, Any] = getattr(type(self).run, "__globals__", {})
        return names

    def members(self) -> Sequence[Agent]:
        """Return the agents that play its attempts: itself, or those of data sources."""
        return [self]

    def of_task(self, task: Task) -> Agent:  # noqa: ARG002
        """Return the member that plays a task."""
        return self


class FunctionAgent(Agent):
    """A function as an agent. It can still be called like the function."""

    def __new__(cls, *_: Any, **__: Any) -> FunctionAgent:
        return object.__new__(cls)  # __init__ reads the signature: the function is not known here

    def __init__(
        self, function: Callable[..., Any], *, max_concurrency: int | None = None, timeout_s: float | None = None
    ) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self._signature = read_signature(function, self.title)
        for name, value in (("max_concurrency", max_concurrency), ("timeout_s", timeout_s)):
            if value is not None and not value > 0:
                raise AgentError(f"The agent {self.title} has {name}={value!r}; it must be above 0, or None.")
        self.max_concurrency = max_concurrency  # type: ignore[misc]
        self.timeout_s = timeout_s  # type: ignore[misc]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __copy__(self) -> FunctionAgent:
        return self

    def __reduce__(self) -> tuple[Callable[[str], Agent], tuple[str]]:
        specs = (get_agent_spec(source) for source in (self, self._function))
        spec = next(filter(is_importable, specs), None)
        if spec is None:
            raise AgentError(
                f"The agent {self.title} cannot be sent to another process, which would not find it as "
                f"{self.__module__}:{self.__qualname__}. Define it by `@etude.agent` at the top level of a file."  # type: ignore[attr-defined]
            )
        return load_agent, (spec,)

    def run(self, **arguments: Any) -> Any:
        return self._function(**arguments)

    @property
    def title(self) -> str:
        return getattr(self._function, "__name__", repr(self._function))

    def call_signature(self) -> CallSignature:
        return self._signature

    def namespace(self) -> Mapping[str, Any]:
        names: Mapping[str, Any] = getattr(inspect.unwrap(self._function), "__globals__", {})
        return names


@overload
def agent(function: Callable[..., Any], /) -> FunctionAgent: ...


@overload
def agent(
    *, max_concurrency: int | None = None, timeout_s: float | None = None
) -> Callable[[Callable[..., Any]], FunctionAgent]: ...


def agent(
    function: Callable[..., Any] | None = None, /, *, max_concurrency: int | None = None, timeout_s: float | None = None
) -> FunctionAgent | Callable[[Callable[..., Any]], FunctionAgent]:
    """Make an agent of a function. It can still be called like the function.

    max_concurrency: the most attempts that one runner plays at once. timeout_s: seconds that an attempt may take, if
    its rollout does not allow less.
    """

    def decorate(function: Callable[..., Any]) -> FunctionAgent:
        return FunctionAgent(function, max_concurrency=max_concurrency, timeout_s=timeout_s)

    return decorate if function is None else decorate(function)


def read_signature(
    function: Callable[..., Any], title: str, allowed: tuple[str, ...] = AGENT_PARAMETERS
) -> CallSignature:
    """Return the arguments that a function takes. Raise `AgentError` for a parameter that no runner provides: one that
    is not among those allowed."""
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise AgentError(
            f"The agent {title} is a generator (it has `yield`), so a call would run nothing. Return the reward, and "
            "send intermediate rewards and events by `etude.emit`."
        )
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise AgentError(
            f"The parameters of the agent {title} cannot be read: {error}. Wrap it in a Python function."
        ) from error
    names = []
    for parameter in parameters:
        if parameter.kind in _VARIADIC or (parameter.name not in allowed and parameter.default is not parameter.empty):
            continue
        if parameter.name not in allowed:
            raise AgentError(
                f"The agent {title} takes `{parameter.name}`, which no runner provides. An agent's parameters are "
                f"among {', '.join(allowed[:-1])} and {allowed[-1]}. Rename it, or give it a default."
            )
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise AgentError(f"The agent {title} takes `{parameter.name}` by position only. Remove the `/` after it.")
        names.append(parameter.name)
    return CallSignature(tuple(names), inspect.iscoroutinefunction(function))


def get_llm(claim: Claim) -> LLM | None:
    """Return the model's address for an attempt; None if the claim has no endpoint."""
    endpoint: Mapping[str, Any] | None = claim.resources.get("endpoint")
    return None if endpoint is None else LLM(endpoint["base_url"], claim.model_key, endpoint["model"])


# -- agents by name ----------------------------------------------------------------------------------------------------


def as_agent(source: Any, title: str) -> Agent:
    """Return an agent from an instance, a class, or a function."""
    if isinstance(source, Agent):
        return source
    if isinstance(source, type):
        if environment_agent.is_environment(source):
            return environment_agent.EnvironmentAgent(source)
        if not issubclass(source, Agent):
            raise AgentError(
                f"{title} is a class that is neither an agent nor an environment. Derive it from etude.Agent, or give "
                "it `reset` and `step`."
            )
        try:
            instance: Agent = source()
        except TypeError as error:
            raise AgentError(f"{title} cannot be created without arguments ({error}). Name an instance.") from error
        return instance
    if callable(source):
        return FunctionAgent(source)
    raise AgentError(f"{title} is of type {type(source).__name__}. An agent is a function or an etude.Agent.")


def load_agent(spec: str) -> Agent:
    """Load the agent that `module:name` or `path/to/file.py:name` names."""
    if not is_importable(spec):
        raise AgentError(
            f"The agent{spec.removeprefix(UNIMPORTABLE_PREFIX)} was given to `etude.Trainer` by a program, and no "
            "other process can load it. Run that program again: its `fit`, with this run's `directory`, resumes the "
            "run. An agent at the top level of a file can be loaded by its name."
        )
    return as_agent(load_object(spec, "agent", "etude runner my_agent.py:agent"), f"The agent '{spec}'")


def get_agent_spec(source: Any) -> str:
    """Return the name by which a command finds an agent that a program gave. It is a file's path where possible, so
    that the agent is found from any directory. An agent that is not at the top level of a module gets a name that
    cannot be loaded: see `is_importable`."""
    definition = source if hasattr(source, "__qualname__") else type(source)
    for module in dict.fromkeys((definition.__module__, "__main__")):
        namespace = vars(sys.modules[module]) if module in sys.modules else {}
        name = next((name for name, value in namespace.items() if value is source), None)
        if name is not None and (location := locate_module(module)) is not None:
            return f"{location}:{name}"
    return f"{UNIMPORTABLE_PREFIX} {as_agent(source, 'The agent').title}"


def is_importable(spec: str) -> bool:
    """Return whether another process can load the agent of this name."""
    return not spec.startswith(UNIMPORTABLE_PREFIX)


def locate_module(module: str) -> Path | str | None:
    """Return the path or the name by which a command finds a module. A file outside of packages and installed code is
    found by its path, other modules by name."""
    file = Path(getattr(sys.modules.get(module), "__file__", None) or "")
    if module == "__main__":
        return file.absolute() if file.suffix == ".py" else None
    installed = {"site-packages", "dist-packages"} & set(file.parts)
    alone = not getattr(sys.modules[module], "__package__", "") and not installed
    return file.absolute() if file.suffix == ".py" and (alone or is_file_module(module)) else module
