"""Hubs: collections of environments that others wrote, each played by a process of the hub's own Python.

    env.hub=gymnasium:Blackjack-v1            the hub, and its environment

A hub is one file in `guest`. `process` is one such process, and `pool` those of a run.
"""

from __future__ import annotations

from etude.config.suggestions import suggest_name
from etude.errors import ConfigError, UnknownChoiceError

HUBS: dict[str, str] = {
    "gymnasium": "Blackjack-v1",
    "openenv": "http://127.0.0.1:8000",
    "textarena": "GuessTheNumber-v0",
    "trl": "my_env.py:Factory",
    "verifiers": "my_taskset",
}
"""The hubs, and an environment of each."""
AGENTS = frozenset({"verifiers"})
"""The hubs whose own programs call the model. Of the others, the run plays the environments."""


def parse_hub(text: str, option: str = "env.hub") -> tuple[str, str]:
    """Return the hub and the environment that an option names."""
    name, _, what = text.partition(":")
    if name not in HUBS:
        listed = ", ".join(HUBS)
        raise UnknownChoiceError(
            f"`{option}={text}` names no hub that is known here.{suggest_name(name, HUBS)} The hubs are {listed}: "
            f"`{option}={name_example()}`."
        )
    if not what:
        raise ConfigError(
            f"`{option}={text}` names a hub and no environment of it. Add one: `{option}={name_example(name)}`."
        )
    return name, what


def name_example(name: str = "gymnasium") -> str:
    """Return an environment of a hub, as `env.hub` names it."""
    return f"{name}:{HUBS[name]}"
