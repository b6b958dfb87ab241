"""What a process is there for where several share the work, as ETUDE_ROLE says: the same program is started as each.

ETUDE_ROLE=train python my_training.py        the trainer, which serves the store and the model and plays nothing
ETUDE_ROLE=runner ETUDE_STORE_URL=… ETUDE_STORE_KEY=… python my_training.py       plays what it wants played
"""

from __future__ import annotations

from etude.agents.agent import Agent
from etude.agents.execution.runner_process import RunnerSpec, resolve_store, run_spec
from etude.agents.runner import RunnerTimeouts
from etude.config.env import read_role
from etude.errors import ConfigError

__all__ = ["serve_if_runner"]


def serve_if_runner(agent: Agent, max_concurrency: int) -> bool:
    """Whether this process is a runner; then it has been one, and is told to stop by now."""
    role = read_role()
    if role == "store":
        raise ConfigError(
            "ETUDE_ROLE=store was asked of a program that trains. A store is kept by `etude store DIRECTORY`, and "
            "joined with `agent.store`."
        )
    if role != "runner":
        return False
    url, key = resolve_store(agent.title)
    run_spec(RunnerSpec(agent, url, key, "", max_concurrency, RunnerTimeouts()))
    return True
