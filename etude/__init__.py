"""Etude: reinforcement learning for language models and the agents built on them."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from etude.agents import emit
    from etude.agents.agent import Agent, agent
    from etude.agents.command import command
    from etude.launch import train
    from etude.ppo_trainer import PPOTrainer, RLConfig, Trajectories
    from etude.trainer import RL, Algorithm, Baseline, Trainer

__version__ = "0.1.0"

__all__ = [  # noqa: RUF022 (as `sorted` has them)
    "Agent",
    "Algorithm",
    "Baseline",
    "PPOTrainer",
    "RL",
    "RLConfig",
    "Trainer",
    "Trajectories",
    "__version__",
    "agent",
    "command",
    "emit",
    "train",
]


def __getattr__(name: str) -> Any:
    """What is heavy is loaded when it is asked for, so that `import etude` costs nothing."""
    if name in ("PPOTrainer", "RLConfig", "Trajectories"):
        from etude import ppo_trainer

        return getattr(ppo_trainer, name)
    if name in ("RL", "Algorithm", "Baseline", "Trainer"):
        from etude import trainer

        return getattr(trainer, name)
    if name in ("Agent", "agent"):
        from etude.agents import agent

        return getattr(agent, name)
    if name == "command":
        from etude.agents.command import command

        return command
    if name == "emit":
        from etude.agents import emit

        return emit
    raise AttributeError(f"module 'etude' has no attribute '{name}'")


def __dir__() -> list[str]:
    """What is there, loaded or not."""
    return sorted({*globals(), *__all__})


class _Etude(ModuleType):
    """This package. `etude.train` is a function here, and the name of a package below, from which names are imported
    as before: `from etude.train import …`."""

    @property
    def train(self) -> Any:
        """The function, whether or not that package is loaded."""
        from etude.launch import train

        return train

    @train.setter
    def train(self, package: ModuleType) -> None:
        """Python would put the package here when it is imported."""


if not TYPE_CHECKING:
    sys.modules[__name__].__class__ = _Etude
