"""The options of an environment, for rollouts of more than one answer."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import Field, field_validator

from etude.chat import Toolbox
from etude.config import Config, load_object
from etude.config.resume_marks import MAY_CHANGE
from etude.errors import PluginError


class EnvConfig(Config):
    """The environment of multi-turn rollouts: a class, tools that the model may call, or both. By default none."""

    path: str | None = Field(
        None,
        description="environment class for multi-turn rollouts, with `reset` and `step`: path/to/file.py:Name or "
        "module:Name",
    )
    kwargs: dict[str, bool | int | float | str] = Field(
        default_factory=dict, description="arguments of that class, by name"
    )
    tools: tuple[str, ...] = Field(
        (), description="functions that the model may call: path/to/file.py:name or module:name"
    )
    max_turns: int = Field(
        8,
        ge=1,
        description="most answers in a rollout; larger allows longer episodes, and a rollout that would continue is "
        "truncated",
    )
    max_tokens: int | None = Field(
        None, ge=1, description="most tokens of a rollout, observations included; null is as many as fit"
    )
    timeout: Annotated[float, MAY_CHANGE] = Field(
        60.0,
        gt=0,
        description="seconds that one step of the environment, or one tool call, may take; larger waits longer "
        "for slow ones",
    )
    max_concurrency: Annotated[int, MAY_CHANGE] = Field(
        256, ge=1, description="most rollouts at a time; larger needs more environments at once, others wait"
    )

    @field_validator("tools", mode="before")
    @classmethod
    def _one_is_a_list(cls, tools: Any) -> Any:
        """Accept one tool without brackets."""
        return (tools,) if isinstance(tools, str) else tools

    @property
    def is_enabled(self) -> bool:
        """True if there is an environment or a tool."""
        return self.path is not None or bool(self.tools)

    def prepare(self) -> None:
        """Refuse an environment or tools that could not be created when a rollout begins."""
        self.load_toolbox()
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


def _listed(kwargs: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in kwargs.items()) or "none"
