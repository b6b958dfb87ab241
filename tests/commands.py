"""Command lines as tests read them: the class whose fields are a command's options, and what the words make of it."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

from pydantic import BaseModel

from etude.config import load_plugin
from etude.config.compose import compose
from etude.recipes.presets import PRESETS

__all__ = ["composed", "root_of"]


def root_of(asked: Namespace, words: Sequence[str]) -> type[BaseModel] | None:
    """The class whose fields are the options of what was asked with these words; None where it takes none."""
    roots = vars(asked).get("roots", {})
    named = next((root for word, root in roots.items() if word in words), roots.get(""))
    return None if named is None else load_plugin(named, BaseModel)


def composed(asked: Namespace, words: Sequence[str]) -> BaseModel | None:
    """What the options come to, over the preset that was named, if one was."""
    root = root_of(asked, words)
    if root is None:
        return None
    presets = [PRESETS[word] for word in asked.overrides if word in PRESETS]
    options = [word for word in asked.overrides if "=" in word]
    return compose(root, options, preset=presets[0] if presets else None)
