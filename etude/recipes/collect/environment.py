"""The options of environments, for rollouts of more than one answer.

env.path=my_game.py:Game                                                        plays every task
env.sources.game.path=my_game.py:Game env.sources.search.tools=[my_tools.py:search]   tasks of these data sources
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, JsonValue, field_validator

from etude.agents.hubs import AGENTS, parse_hub
from etude.agents.hubs.process import HubSpec
from etude.chat import Toolbox
from etude.config import Config, load_object
from etude.config.only_with import OnlyWith
from etude.config.plugin import with_file
from etude.config.resume_marks import MAY_CHANGE
from etude.errors import ConfigError, PluginError
from etude.recipes.collect.hub_python import hub_python

ONLY_WITH_HUB = OnlyWith(".hub", bool, "is for the environment of a hub, and `{section}.hub` names none. Leave it out.")
WITH_TURNS = OnlyWith(
    ".counts_turns",
    bool,
    "does nothing where the hub's own program plays: `agent.timeout` and `agent.max_concurrency` bound its attempts, "
    "and the hub has options of its own (`{section}.kwargs`). Leave it out.",
)
NOT_WITH_PROGRAM = OnlyWith(
    "env.has_programs",
    lambda has_programs: not has_programs,
    "does nothing in a run where a hub's own program plays: agents make all its rollouts, and `agent.timeout` and "
    "`agent.max_concurrency` bound them. Leave it out.",
)
AS_IN_ENV = "null is as in `env`"


class EnvBase(Config):
    """The options that name an environment: a class, tools that the model may call, or both; or one of a hub."""

    path: str | None = Field(
        None,
        description="environment class for multi-turn rollouts, with `reset` and `step`: path/to/file.py:Name or "
        "module:Name",
    )
    kwargs: Annotated[
        dict[str, JsonValue],
        OnlyWith(
            ".gives_rewards",
            bool,
            "are for the class of `{section}.path` or the hub of `{section}.hub`, and neither is named. Leave them "
            "out.",
        ),
    ] = Field(
        default_factory=dict, description="arguments of that class, or options that the hub of `env.hub` reads, by name"
    )
    tools: tuple[str, ...] = Field(
        (), description="functions that the model may call: path/to/file.py:name or module:name"
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

    @field_validator("tools", mode="before")
    @classmethod
    def _one_is_a_list(cls, given: Any) -> Any:
        """Accept one tool without brackets."""
        return (given,) if isinstance(given, str) else given

    @property
    def gives_rewards(self) -> bool:
        """True if there is an environment, which may give rewards, and not tools only."""
        return self.path is not None or self.hub is not None

    @property
    def names_one(self) -> bool:
        """True if these options name an environment or a tool."""
        return self.gives_rewards or bool(self.tools)

    @property
    def is_agent(self) -> bool:
        """True if a program of the hub calls the model, as an agent does."""
        return self.hub is not None and self.hub.partition(":")[0] in AGENTS

    @property
    def title(self) -> str:
        """The name of the environment in messages."""
        return self.hub or self.path or ""

    @property
    def code(self) -> str:
        """The user's code that is the environment, `path/to/file.py:name` or `module:name`; empty if there is none."""
        is_own = self.hub is not None and self.hub.startswith("trl:")
        return self.hub.partition(":")[2] if self.hub is not None and is_own else self.path or ""

    def with_absolute_paths(self, absolute: Callable[[Path], Path]) -> Self:
        """Return the same options with absolute paths to their files."""

        def code(path: str) -> str:
            return with_file(path, absolute)

        def hub(named: str) -> str:
            name, _, what = named.partition(":")
            return f"{name}:{code(what)}" if name == "trl" else named

        return self.model_copy(
            update={
                "path": self.path and code(self.path),
                "tools": tuple(map(code, self.tools)),
                "hub": self.hub and hub(self.hub),
                "python": self.python and absolute(self.python),
            }
        )


