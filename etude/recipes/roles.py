"""What a process is there for where several share the work, as ETUDE_ROLE says: the same program is started as each.

ETUDE_ROLE=train python my_training.py        the trainer, which serves the store and the model and plays nothing
ETUDE_ROLE=runner ETUDE_STORE_URL=… ETUDE_STORE_KEY=… python my_training.py       plays what it wants played
"""

from __future__ import annotations

from etude.agents.agent import Agent
from etude.agents.execution.worker import Appointment, appointed_elsewhere, serve
from etude.agents.runner import Pace
from etude.config.env import role
from etude.errors import ConfigError

__all__ = ["plays_instead"]


def plays_instead(agent: Agent, at_once: int) -> bool:
    """Whether this process is a runner; then it has been one, and is told to stop by now."""
    asked = role()
    if asked == "store":
        raise ConfigError(
            "ETUDE_ROLE=store was asked of a program that trains. A store is kept by `etude store DIRECTORY`, and "
            "joined with `agent.store`."
        )
    if asked != "runner":
        return False
    url, key = appointed_elsewhere(agent.title)
    serve(Appointment(agent, url, key, "", at_once, Pace()))
    return True
