"""Etude: reinforcement learning for language models and the agents built on them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from etude.easy import PPOTrainer, RLConfig, Trajectories

__version__ = "0.1.0"

__all__ = ["PPOTrainer", "RLConfig", "Trajectories", "__version__"]


def __getattr__(name: str) -> Any:
    """What is heavy is loaded when it is asked for, so that `import etude` costs nothing."""
    if name in ("PPOTrainer", "RLConfig", "Trajectories"):
        from etude import easy

        return getattr(easy, name)
    raise AttributeError(f"module 'etude' has no attribute '{name}'")


def __dir__() -> list[str]:
    """What is there, loaded or not."""
    return sorted({*globals(), *__all__})