class SourceEnvConfig(EnvBase):
    """The environment of one data source of a mix. The limits that it leaves out are those of `env`."""

    max_turns: Annotated[int | None, WITH_TURNS] = Field(
        None, ge=1, description=f"most answers in a rollout; {AS_IN_ENV}"
    )
    max_tokens: Annotated[int | None, NOT_WITH_PROGRAM] = Field(
        None, ge=1, description=f"most tokens of a rollout, observations included; {AS_IN_ENV}"
    )
    timeout: Annotated[float | None, MAY_CHANGE, NOT_WITH_PROGRAM] = Field(
        None, gt=0, description=f"seconds that one step of the environment, or one tool call, may take; {AS_IN_ENV}"
    )
    max_concurrency: Annotated[int | None, MAY_CHANGE, NOT_WITH_PROGRAM] = Field(
        None, ge=1, description=f"most rollouts of the source at a time; {AS_IN_ENV}"
    )

    @property
    def counts_turns(self) -> bool:
        """True if the run counts the turns of its rollouts, and not a program of the hub."""
        return not self.is_agent


class EnvConfig(EnvBase):
    """The environment of multi-turn rollouts, and those of data sources that have their own. By default none."""

    sources: Mapping[str, SourceEnvConfig] = Field(
        {},
        description="the environment of each data source in a mix, by its name: `env.sources.game.path=game.py:Game`. "
        "Tasks of others are played by `env` itself, if it names one, else answered once",
    )
    max_turns: Annotated[int, WITH_TURNS] = Field(
        8,
        ge=1,
        description="most answers in a rollout; larger allows longer episodes, and a rollout that would continue is "
        "truncated",
    )
    max_tokens: Annotated[int | None, NOT_WITH_PROGRAM] = Field(
        None, ge=1, description="most tokens of a rollout, observations included; null is as many as fit"
    )
    timeout: Annotated[float, MAY_CHANGE, NOT_WITH_PROGRAM] = Field(
        60.0,
        gt=0,
        description="seconds that one step of the environment, or one tool call, may take; larger waits longer "
        "for slow ones",
    )
    max_concurrency: Annotated[int, MAY_CHANGE, NOT_WITH_PROGRAM] = Field(
        256, ge=1, description="most rollouts at a time; larger needs more environments at once, others wait"
    )

    @field_validator("sources", mode="before")
    @classmethod
    def _is_a_mapping(cls, given: Any) -> Any:
        """Refuse a list of names: each data source has an environment of its own."""
        if given and isinstance(given, str | list | tuple):
            name = given if isinstance(given, str) else given[0]
            raise ConfigError(
                f"`env.sources` gives each data source its environment, and `{name}` is a name alone. Write "
                f"`env.sources.{name}.path=my_game.py:Game`, or `tools` or `hub` in its place. Other sources are "
                "answered once, unless `env` itself names an environment."
            )
        return given or {}

    @property
    def has_programs(self) -> bool:
        """True if a program of a hub calls the model, for all tasks or those of a data source. Agents make the rollouts
        of such a run, and play its other environments too."""
        return self.is_agent or any(section.is_agent for section in self.sources.values())

    @property
    def counts_turns(self) -> bool:
        """True if the run counts the turns of rollouts, of all tasks or of a data source."""
        return not self.is_agent or any(section.counts_turns for section in self.sources.values())

    @property
    def is_enabled(self) -> bool:
        """True if there is an environment or a tool, which the run plays by its own engine."""
        return (self.names_one or bool(self.sources)) and not self.has_programs

    @property
    def has_environment(self) -> bool:
        """True if there is an environment that may give rewards, of all tasks or of a data source."""
        return any(environment.options.gives_rewards for environment in self.environments())

    def own(self) -> Environment | None:
        """Return the environment of all tasks whose data source has none of its own, if there is one."""
        return Environment(self.model_copy(update={"sources": {}})) if self.names_one else None

    def of_source(self, source: str) -> Environment | None:
        """Return the environment that plays the tasks of a data source; None if they are answered once."""
        return self.of_sources().get(source, self.own())

    def of_sources(self) -> dict[str, Environment]:
        """Return the environments of the data sources that have their own."""
        found = {}
        for source, section in self.sources.items():
            given = dict(section)
            limits = {name: getattr(self, name) for name in LIMITS if given[name] is None}
            found[source] = Environment(EnvConfig(**given | limits), f"env.sources.{source}")
        return found

    def rewards_source(self, source: str) -> bool:
        """Return whether an environment that may give rewards plays the tasks of a data source."""
        environment = self.of_source(source)
        return environment is not None and environment.options.gives_rewards

    def environments(self) -> list[Environment]:
        """Return the environments of all tasks and of data sources."""
        own = self.own()
        return [*([] if own is None else [own]), *self.of_sources().values()]

    @property
    def max_played_turns(self) -> int:
        """The most answers of a rollout that the run plays; 0 without an environment or a tool."""
        played = self.environments() if self.is_enabled else []
        return max((environment.options.max_turns for environment in played), default=0)

    def longest_rollout(self, room: int) -> int:
        """Return the most tokens of a rollout of several turns. room: the most that fit."""
        return max(min(environment.options.max_tokens or room, room) for environment in self.environments())

    def with_absolute_paths(self, absolute: Callable[[Path], Path]) -> Self:
        sources = {name: section.with_absolute_paths(absolute) for name, section in self.sources.items()}
        return super().with_absolute_paths(absolute).model_copy(update={"sources": sources})


