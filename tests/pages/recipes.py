"""docs/reference/recipes/: every preset, from its file."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from etude.recipes.presets import PRESETS
from tests.pages.text import linked, note

__all__ = ["PAGES"]

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

All other options have the defaults of [Configuration](../configuration/index.md).
[Algorithms](../algorithms/index.md) has the formulas."""
UPDATES = (
    *("ppo", "dapo", "gspo", "gmpo", "cispo", "sapo", "dppo", "scalerl"),
    *("clip_cov", "kl_cov", "high_entropy", "distillation"),
)
STALE = ("decoupled_ppo", "flash_reinforce", "ipo", "m2po", "vcpo", "vespo")
GROUPS = {
    "baselines.md": ("Baselines and normalization", [name for name in PRESETS if name not in {*UPDATES, *STALE}]),
    "updates.md": ("Bounds and weights of the update", UPDATES),
    "stale.md": ("Answers of an older policy", STALE),
}
"""The pages of presets, with their titles."""


def index() -> str:
    """Return the page that lists every preset."""
    parts = [INTRO]
    for uri, (title, names) in GROUPS.items():
        rows = [f"| [`{name}`]({uri}#{name}) | {linked(_comment(name).partition(': ')[0])} |" for name in names]
        parts.append("\n".join([f"## [{title}]({uri})", "", "| preset | recipe |", "|---|---|", *rows]))
    return "\n\n".join(parts) + "\n"


def group(uri: str) -> str:
    """Return a page of presets."""
    title, names = GROUPS[uri]
    about = (
        "A curve shows the accuracy on held-out problems of [the demonstration](../../internals/results.md"
        "#the-demonstration) over thirty steps, beside that of a control without updates."
    )
    return "\n\n".join([f"# {title}", note("tests.pages.document"), about, *map(_recipe, names)]) + "\n"


def _recipe(name: str) -> str:
    lines = PRESETS[name].read_text(encoding="utf-8").splitlines()
    body = "\n".join(line for line in lines if not line.startswith("#"))
    parts = [f"## {name}", linked(_comment(name)), f"```yaml\n{body.strip()}\n```"]
    if (CURVES / f"{name}.png").is_file():
        parts.append(f"![The curve of {name} and that of its control](../../curves/{name}.png)")
    return "\n\n".join(parts)


def _comment(name: str) -> str:
    """Return the comment at the beginning of a preset's file, as one paragraph."""
    lines = PRESETS[name].read_text(encoding="utf-8").splitlines()
    return " ".join(line.removeprefix("#").strip() for line in lines if line.startswith("#"))


PAGES: dict[str, Callable[[], str]] = {"index.md": index, **{uri: partial(group, uri) for uri in GROUPS}}
"""The pages of this folder, by the names of their files."""
