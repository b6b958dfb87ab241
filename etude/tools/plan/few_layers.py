"""The number of layers that dry runs build of a deep model.

The layers of a model repeat: each is like the one before, or like the one before that if two kinds alternate. Some
families begin with a few other layers. The memory of all layers follows from two dry runs: one with few layers, and one
with a period more (`layer_extrapolation`). A model of few layers is built whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import nn

from etude.models import Head
from etude.models.loading import create_on_meta
from etude.models.transformers_backbone import decoder_layers
from etude.recipes.recipe import Recipe, TeacherConfig
from etude.recipes.run.config import Run
from etude.recipes.run.roles import model_rewards
from etude.recipes.supervised.runs import DistillRun, DPORun

FEWEST = 2
"""The fewest layers of a dry run that repeat: the first and the last of them are two."""


@dataclass(frozen=True)
class LayerCount:
    """The layers of a model, and of its dry runs."""

    total: int
    period: int
    """Layer i + period is like layer i."""
    start: int = 0
    """The layers at the start that do not repeat."""

    @property
    def few(self) -> int:
        """The layers of the smaller dry run: a whole number of periods fewer than all."""
        fewest = self.start + max(FEWEST, self.period)
        return fewest + (self.total - fewest) % self.period

    @property
    def repeats(self) -> int:
        """The number of periods that the smaller dry run lacks."""
        return (self.total - self.few) // self.period

    @property
    def saves_layers(self) -> bool:
        """True if two dry runs build fewer layers than one of the whole model."""
        return 2 * self.few + self.period < self.total


def count_layers(run: Recipe, roles: frozenset[str]) -> dict[Path, LayerCount]:
    """Return the models whose dry runs need few of their layers only, by directory."""
    if run.lora.path is not None or any(map(_names_layer, (*run.lora.targets, *run.model.freeze))):
        return {}
    counts = {}
    for path, head in _models(run, roles):
        config = path / "config.json"
        counts[path] = _read_layers(path, head, config.read_text(encoding="utf-8") if config.is_file() else None)
    return {path: count for path, count in counts.items() if count.saves_layers}


def _names_layer(part: str) -> bool:
    """Return True if a part of a model may be in some of its layers only."""
    return any(name[:1].isdigit() or set("[?") & set(name) for name in part.split("."))


def _models(run: Recipe, roles: frozenset[str]) -> Iterable[tuple[Path, Head]]:
    """Return the directories and the heads of the models that a dry run builds."""
    found: list[tuple[Path | None, Head]] = [(run.model.path, run.policy_head)]
    if isinstance(run, Run):
        present = roles & run.active_roles()
        found += [(run.reference.path, run.policy_head)] if "reference" in present else []
        found += _teachers(run.teacher, run.policy_head) if "teacher" in present else []
        found += [(run.critic.path, "value")] if "critic" in present else []
        found += [(reward.path, "score") for reward in model_rewards(run.reward) if "reward" in roles]
    elif isinstance(run, DPORun):
        found.append((run.reference.path, run.policy_head))
    elif isinstance(run, DistillRun):
        found += _teachers(run.teacher, run.policy_head)
    return [(path, head) for path, head in found if path is not None]


def _teachers(teacher: TeacherConfig, head: Head) -> list[tuple[Path | None, Head]]:
    return [(path, head) for path in teacher.paths.values() or [teacher.path]]


@lru_cache(maxsize=32)
def _read_layers(path: Path, head: Head, config: str | None) -> LayerCount:
    """Return the layers of a model. config: the content of its config, so that a changed one is read again."""
    del config
    model = create_on_meta(path, dtype=torch.bfloat16, head=head)
    kinds = [_describe(layer) for layer in decoder_layers(model.module, model.num_layers)]
    numbers = [kinds.index(kind) for kind in kinds]
    return min(_find_repeats(numbers), key=lambda count: (count.few, count.start))


def _find_repeats(kinds: Sequence[int]) -> Iterator[LayerCount]:
    """Yield the ways in which layers of these kinds repeat, each with the shortest period that it allows."""
    total = len(kinds)
    for start in range(total):
        rest = kinds[start:]
        period = next(period for period in range(1, len(rest) + 1) if rest[period:] == rest[:-period])
        yield LayerCount(total, period, start)


def _describe(layer: nn.Module) -> object:
    """Return what tells a layer from others: its weights, and the options of its modules, such as a window."""
    weights = [(name, tuple(weight.shape)) for name, weight in layer.named_parameters()]
    options = [
        (name, option, value)
        for name, module in layer.named_modules()
        for option, value in vars(module).items()
        if isinstance(value, int | float | str | None) and option not in ("layer_idx", "etude_index")
    ]
    return weights, options
