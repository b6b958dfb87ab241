"""Writes docs/conformance.md: `python -m tests.conformance.document`."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.conformance.checks import CHECKS, Item
from tests.conformance.mutations import Mutation
from tests.conformance.test_mutations import MUTATIONS

HERE = Path(__file__).parent
PAGE = HERE.parent.parent / "docs" / "conformance.md"

INTRO = """\
# Conformance

<!-- Written by `python -m tests.conformance.document`; do not edit by hand. -->

Every advantage estimator, loss, KL term and correction in Etude makes a claim: that its expected gradient is the
gradient of something, or that its numbers are those of a published formula. This page lists each claim, and the tests
that fail if it is not so. All comparisons are in float64.

## How a claim is proven

**(a) Against the exact gradient, by enumeration.** The [world](../tests/conformance/mdp.py) is a decision problem of
two prompts, three tokens and at most three actions, with a tabular softmax policy: fifteen trajectories a prompt, some
of which stop early, so that lengths differ. An estimator is run on *every* group of n trajectories at once (n up to
4), as one real batch through the same objects that train a model, and each group's loss is weighed by the group's
probability. Its gradient is then the estimator's expectation, with no sampling error, and is compared with the gradient
of the objective, summed over the same trajectories in three lines. What is biased is shown to be biased: by a stated
amount, not even a multiple of the gradient.

**(b) Against the formula, restated.** The formula is written a second time in plain numpy, one rollout and one token at
a time, sharing no code with the algorithms. The batches are random and awkward: groups of one, a rollout that chose
no token, rewards paid on a tool's answer, several rows a rollout, NaN in every column of the context.

**(c) Against the formula's slope.** A surrogate's gradient is compared with finite differences (central, of fourth
order) of its written formula, in which every stop-gradient factor is held still. And where π_θ, π_old and μ are one,
every policy loss must have REINFORCE's gradient under the same reduction.

**Does the suite bite?** A test that cannot fail proves nothing. Each [mutation](#mutations) below makes one mistake in
one formula (a flipped sign, a dropped mask, a wrong normaliser, a detached ratio, an index off by one), and the check
beside it must find that mistake. The replaced text has to stand in the source exactly once, so that a mutation cannot
quietly stop applying.

## Read it, run it, add to it

A row's tests stand in [tests/conformance](../tests/conformance); "cases" counts their parametrised runs. "Within" is
how far a result may be from what it is compared with, the most lenient of the row's checks.

```
pytest tests/conformance                      # everything on this page
pytest tests/conformance -k "rloo or turn"    # one item
python -m tests.conformance.document          # write this page again
```

A new estimator or loss needs a row in [checks.py](../tests/conformance/checks.py): a test fails as long as one that can
be chosen by name has none.
"""


def cases(test: Callable[..., Any], item: str | None = None) -> int:
    """How many runs a test's parametrisation makes of it, or those of one item where it runs over items by `name`."""
    marks = [mark.args for mark in test.__dict__.get("pytestmark", []) if mark.name == "parametrize"]
    count = 1
    for names, values in marks:
        if item is not None and names == "name":
            count *= sum(value == item for value in values)
        elif item is not None and "name" in names:
            count *= sum(value[names.index("name")] == item for value in values)
        else:
            count *= len(values)
    return count


def row(name: str, item: Item) -> str:
    tests = "<br>".join(f"`{check.__name__}`" for check in item.checks)
    count = sum(cases(check, name) for check in item.checks)
    return f"| `{name}` | {item.family} | {item.claim} | {item.tolerance:.0e} | {tests} | {count} |"


def section(title: str, items: dict[str, Item]) -> str:
    head = "| item | family | what is shown | within | tests | cases |\n|---|---|---|---|---|---|"
    return "\n".join([f"## {title}", "", head, *(row(name, item) for name, item in items.items())])


def shown(text: str) -> str:
    """Source text as it can stand in a table's cell."""
    return f"`{text.strip()}`".replace("|", "\\|") if text.strip() else "nothing"


def broken(mutation: Mutation) -> str:
    where = mutation.function.__qualname__
    check = mutation.check_name
    return f"| `{where}` | {mutation.kind} | {shown(mutation.old)} | {shown(mutation.new)} | `{check}` |"


def laws() -> list[str]:
    """The other tests of this folder, by what their files say of themselves."""
    checks = {check for table in CHECKS.values() for item in table.values() for check in item.checks}
    listed = {check.__module__.rpartition(".")[2] for check in checks}
    lines = []
    for path in sorted(HERE.glob("test_*.py")):
        if path.stem in listed | {"test_mutations", "test_document"}:
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        tests = sum(isinstance(node, ast.FunctionDef) and node.name.startswith("test_") for node in tree.body)
        about = (ast.get_docstring(tree) or "").splitlines()[0]
        lines.append(f"| [{path.stem}](../tests/conformance/{path.name}) | {about} | {tests} |")
    return lines


def page() -> str:
    items = [item for table in CHECKS.values() for item in table.values()]
    tests = {check for item in items for check in item.checks}
    total = (
        f"**{len(items)} items, {len(tests)} tests in {sum(cases(test) for test in tests)} cases, "
        f"{len(MUTATIONS)} mutations.**"
    )
    head = "| broken function | mistake | text | becomes | found by |\n|---|---|---|---|---|"
    others = "| file | what it holds to | tests |\n|---|---|---|"
    parts = [
        INTRO,
        total,
        *(section(title, table) for title, table in CHECKS.items()),
        "\n".join(["## Mutations", "", head, *(broken(mutation) for mutation in MUTATIONS)]),
        "\n".join(
            [
                "## The other laws",
                "",
                "Property tests, traps and known defects, in the same folder.",
                "",
                others,
                *laws(),
            ]
        ),
    ]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
