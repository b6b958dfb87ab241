"""docs/reference/algorithms.md: every advantage, loss, KL form and correction, from its docstring and its fields."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel

import etude.algorithms.corrections
import etude.algorithms.kl
from etude.algorithms import LOSSES
from etude.algorithms.advantages import ADVANTAGES
from etude.algorithms.corrections import CorrectionConfig, RejectionRule
from etude.algorithms.entropy import EntropyConfig
from etude.algorithms.kl import CONTROLLERS, KLS
from etude.algorithms.losses import SUPERVISED
from etude.algorithms.overlong import OverlongPenalty
from tests.pages.options import options
from tests.pages.text import docstring, note

__all__ = ["REDUCTIONS", "page"]

INTRO = f"""\
# Algorithms

{note("tests.pages.document")}

This page has the formula and the options of each algorithm, from the code itself.
[Conformance](../internals/conformance.md) lists the proof of each. [Recipes](recipes.md) lists the published
combinations.

| symbol | meaning |
|---|---|
| R, A, V | a rollout's reward, an action token's advantage, the value of the state before it |
| g, n | the group of a rollout, and its size |
| μ, π_old, π_ref, π_θ | the policies: sampler, trainer at the start of the step, reference, trainer now |
| r, ρ, w, δ | π_θ / π_old, π_old / μ, π_θ / μ, log π_θ − log π_ref, each at an action token |
| ε, γ, λ, β, τ | an option, which the text names |
| sg(·) | stop-gradient: it has no gradient |
| σ | the logistic function; of advantages, a standard deviation |
"""
ADVANTAGE = """\
## Advantages

`advantage=NAME` gives the learning signal of each action token. Statistics are computed over the whole rollout batch,
before any rollout is dropped, and count rollouts."""
LOSS = """\
## Losses

`loss=NAME` is the objective that the policy minimizes, with its advantages. A loss gives each action token a number.
`loss.reduction` reduces them to one:"""
REDUCED = "| `loss.reduction` | meaning |\n|---|---|"
REDUCTIONS = {
    "token-mean": "the mean over all tokens: every token has the same weight",
    "token-sum": "the sum over all tokens",
    "seq-mean-token-mean": "the mean over sequences of their means: every sequence has the same weight",
    "seq-mean-token-sum": "the mean over sequences of their sums: long ones have more weight",
    "seq-mean-token-sum-norm": "the same, divided by `loss.norm_length`, a constant that you choose",
}
SUPERVISE = """\
## Supervised losses

These losses are for demonstrations, preferences, values and teachers."""
KL = "## KL terms\n\n`kl=NAME` holds the policy near a reference, with the weight `kl.coefficient`.\n\n"


def page() -> str:
    """Return the page."""
    parts = [
        INTRO,
        family(ADVANTAGE, ADVANTAGES, "advantage"),
        LOSS,
        "\n".join([REDUCED, *(f"| `{name}` | {text} |" for name, text in REDUCTIONS.items())]),
        family("", LOSSES, "loss"),
        family(SUPERVISE, SUPERVISED, ""),
        KL + docstring(etude.algorithms.kl),
        family("", KLS, "kl"),
        family("`kl.controller=NAME` adapts the coefficient, or keeps it:", CONTROLLERS, "kl.controller"),
        "## Corrections\n\n" + docstring(etude.algorithms.corrections),
        options(CorrectionConfig, "correction"),
        "A rule of `correction.reject`:",
        options(RejectionRule, ""),
        "## Entropy\n\n" + docstring(EntropyConfig),
        options(EntropyConfig, "entropy"),
        "## Penalty for overlong answers\n\n" + docstring(OverlongPenalty),
        options(OverlongPenalty, "overlong"),
    ]
    return "\n\n".join(part.strip("\n") for part in parts if part) + "\n"


def family(title: str, kinds: Mapping[str, type[BaseModel]], path: str) -> str:
    """Return every choice of a kind under its name: its docstring and its own options."""
    shared = set.intersection(*(set(kind.model_fields) for kind in kinds.values())) if len(kinds) > 1 else set()
    parts = [title] if title else []
    for name, kind in kinds.items():
        table = options(kind, path, without=shared)
        parts += [f"### {name}", docstring(kind), *([table] if table else [])]
    return "\n\n".join(parts)
