"""The client libraries of others, loaded by the first test that uses one, and not when tests are collected."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import anthropic as anthropic
    import openai as openai
else:

    class _Later:
        """A module that is imported at the first access to an attribute."""

        def __init__(self, name: str) -> None:
            self._name = name

        def __getattr__(self, name: str) -> Any:
            return getattr(import_module(self._name), name)

    anthropic, openai = _Later("anthropic"), _Later("openai")
