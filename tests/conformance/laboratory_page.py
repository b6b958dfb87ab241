"""Writer of the page on mismatch and of its picture: `python -m tests.conformance.laboratory_page`, ten seconds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.conformance.laboratory import (
    CURVE_STEP,
    DRIFT_STEP,
    SAMPLERS,
    STEPS,
    TREATMENTS,
    Array,
    Outcome,
    Toy,
    Treatment,
    run,
)

DOCS = Path(__file__).parent.parent.parent / "docs"
PAGE = DOCS / "internals/mismatch.md"
PICTURE = DOCS / "pictures/mismatch.svg"

INTRO = """\
# A laboratory of mismatch

<!-- Written by `python -m tests.conformance.laboratory_page`; do not edit by hand. -->

A sampler that is not quite the policy can spoil training that would succeed without it. This page shows when, on a task
that is small enough to compute, and what each [correction](../reference/algorithms/corrections.md) does about it.

![Without a correction the share of right tokens stays below that of centering](../pictures/mismatch.svg)

## How a sampler pulls

At a place in an answer the sampler draws a token, and the advantage A of the answer moves the policy towards the token
or away from it. Think of A as two parts: its mean at this place, and what the token itself adds. If sampler and policy
are equal, the mean's part cancels, because the probabilities of all tokens add up to 1. If they differ, it does not
cancel. Where the mean is positive, every step pulls the policy towards the sampler's favourites, whether they are good
or not. Where it is negative, every step drives the policy away from them. This is the *drift*.

A group's baseline makes the mean 0 at the first token only. Behind luck, other players, a tool that failed, or a good
beginning it is not 0, and the drift acts in every step.

## The toy

An answer has two tokens of eight. Between them is luck: +1 or −1, by chance. Each right token earns 0.3. The policy is
a table of logits, 17 states of 8. The baseline is the mean return. A step follows the exact expected gradient, so the
tables show the bias of a correction, and **none of its noise**. The samplers differ from the policy by far more than
those of a run, because the toy has few steps. [Its code](../../tests/conformance/laboratory.py) is short, and
[its test](../../tests/conformance/test_laboratory.py) compares a step of each correction with the objects that train a
model."""
SAMPLERS_TEXT = """\
| sampler | what it stands for |
|---|---|
| equal | the embedded engine without staleness |
| errors of 0.3 | quantized weights or other kernels: each logit has an error that never changes |
| rounded to 0.5 | logits in few bits |
| temperature 0.9, 1.1 | a server whose temperature is not the trainer's |
| 100 steps old | asynchronous training |
| `min_p=0.1` | a filter; without its sets the trainer takes the policy over all tokens |"""
RIGHT_TEXT = f"""\
## The share of right tokens at the end

Among the tokens that the sampler draws after {STEPS:,} steps; the mean of four seeds. In all rows but the second, the
policy is taken over all tokens. Options are those of `correction`; the loss is `reinforce`, and `ppo` in the row of its
clip."""
DRIFT_TEXT = f"""\
## The drift

The probability that a step of size 1 would move at a token if no token were better than another, at step {DRIFT_STEP}.
It is the mean for tokens that are all good (A = 1) and all bad (A = −1)."""
CONCLUSIONS = """\
## What to use

