"""The options of an environment: whom the model speaks with, where a rollout is more than one answer."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from pydantic import Field, field_validator

from etude.chat import Toolbox
from etude.config import Config, load_object
from etude.errors import PluginError

__all__ = ["EnvConfig"]


class EnvConfig(Config):
    """Whom the model speaks with: an environment, functions that it may call, or both. By default nobody."""

    path: str | None = Field(None, description="path/to/file.py:Name or module:Name: a class with `reset` and `step`")
    options: dict[str, bool | int | float | str] = Field(
        default_factory=dict, description="what that class is made with, by name"
    )
    tools: tuple[str, ...] = Field(
        (), description="functions that the model may call: path/to/file.py:name or module:name"
    )
    max_turns: int = Field(8, ge=1, description="most answers in a rollout; one that would go on is truncated")
    max_tokens: int | None = Field(
        None, ge=1, description="the longest rollout, all that it was shown included; null is as long as fits"
    )
    timeout: float = Field(
        60.0, gt=0, description="seconds that one step of the environment may take, or one call of a tool"
    )
    max_concurrency: int = Field(256, ge=1, description="most rollouts that are under way; others wait")

    @field_validator("tools", mode="before")
    @classmethod
    def _one_is_a_list(cls, tools: Any) -> Any:
        """One tool may stand without brackets."""
        return (tools,) if isinstance(tools, str) else tools

    @property
    def is_enabled(self) -> bool:
        """Whether there is anybody to speak with."""
        return self.path is not None or bool(self.tools)

    def prepare(self) -> None:
        """Refuse what could not be made when a rollout begins."""
        self.load_toolbox()
        if self.path is None:
            return
        factory = self.load_factory()
        if isinstance(factory, type):
            missing = [name for name in ("reset", "step") if not callable(getattr(factory, name, None))]
            if missing:
                raise PluginError(
                    f"The environment '{self.path}' has no {' and no '.join(f'`{name}`' for name in missing)}. An "
                    f"environment has two methods: reset(task) and step(answer), and each returns an Observation."
                )
        try:
            inspect.signature(factory).bind(**self.options)
        except TypeError as error:
            raise PluginError(
                f"The environment '{self.path}' cannot be made with `env.options` ({_listed(self.options)}): {error}. "
                f"It takes {inspect.signature(factory)}."
            ) from error
        except ValueError:
            return  # it does not say what it takes

    def load_factory(self) -> Callable[..., Any]:
        """What makes an environment."""
        assert self.path is not None
        factory = load_object(self.path, "environment", "env.path=my_game.py:Game")
        if not callable(factory):
            raise PluginError(f"The environment '{self.path}' is of type {type(factory).__name__}. Name a class.")
        return factory  # type: ignore[no-any-return]

    def load_toolbox(self) -> Toolbox | None:
        """The functions that the model may call."""
        if not self.tools:
            return None
        tools = [load_object(path, "tool", "env.tools=[my_tools.py:search]") for path in self.tools]
        for path, tool in zip(self.tools, tools, strict=True):
            if not callable(tool):
                raise PluginError(f"The tool '{path}' is of type {type(tool).__name__}, which cannot be called.")
        return Toolbox(tools, self.timeout)


def _listed(options: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in options.items()) or "none"
