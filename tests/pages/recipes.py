"""docs/reference/recipes.md: every preset, from its file."""

from __future__ import annotations

from pathlib import Path

from etude.recipes.presets import PRESETS
from tests.pages.text import linked, note

__all__ = ["page"]

ROOT = Path(__file__).parents[2]
CURVES = ROOT / "docs" / "curves"
"""The folder of the curves of recipes, if they were drawn: NAME.png."""
INTRO = f"""\
# Recipes

{note("tests.pages.document")}

A preset is the name of a published recipe. It sets the options of the paper, and no others. It is the first word after
`etude train`, and the options after it override those of the preset:

```sh
etude train dapo model.path=my-model data.train=[tasks.jsonl] reward=math
etude train dapo loss=gspo --config mine.yaml model.path=my-model data.train=[tasks.jsonl]
etude config show dapo
```

All other options have the defaults of [Configuration](configuration.md). [Algorithms](algorithms.md) has the formulas.
"""


def page() -> str:
    """Return the page."""
    comments = {name: _comment(path) for name, path in PRESETS.items()}
    table = ["| preset | recipe |", "|---|---|"]
    table += [f"| [`{name}`](#{name}) | {linked(_first(text))} |" for name, text in comments.items()]
    parts = [INTRO, "\n".join(table), *(_recipe(name, text) for name, text in comments.items())]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _recipe(name: str, text: str) -> str:
    path = PRESETS[name]
    body = "\n".join(line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#"))
    parts = [f"## {name}", linked(text), f"```yaml\n{body.strip()}\n```"]
    if (CURVES / f"{name}.png").is_file():
        parts.append(f"![The curve of {name} and that of its control](../curves/{name}.png)")
    return "\n\n".join(parts)


def _comment(path: Path) -> str:
    """Return the comment at the beginning of a preset's file, as one paragraph."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return " ".join(line.removeprefix("#").strip() for line in lines if line.startswith("#"))


def _first(text: str) -> str:
    """Return the text before the first colon."""
    return text.partition(": ")[0]
