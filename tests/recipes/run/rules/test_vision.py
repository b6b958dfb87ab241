"""Options of images are refused where they would do nothing, and what a tower does not go with is refused early."""

from __future__ import annotations

import json
import re
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from etude.errors import ConfigError
from etude.images.addresses import to_data_url
from etude.models import load, tiny_config
from etude.recipes.run.builders.auxiliary_models import AuxiliaryLoader, load_pixels
from etude.recipes.run.rules.checks import check_run
from tests.recipes.runs import run_of
from tests.rollout.shown import png
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


@pytest.mark.parametrize(
    ("family", "options", "sentence"),
    [
        ("gemma3", {"advantage": "gae"}, "a critic of a vision-language model is not supported"),
        ("gemma3", {"ranks": 2, "mesh.tensor": 2}, "`mesh.tensor=2` does not split a model with a vision tower. Set"),
        ("gemma3", {"rollout": "vllm"}, "Images are sent to vLLM for Qwen2-VL"),
        ("smolvlm", {"rollout": "vllm"}, "vLLM takes an image's features in one run, and this processor cuts images"),
    ],
)
def test_a_model_that_is_used_for_text_too_keeps_its_options_until_a_task_has_an_image(
    world: Path, tmp_path: Path, family: str, options: dict[str, Any], sentence: str
) -> None:
    where = {"model.path": make_vlm(family), **options}
    check_run(run_of(world, **where))
    tasks = tmp_path / "tasks.jsonl"
    row = {"prompt": "<image> How many?", "images": [to_data_url(png(0, 8, 8), "image/png")], "answer": "two"}
    tasks.write_text(json.dumps(row))
    told = re.escape("Rows of `data.train` have images. ")
    with pytest.raises(ConfigError, match=rf"{told}.*{re.escape(sentence)}"):
        check_run(run_of(world, **where, **{"data.train": tasks}))


@pytest.mark.parametrize(("family", "refused"), [("qwen3_vl", True), ("gemma3", False)])
def test_a_teacher_of_text_is_for_a_policy_that_is_used_for_text_too(
    world: Path, tmp_path: Path, family: str, refused: bool
) -> None:
    where = make_vlm(family)
    policy = load(where, dtype=torch.float32)
    AutoModelForCausalLM.from_config(tiny_config(policy.vocab_size)).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(where / name, tmp_path)
    run = run_of(world, **{"model.path": where, "teacher.path": tmp_path})
    loader = AuxiliaryLoader(run, policy, pixels=load_pixels(run, policy))
    sentence = r"^The teacher in .* takes no images, and the policy does\. Give one of the same family\.$"
    with pytest.raises(ConfigError, match=sentence) if refused else nullcontext():
        loader.load_teacher(run.teacher)
