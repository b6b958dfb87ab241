"""Etude: reinforcement learning for language models and the agents built on them."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from etude.lazy import lazy_getattr

if TYPE_CHECKING:
    from etude.agents import emit
    from etude.agents.agent import Agent, agent
    from etude.agents.command import command
    from etude.agents.hooks import on
    from etude.launch import train
    from etude.ppo_trainer import PPOTrainer, RLConfig, Trajectories
    from etude.prompts.apo import APO
    from etude.prompts.gepa import GEPA
    from etude.trainer import RL, Algorithm, Baseline, Trainer

__version__ = "0.1.0"

__all__ = [  # noqa: RUF022 (as `sorted` has them)
    "APO",
    "Agent",
    "Algorithm",
    "Baseline",
    "GEPA",
    "PPOTrainer",
    "RL",
    "RLConfig",
    "Trainer",
    "Trajectories",
    "__version__",
    "agent",
    "command",
    "emit",
    "on",
    "train",
]


_read = lazy_getattr(
    "etude",
    {
        "ppo_trainer": ("PPOTrainer", "RLConfig", "Trajectories"),
        "trainer": ("RL", "Algorithm", "Baseline", "Trainer"),
        "prompts.apo": ("APO",),
        "prompts.gepa": ("GEPA",),
        "agents.agent": ("Agent", "agent"),
        "agents.command": ("command",),
        "agents.hooks": ("on",),
    },
)


def __getattr__(name: str) -> Any:
    """Import a public name when it is first read, so that `import etude` is fast."""
    return import_module("etude.agents.emit") if name == "emit" else _read(name)


def __dir__() -> list[str]:
    """List the public names, imported or not."""
    return sorted({*globals(), *__all__})


class _Etude(ModuleType):
    """The class of this module. `etude.train` reads as a function, although a package has the same name: `from
    etude.train import …` still works."""

    @property
    def train(self) -> Any:
        """The function, also after the package has been imported."""
        from etude.launch import train

        return train

    @train.setter
    def train(self, package: ModuleType) -> None:
        """Ignore the package, which Python assigns here when it imports it."""


if not TYPE_CHECKING:
    sys.modules[__name__].__class__ = _Etude
