"""The role of this process, from ETUDE_ROLE, where several processes of the same program share a training.

ETUDE_ROLE=train python my_training.py        the trainer, which serves the store and the model and runs no agent
ETUDE_ROLE=runner ETUDE_STORE_URL=… ETUDE_STORE_KEY=… python my_training.py       a runner, which executes its rollouts
"""

from __future__ import annotations

from etude.agents.agent import Agent
from etude.agents.execution.runner_process import RunnerSpec, resolve_store, run_spec
from etude.agents.runner import RunnerTimeouts
from etude.config.env import read_role
from etude.errors import ConfigError


def serve_if_runner(agent: Agent, max_concurrency: int) -> bool:
    """Run this process as a runner until its trainer stops it, and return True; return False for any other role."""
    role = read_role()
    if role == "store":
        raise ConfigError(
            "ETUDE_ROLE=store was given to a program that trains. A store is served by `etude store DIRECTORY`, and "
            "joined with `agent.store`."
        )
    if role != "runner":
        return False
    url, key = resolve_store(agent.title)
    run_spec(RunnerSpec(agent, url, key, "", max_concurrency, RunnerTimeouts()))
    return True