- **A filter needs its sets.** Etude [records them](exactness.md#filters) and trains over them whenever
  `sampling.top_p`, `top_k` or `min_p` is set, and then there is nothing to correct. Without sets, weights help little:
  tokens that were cut off have no samples to weigh. Centering removes the drift, but ratios, KL terms and entropy are
  still those of another policy. Keep the filter where the model is served: nothing trains the tokens outside of it.
- **An error that stays is worse than a large one that passes.** The stale sampler has the largest drift of the table
  and does little harm, because it follows the policy. Fixed errors, rounding and another temperature pull in the same
  direction in each step.
- **Weights remove the drift as far as they are not cut.** `correction.weight=truncate` and `correction.weight=mask`
  keep the ratio of trainer and sampler up to 2 and 5, which is enough for most of these samplers. A tighter bound
  leaves a part. In a run, weights also have noise, which this table does not show. It grows with the length of answers
  and with staleness: `mismatch/effective_sample_size` measures it.
- **Bounds alone do not remove a drift.** A mask that is too narrow leaves out the tokens where both differ, and the
  rest still drifts; it can be worse than no correction. PPO's clip around the sampler stops tokens that have moved far,
  and does not know in which direction they should have moved. Bounds protect from few extreme tokens, which is another
  purpose.
- **Centering removes the drift itself**, without a large weight: `correction.center=true`. What is left is how much
  better a token was than the others at its place. It is exact if all tokens that could be drawn are recorded. With few
  of them a part of the drift is left: choose `correction.alternatives` so that `center/mass` is near 1, and look at
  `center/drift`.
- **Both together** suit a sampler that is stale and inexact: truncated weights for what has moved far, centering for
  the rest.

| your run | use |
|---|---|
| embedded engine, `max_staleness=0`, with or without filters | nothing |
| `mismatch/k3` is small and does not grow | nothing, or `weight=truncate` |
| a server with other kernels, half precision or quantized weights | `weight=truncate` |
| embedded engine, `max_staleness` above 0 | `weight=truncate` |
| the same, and luck, tools or other players decide much of the reward | `center=true weight=truncate` |
| few extreme ratios | `weight=mask`, a rejection rule, or a loss that leaves such tokens out |

The options are those of `correction`. Centering needs tokens that were not drawn: see
[which engines record them](../guides/async.md#answers-of-an-older-policy)."""


def cells(values: Iterable[object]) -> str:
    return "| " + " | ".join(map(str, values)) + " |"


def name_cell(treatment: Treatment) -> str:
    return treatment.name + (f"<br>{treatment.options}" if treatment.options else "")


def table(columns: Mapping[Treatment, Array], digits: int) -> str:
    """Return a table with a row for each correction and a column for each sampler."""
    head = cells(["correction", *SAMPLERS]) + "\n|---|" + "---:|" * len(SAMPLERS)
    return "\n".join(
        [head, *(cells([name_cell(each), *(f"{value:.{digits}f}" for value in row)]) for each, row in columns.items())]
    )


def drift_table(outcomes: Mapping[Treatment, Outcome]) -> str:
    return table({treatment: outcome.drift for treatment, outcome in outcomes.items()}, 3)


def page(outcomes: Mapping[Treatment, Outcome]) -> str:
    right = table({treatment: outcome.right for treatment, outcome in outcomes.items()}, 2)
    parts = [
        INTRO,
        SAMPLERS_TEXT,
        RIGHT_TEXT,
        right,
        DRIFT_TEXT,
        drift_table(outcomes),
        CONCLUSIONS,
    ]
    return "\n\n".join(parts) + "\n"


# -- the picture ------------------------------------------------------------------------------------------------------

SHOWN = {
    "centering, all tokens": "b",
    "weights up to 1.2": "a",
    "no correction": "c",
    "narrow mask": "d",
}
"""The corrections of the picture, and the styles of their lines."""
WIDTH, HEIGHT = 760, 300
LEFT, RIGHT, TOP, BOTTOM = 60, 560, 24, 250
STYLE = """\
<style>
  text { font: 14px system-ui, sans-serif; fill: #1f2937 }
  .small { font-size: 12px; fill: #4b5563 } .middle { text-anchor: middle } .end { text-anchor: end }
  .card { fill: #f8fafc } .axis { fill: none; stroke: #94a3b8 }
  .grid { fill: none; stroke: #cbd5e1; stroke-dasharray: 3 4 }
  .line { fill: none; stroke-width: 2.5 }
  .a { stroke: #6366f1 } .b { stroke: #10b981 } .c { stroke: #d97706 } .d { stroke: #dc2626 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e5e7eb } .small { fill: #b6bec9 } .card { fill: #1b2030 } .grid { stroke: #475569 }
  }
</style>"""


def x_of(step: float) -> float:
    return LEFT + (RIGHT - LEFT) * step / STEPS


def y_of(share: float) -> float:
    return BOTTOM - (BOTTOM - TOP) * share


def picture(outcomes: Mapping[Treatment, Outcome]) -> str:
    """Return the curves of the sampler with fixed errors."""
    sampler = list(SAMPLERS).index("errors of 0.3")
    label = "The share of right tokens while training on a sampler with fixed errors"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">',
        STYLE,
        f'<rect class="card" width="{WIDTH}" height="{HEIGHT}" rx="10"/>',
    ]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        lines.append(f'<path class="grid" d="M{LEFT} {y_of(share):.1f}H{RIGHT}"/>')
        lines.append(f'<text class="small end" x="{LEFT - 8}" y="{y_of(share) + 4:.1f}">{share:.2f}</text>')
    for step in range(0, STEPS + 1, 1000):
        lines.append(f'<text class="small middle" x="{x_of(step):.1f}" y="{BOTTOM + 18}">{step:,}</text>')
    lines.append(f'<path class="axis" d="M{LEFT} {TOP}V{BOTTOM}H{RIGHT}"/>')
    lines.append(
        f'<text class="small middle" x="{(LEFT + RIGHT) / 2}" y="{BOTTOM + 38}">'
        "steps; the share of right tokens, on a sampler with errors of 0.3 in each logit</text>"
    )
    below = 0.0
    for treatment in sorted(outcomes, key=lambda each: -outcomes[each].right[sampler]):
        if treatment.name not in SHOWN:
            continue
        curve = outcomes[treatment].curve[:, sampler]
        points = " ".join(f"{x_of(CURVE_STEP * i):.1f},{y_of(share):.1f}" for i, share in enumerate(curve))
        lines.append(f'<polyline class="line {SHOWN[treatment.name]}" points="{points}"/>')
        below = max(y_of(curve[-1]) + 4, below + 18)  # labels of near lines are apart
        lines.append(f'<text x="{RIGHT + 10}" y="{below:.1f}">{curve[-1]:.2f} {treatment.name}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def main() -> None:
    toy = Toy.make()
    outcomes = {treatment: run(treatment, toy) for treatment in TREATMENTS}
    PAGE.write_text(page(outcomes), encoding="utf-8")
    PICTURE.write_text(picture(outcomes), encoding="utf-8")


if __name__ == "__main__":
    main()
