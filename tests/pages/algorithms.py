"""docs/reference/algorithms/: every advantage, loss, KL form and correction, from its docstring and its fields."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

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
from tests.pages.options import COMMON, common_options, equal_options, options
from tests.pages.text import docstring, first_paragraph, note

__all__ = ["PAGES", "REDUCTIONS"]

Kinds = Mapping[str, type[BaseModel]]

INTRO = f"""\
# Algorithms

{note("tests.pages.document")}

These pages have the formula and the options of each algorithm, from the code itself.
[Claims](../claims.md) lists the proof of each. [Recipes](../recipes/index.md) lists the
published combinations.

| symbol | meaning |
|---|---|
| R, A, V | a rollout's reward, an action token's advantage, the value of the state before it |
| g, n | the group of a rollout, and its size |
| μ, π_old, π_ref, π_θ | the policies: sampler, trainer at the start of the step, reference, trainer now |
| r, ρ, w, δ | π_θ / π_old, π_old / μ, π_θ / μ, log π_θ − log π_ref, each at an action token |
| ε, γ, λ, β, τ | an option, which the text names |
| sg(·) | stop-gradient: it has no gradient |
| σ | the logistic function; of advantages, a standard deviation |"""
ADVANTAGE = """\
`advantage=NAME` gives the learning signal of each action token. Statistics are computed over the whole rollout batch,
before any rollout is dropped, and count rollouts."""
ROLLOUTS = f"{ADVANTAGE} These give one number to all action tokens of a rollout."
TOKENS = f"{ADVANTAGE} These give each token, or each turn, its own number."
REDUCTIONS = {
    "token-mean": "the mean over all tokens: every token has the same weight",
    "token-sum": "the sum over all tokens",
    "seq-mean-token-mean": "the mean over sequences of their means: every sequence has the same weight",
    "seq-mean-token-sum": "the mean over sequences of their sums: long ones have more weight",
    "seq-mean-token-sum-norm": "the same, divided by `loss.norm_length`, a constant that you choose",
}
LOSS = "\n".join(
    [
        "`loss=NAME` is the objective that the policy minimizes, with its advantages. A loss gives each action token a",
        "number. `loss.reduction` reduces them to one:",
        "",
        "| `loss.reduction` | meaning |",
        "|---|---|",
        *(f"| `{name}` | {text} |" for name, text in REDUCTIONS.items()),
    ]
)
OTHER_LOSS = "`loss=NAME` chooses one, as [a loss with a bounded ratio](losses.md), and `loss.reduction` is as there."
SUPERVISE = "These losses are for demonstrations, preferences, values and teachers."
KL = "`kl=NAME` holds the policy near a reference, with the weight `kl.coefficient`.\n\n" + docstring(
    etude.algorithms.kl
)
CONTROL = "## Coefficients\n\n`kl.controller=NAME` adapts the coefficient, or keeps it:"


def index() -> str:
    """Return the page with every name."""
    parts = [INTRO]
    for uri, (title, _, kinds, _) in FAMILIES.items():
        names = {name: f"[`{name}`]({uri}#{name.replace('+', '')})" for name in kinds}
        rows = [f"| {names[name]} | {first_paragraph(kind)} |" for name, kind in kinds.items()]
        parts.append("\n".join([f"## [{title}]({uri})", "", "| name | meaning |", "|---|---|", *rows]))
    return _joined(*parts, "[Corrections, entropy and length](corrections.md) can be added to any of them.")


def page(uri: str) -> str:
    """Return the page of one family."""
    title, text, kinds, path = FAMILIES[uri]
    return _joined(*_head(title, text), family(kinds, path))


def kl() -> str:
    """Return the page of KL terms, with the controllers of their coefficients."""
    return _joined(page("kl.md"), CONTROL, family(CONTROLLERS, "kl.controller", "###"))


def corrections() -> str:
    """Return the page of what can be added to any algorithm."""
    return _joined(
        *_head("Corrections, entropy and length", "These sections of options can be added to any algorithm."),
        "## Corrections\n\n" + docstring(etude.algorithms.corrections),
        options(CorrectionConfig, "correction"),
        "A rule of `correction.reject`:",
        options(RejectionRule, ""),
        "## Entropy\n\n" + docstring(EntropyConfig),
        options(EntropyConfig, "entropy"),
        "## Penalty for overlong answers\n\n" + docstring(OverlongPenalty),
        options(OverlongPenalty, "overlong"),
    )


def family(kinds: Kinds, path: str, heading: str = "##") -> str:
    """Return the options that all choices of a kind share, then every choice: its docstring and its own options."""
    shared, some = common_options(kinds), next(iter(kinds.values()))
    parts = []
    if table := options(some, path, without=some.model_fields.keys() - shared):
        parts.append(f"{COMMON}\n\n{table}")
    for name, kind in kinds.items():
        table = options(kind, path, without=equal_options(kind, some) & shared)
        parts += [f"{heading} {name}", docstring(kind), *([table] if table else [])]
    return "\n\n".join(parts)


def _head(title: str, text: str) -> list[str]:
    return [f"# {title}", note("tests.pages.document"), text]


def _joined(*parts: str) -> str:
    return "\n\n".join(part.strip("\n") for part in parts if part) + "\n"


def _of(kinds: Kinds, *modules: str) -> dict[str, type[BaseModel]]:
    """Return the kinds of these modules."""
    return {name: kind for name, kind in kinds.items() if kind.__module__.rpartition(".")[2] in modules}


FINE = _of(ADVANTAGES, "token", "turns")
WHOLE = {name: kind for name, kind in ADVANTAGES.items() if name not in FINE}
OTHER = _of(LOSSES, "reinforce", "trust_region")
BOUNDED = {name: kind for name, kind in LOSSES.items() if name not in OTHER}
FAMILIES: dict[str, tuple[str, str, Kinds, str]] = {
    "advantages.md": ("Advantages of rollouts", ROLLOUTS, WHOLE, "advantage"),
    "token-advantages.md": ("Advantages of tokens and turns", TOKENS, FINE, "advantage"),
    "losses.md": ("Losses with a bounded ratio", LOSS, BOUNDED, "loss"),
    "other-losses.md": ("Losses that drop tokens or bound nothing", OTHER_LOSS, OTHER, "loss"),
    "supervised-losses.md": ("Supervised losses", SUPERVISE, SUPERVISED, ""),
    "kl.md": ("KL terms", KL, KLS, "kl"),
}
"""The pages of choices: title, text, the choices by name, and the option that chooses."""
PAGES: dict[str, Callable[[], str]] = {
    "index.md": index,
    **{uri: partial(page, uri) for uri in FAMILIES},
    "kl.md": kl,
    "corrections.md": corrections,
}
"""The pages of this folder, by the names of their files."""
