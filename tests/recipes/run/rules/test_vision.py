"""Options of images are refused where they would do nothing, and what a tower does not go with is refused early."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from etude.errors import ConfigError
from etude.recipes.run.rules.checks import check_run
from tests.recipes.runs import run_of
from tests.vlms import make_vlm


@pytest.mark.parametrize("options", [{"train": True}, {"max_pixels": 4096}, {"max_images": 2}])
def test_a_model_of_text_has_no_options_of_images(world: Path, options: dict[str, Any]) -> None:
    ((name, value),) = options.items()
    with pytest.raises(ConfigError, match=rf"`vision.{name}` is for a model that takes images, and the model in"):
        check_run(run_of(world, **{f"vision.{name}": value}))
    check_run(run_of(world, **{"model.path": make_vlm("qwen3_vl"), f"vision.{name}": value}))


@pytest.mark.parametrize(
    ("family", "options", "sentence"),
    [
        ("qwen3_vl", {"advantage": "gae"}, "a critic of a vision-language model is not supported"),
        ("qwen3_vl", {"ranks": 2, "mesh.tensor": 2}, "`mesh.tensor=2` does not split a model with a vision tower. Set"),
        ("qwen3_5", {"ranks": 2, "mesh.tensor": 2, "vision.tower": True}, "`mesh.tensor=2` does not split a model"),
        ("qwen3_5", {"vision.max_pixels": 4096}, "takes text alone. Set `vision.tower=true`, or leave it out."),
        ("qwen3_vl", {"vision.tower": True}, "always has its tower. Leave it out."),
        ("smolvlm", {"ranks": 2, "mesh.context": 2}, "`mesh.context=2` does not split a model with a vision tower"),
        (
            "qwen3_vl",
            {"rollout": "vllm", "rollout.adapters": "only", "lora.rank": 4, "vision.train": True},
            "of which they leave out those of the vision tower, and `vision.train=true` trains some. Leave one",
        ),
        ("gemma3", {"vision.max_pixels": 4096}, "takes every image in one size, so `vision.max_pixels` 4096"),
    ],
)
def test_what_a_tower_does_not_go_with_is_refused(
    world: Path, family: str, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        check_run(run_of(world, **{"model.path": make_vlm(family), **options}))


def test_a_model_that_is_used_for_text_too_keeps_its_options(world: Path) -> None:
    for options in ({"advantage": "gae"}, {"ranks": 2, "mesh.tensor": 2}):
        check_run(run_of(world, **{"model.path": make_vlm("gemma3"), **options}))
