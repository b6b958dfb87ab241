"""Writer of the pages on conformance: `python -m tests.conformance.document`."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.conformance.checks import CHECKS, Item
from tests.conformance.mutations import Mutation
from tests.conformance.test_mutations import MUTATIONS

HERE = Path(__file__).parent
DOCS = HERE.parent.parent / "docs"

NOTE = "<!-- Written by `python -m tests.conformance.document`; do not edit by hand. -->"
INTRO = f"""\
# Conformance

{NOTE}

Every advantage estimator, loss, KL term and correction in Etude makes a claim. Either its expected gradient is the
gradient of an objective, or its numbers are those of a published formula. [Claims](../reference/claims.md) lists each
claim with the tests that fail if it is false. All comparisons are in float64.

## How a claim is proven

![An algorithm equals three independent computations, and a mutated one does not](../pictures/conformance.svg)

**(a) The exact gradient, by enumeration.** The [MDP](../../tests/conformance/mdp.py) has two prompts, three tokens, at
most three actions and a tabular softmax policy. Each prompt has fifteen trajectories. Some stop early, so lengths
differ. An estimator runs on *every* group of n trajectories at once (n up to 4). They are one real batch, computed by
the same objects that train a model. Each group's loss is weighted by the group's probability. So the gradient is the
estimator's expectation, without sampling error. It is compared with the gradient of the objective, summed over the
same trajectories. Biased estimators are shown to be biased: they differ from every multiple of the gradient by a
stated amount.

**(b) The formula, restated.** The formula is written again in plain numpy, one rollout and one token at a time,
without any code of the algorithms. The batches are random and irregular: groups of one, a rollout without action
tokens, rewards on a tool's answer, several rows per rollout, and NaN in every column at context tokens.

**(c) The formula's derivative.** The gradient of a surrogate loss is compared with finite differences of its formula
(central, of fourth order), in which all stop-gradient factors are constant. Where π_θ, π_old and μ are equal, every
policy loss must have REINFORCE's gradient under the same reduction.

**Mutations.** A test that cannot fail proves nothing. Each [mutation](../reference/mutations.md) makes one mistake in
one formula (a flipped sign, a dropped mask, a wrong normalizer, a detached ratio, an index off by one), and the named
check must find it. The replaced text must occur in the source exactly once, so no mutation can silently stop applying.

## Run it, add to it

```
pytest tests/conformance                      # every claim
pytest tests/conformance -k "rloo or turn"    # one item
python -m tests.conformance.document          # write these pages again
```

A new estimator or loss needs a row in [checks.py](../../tests/conformance/checks.py). A test fails while a registered
name has no row.
"""
CLAIMS = f"""\
# Claims and their tests

{NOTE}

[Conformance](../internals/conformance.md) explains the families: (a) the exact gradient, by enumeration; (b) the
formula, restated; (c) the derivative of the formula. The tests are in [tests/conformance](../../tests/conformance);
"cases" counts their parametrized runs. "Within" is the largest difference that any check of the row allows."""
MUTATED = f"""\
# Mutations

{NOTE}

Each mutation replaces a text in a formula by a mistake. The named check must then fail."""


def cases(test: Callable[..., Any], item: str | None = None) -> int:
    """Return the number of parametrized runs of a test. If it is parametrized by `name`, count those of the item."""
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
    tests = "".join(f"<br>`{check.__name__}`" for check in item.checks)
    count = sum(cases(check, name) for check in item.checks)
    return f"| `{name}` | {item.family} | {item.claim}{tests} | {item.tolerance:.0e} | {count} |"


def section(title: str, items: dict[str, Item]) -> str:
    head = "| item | family | claim, and its tests | within | cases |\n|---|---|---|---|---|"
    return "\n".join([f"## {title}", "", head, *(row(name, item) for name, item in items.items())])


def cell(text: str) -> str:
    """Return source text in the form of a table's cell."""
    return f"`{text.strip()}`".replace("|", "\\|") if text.strip() else "nothing"


def broken(mutation: Mutation) -> str:
    where = mutation.function.__qualname__
    check = mutation.check_name
    return f"| `{where}` | {mutation.kind} | {cell(mutation.old)}<br>{cell(mutation.new)} | `{check}` |"


def laws() -> list[str]:
    """Return the rows of the other test files, each with the first line of its docstring."""
    checks = {check for table in CHECKS.values() for item in table.values() for check in item.checks}
    listed = {check.__module__.rpartition(".")[2] for check in checks}
    lines = []
    for path in sorted(HERE.glob("test_*.py")):
        if path.stem in listed | {"test_mutations", "test_document"}:
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        tests = sum(isinstance(node, ast.FunctionDef) and node.name.startswith("test_") for node in tree.body)
        about = (ast.get_docstring(tree) or "").splitlines()[0]
        lines.append(f"| [{path.stem}](../../tests/conformance/{path.name}) | {about} | {tests} |")
    return lines


def conformance() -> str:
    """Return the page that explains how claims are proven."""
    items = [item for table in CHECKS.values() for item in table.values()]
    tests = {check for item in items for check in item.checks}
    total = (
        f"**{len(items)} items, {len(tests)} tests in {sum(cases(test) for test in tests)} cases, "
        f"{len(MUTATIONS)} mutations.**"
    )
    others = """\
## The other laws

Property tests, known mistakes and defects of other trainers, in the same folder.

| file | what it checks | tests |
|---|---|---|"""
    return joined(INTRO, total, "\n".join([others, *laws()]))


def claims() -> str:
    """Return the page of all claims."""
    return joined(CLAIMS, *(section(title, table) for title, table in CHECKS.items()))


def mutations() -> str:
    """Return the page of all mutations."""
    head = "| function | mistake | text, and what replaces it | found by |\n|---|---|---|---|"
    return joined(MUTATED, "\n".join([head, *map(broken, MUTATIONS)]))


def joined(*parts: str) -> str:
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


PAGES = {
    DOCS / "internals/conformance.md": conformance,
    DOCS / "reference/claims.md": claims,
    DOCS / "reference/mutations.md": mutations,
}

if __name__ == "__main__":
    for path, page in PAGES.items():
        path.write_text(page(), encoding="utf-8")