LIMITS = ("max_turns", "max_tokens", "timeout", "max_concurrency")
"""The options that a data source's environment has in common with `env`, unless it sets them."""


@dataclass(frozen=True)
class Environment:
    """An environment that a run plays."""

    options: EnvConfig
    """Its options, with the limits of `env` where its section sets none; `sources` is empty."""
    section: str = "env"
    """The section of its options, such as `env.sources.game`."""

    def hub_spec(self) -> HubSpec | None:
        """Return what the hub's name stands for; None without a hub."""
        options = self.options
        if options.hub is None:
            return None
        name, what = parse_hub(options.hub, f"{self.section}.hub")
        python = options.python or hub_python(name)
        return HubSpec(name, what, python, options.kwargs, options.max_turns, options.memory_mb, self.section)

    def prepare(self) -> None:
        """Refuse an environment or tools that could not be created when a rollout begins."""
        options = self.options
        section = self.section
        if not options.names_one:
            raise ConfigError(
                f"`{section}` names no environment: give `{section}.path`, `{section}.tools` or `{section}.hub`. Or "
                "leave the section out; then `env` itself plays these tasks, if it names one."
            )
        self.load_toolbox()
        if self.hub_spec() is not None and (options.path is not None or options.tools):
            other = f"{section}.path" if options.path is not None else f"{section}.tools"
            raise ConfigError(
                f"`{section}.hub={options.hub}` has an environment and its tools, and `{other}` names others: leave "
                "one out."
            )
        if options.path is None:
            return
        factory = self.load_factory()
        if isinstance(factory, type):
            missing = [name for name in ("reset", "step") if not callable(getattr(factory, name, None))]
            if missing:
                raise PluginError(
                    f"The environment '{options.path}' has no {' and no '.join(f'`{name}`' for name in missing)}. An "
                    "environment has two methods: reset(task) and step(answer), and each returns an Observation."
                )
        try:
            inspect.signature(factory).bind(**options.kwargs)
        except TypeError as error:
            raise PluginError(
                f"The environment '{options.path}' cannot be created with `{section}.kwargs` "
                f"({_listed(options.kwargs)}): {error}. It takes {inspect.signature(factory)}."
            ) from error
        except ValueError:
            return  # its signature is unknown

    def load_factory(self) -> Callable[..., Any]:
        """Return the function or class that creates an environment."""
        path = self.options.path
        assert path is not None
        factory = load_object(path, "environment", f"{self.section}.path=my_game.py:Game")
        if not callable(factory):
            raise PluginError(f"The environment '{path}' is of type {type(factory).__name__}. Name a class.")
        return factory  # type: ignore[no-any-return]

    def load_toolbox(self) -> Toolbox | None:
        """Return the functions that the model may call, if any."""
        paths = self.options.tools
        if not paths:
            return None
        tools = [load_object(path, "tool", f"{self.section}.tools=[my_tools.py:search]") for path in paths]
        for path, tool in zip(paths, tools, strict=True):
            if not callable(tool):
                raise PluginError(f"The tool '{path}' is of type {type(tool).__name__}, which cannot be called.")
        return Toolbox(tools, self.options.timeout)


def _listed(kwargs: dict[str, JsonValue]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in kwargs.items()) or "none"
