"""The options of an environment, for rollouts of more than one answer."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, JsonValue, field_validator

from etude.agents.hubs import AGENTS, parse_hub
from etude.agents.hubs.process import HubSpec
from etude.chat import Toolbox
from etude.config import Config, load_object
from etude.config.only_with import OnlyWith
from etude.config.resume_marks import MAY_CHANGE
from etude.errors import ConfigError, PluginError
from etude.recipes.collect.hub_python import hub_python

ONLY_WITH_HUB = OnlyWith("env.hub", bool, "is for the environment of a hub, and `env.hub` names none. Leave it out.")
NOT_WITH_AGENT = OnlyWith(
    "env.is_agent",
    lambda is_agent: not is_agent,
    "does nothing where the hub's own program plays: `agent.timeout` and `agent.max_concurrency` bound its attempts, "
    "and the hub has options of its own (`env.kwargs`). Leave it out.",
)


class EnvConfig(Config):
    """The environment of multi-turn rollouts: a class, tools that the model may call, or both. By default none."""

    path: str | None = Field(
        None,
        description="environment class for multi-turn rollouts, with `reset` and `step`: path/to/file.py:Name or "
        "module:Name",
    )
    kwargs: dict[str, JsonValue] = Field(
        default_factory=dict, description="arguments of that class, or options that the hub of `env.hub` reads, by name"
    )
    tools: tuple[str, ...] = Field(
        (), description="functions that the model may call: path/to/file.py:name or module:name"
    )
    sources: Annotated[tuple[str, ...], NOT_WITH_AGENT] = Field(
        (),
        description="data sources whose tasks are played in the environment or with the tools, in a mix; the tasks of "
        "others are answered once. Empty plays all",
    )
    hub: str | None = Field(
        None,
        description="environment of a hub, played by a process of its own: gymnasium:Blackjack-v1, "
        "trl:my_env.py:Factory or verifiers:my_taskset",
    )
    python: Annotated[Path | None, ONLY_WITH_HUB] = Field(
        None, description="Python that has the packages of `env.hub`; null is the hub's own, or this one"
    )
    workers: Annotated[int, MAY_CHANGE, ONLY_WITH_HUB] = Field(
        1, ge=1, description="processes that play `env.hub`; more use more cores, and as many times the memory"
    )
    memory_mb: Annotated[int | None, MAY_CHANGE, ONLY_WITH_HUB] = Field(
        None, ge=1, description="most megabytes of address space of each of those processes; null sets no limit"
    )
    max_turns: Annotated[int, NOT_WITH_AGENT] = Field(
        8,
        ge=1,
        description="most answers in a rollout; larger allows longer episodes, and a rollout that would continue is "
        "truncated",
    )
    max_tokens: Annotated[int | None, NOT_WITH_AGENT] = Field(
        None, ge=1, description="most tokens of a rollout, observations included; null is as many as fit"
    )
    timeout: Annotated[float, MAY_CHANGE, NOT_WITH_AGENT] = Field(
        60.0,
        gt=0,
        description="seconds that one step of the environment, or one tool call, may take; larger waits longer "
        "for slow ones",
    )
    max_concurrency: Annotated[int, MAY_CHANGE, NOT_WITH_AGENT] = Field(
        256, ge=1, description="most rollouts at a time; larger needs more environments at once, others wait"
    )

    @field_validator("tools", "sources", mode="before")
    @classmethod
    def _one_is_a_list(cls, given: Any) -> Any:
        """Accept one tool or source without brackets."""
        return (given,) if isinstance(given, str) else given

    @property
    def has_environment(self) -> bool:
        """True if there is an environment, which may give rewards."""
        return self.path is not None or self.hub is not None

    @property
    def is_agent(self) -> bool:
        """True if a program of `env.hub` calls the model, as an agent does."""
        return self.hub is not None and self.hub.partition(":")[0] in AGENTS

    @property
    def is_enabled(self) -> bool:
        """True if there is an environment or a tool, which the run plays."""
        return (self.has_environment or bool(self.tools)) and not self.is_agent

    def plays(self, source: str) -> bool:
        """Return True if the tasks of a data source are played, and not answered once."""
        return self.is_enabled and (not self.sources or source in self.sources)

    @property
    def title(self) -> str:
        """The name of the environment in messages."""
        return self.hub or self.path or ""

    @property
    def code(self) -> str:
        """The user's code that is the environment, `path/to/file.py:name` or `module:name`; empty if there is none."""
        is_own = self.hub is not None and self.hub.startswith("trl:")
        return self.hub.partition(":")[2] if self.hub is not None and is_own else self.path or ""

    def hub_spec(self) -> HubSpec | None:
        """Return what `env.hub` names; None without a hub."""
        if self.hub is None:
            return None
        name, what = parse_hub(self.hub)
        return HubSpec(name, what, self.python or hub_python(name), self.kwargs, self.max_turns, self.memory_mb)

    def prepare(self) -> None:
        """Refuse an environment or tools that could not be created when a rollout begins."""
        self.load_toolbox()
        if self.hub_spec() is not None and (self.path is not None or self.tools):
            other = "env.path" if self.path is not None else "env.tools"
            raise ConfigError(
                f"`env.hub={self.hub}` has an environment and its tools, and `{other}` names others: leave one out."
            )
        if self.path is None:
            return
        factory = self.load_factory()
        if isinstance(factory, type):
            missing = [name for name in ("reset", "step") if not callable(getattr(factory, name, None))]
            if missing:
                raise PluginError(
                    f"The environment '{self.path}' has no {' and no '.join(f'`{name}`' for name in missing)}. An "
                    "environment has two methods: reset(task) and step(answer), and each returns an Observation."
                )
        try:
            inspect.signature(factory).bind(**self.kwargs)
        except TypeError as error:
            raise PluginError(
                f"The environment '{self.path}' cannot be created with `env.kwargs` ({_listed(self.kwargs)}): "
                f"{error}. It takes {inspect.signature(factory)}."
            ) from error
        except ValueError:
            return  # its signature is unknown

    def load_factory(self) -> Callable[..., Any]:
        """Return the function or class that creates an environment."""
        assert self.path is not None
        factory = load_object(self.path, "environment", "env.path=my_game.py:Game")
        if not callable(factory):
            raise PluginError(f"The environment '{self.path}' is of type {type(factory).__name__}. Name a class.")
        return factory  # type: ignore[no-any-return]

    def load_toolbox(self) -> Toolbox | None:
        """Return the functions that the model may call, if any."""
        if not self.tools:
            return None
        tools = [load_object(path, "tool", "env.tools=[my_tools.py:search]") for path in self.tools]
        for path, tool in zip(self.tools, tools, strict=True):
            if not callable(tool):
                raise PluginError(f"The tool '{path}' is of type {type(tool).__name__}, which cannot be called.")
        return Toolbox(tools, self.timeout)


def _listed(kwargs: dict[str, JsonValue]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in kwargs.items()) or "none"
