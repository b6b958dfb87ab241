"""The rollouts of a step that trackers show: some of them, from the best to the worst."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from etude.config.secrets import mask_text
from etude.observe import SampledRollout
from etude.protocols import Ids
from etude.recipes.collect.rollouts import ScoredRollout
from etude.store import Journal

LONGEST = 4000
"""Characters of a text that are kept; of a longer one the beginning and the end."""


def choose_rollouts(scored: Sequence[ScoredRollout], count: int) -> list[int]:
    """Return the places of at most `count` rollouts, spread evenly from the best to the worst."""
    order = sorted(range(len(scored)), key=lambda place: -scored[place].trained_reward)
    return [order[place] for place in np.linspace(0, len(order) - 1, min(count, len(order)), dtype=int)]


def read_sampled(
    scored: ScoredRollout, store: Journal, decode: Callable[[Ids], str], advantages: Mapping[int, float | None]
) -> SampledRollout:
    """Return a rollout as trackers show it, with masked secrets. advantages: of each rollout, by its id."""
    rollout = scored.rollout.id
    turns = store.turns(rollout)
    prompt = decode(turns[0].prompt) if turns else ""
    text = "\n\n".join(turn.completion.text for turn in turns)
    return SampledRollout(rollout, scored.trained_reward, advantages.get(rollout), _shorten(prompt), _shorten(text))


def _shorten(text: str) -> str:
    masked = mask_text(text, yaml=False)  # before the cut, which may divide a secret
    return masked if len(masked) <= LONGEST else f"{masked[: LONGEST // 2]}\n…\n{masked[-LONGEST // 2 :]}"
