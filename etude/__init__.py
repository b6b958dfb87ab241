"""Etude: reinforcement learning for language models and the agents built on them."""

from __future__ import annotations

__version__ = "0.1.0"

__all__ = ["__version__"]
