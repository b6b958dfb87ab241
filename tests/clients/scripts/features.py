"""The address and the keys that a script gets, the task of its client, and the results that it prints.

A script runs in the environment of the clients, so it imports nothing of Etude.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
from collections.abc import Callable
from typing import Any, Literal

from pydantic import BaseModel

URL = os.environ["ETUDE_URL"]
"""The root of the endpoint; OpenAI's clients add /v1."""
MODEL = "policy"
UNKNOWN = "nobody"
"""A model that the endpoint does not have."""
HELLO = "Hello."
COUNT = "Please count for ever."
LOOK = "What is in the notes? Look it up."
ASK = "Which colour?"


class Colour(BaseModel):
    """An answer of a form."""

    colour: Literal["red", "blue"]


def look(key: Literal["notes"]) -> str:
    """Look up what belongs to a key.

    Args:
        key: the key
    """
    return f"{key}: the secret is heliotrope"


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"key": {"type": "string"}},
    "required": ["key"],
}
"""The schema of the arguments of `look`."""


def play(**features: Callable[[str], Any]) -> None:
    """Run each feature with its key, and print what came of it: the value, or the error."""
    keys: dict[str, str] = json.loads(os.environ["ETUDE_KEYS"])
    results = {name: asyncio.run(_played(feature, keys[name])) for name, feature in features.items()}
    print(json.dumps(results))


async def _played(feature: Callable[[str], Any], key: str) -> dict[str, Any]:
    try:
        value = feature(key) if not inspect.iscoroutinefunction(feature) else await feature(key)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"value": value}
