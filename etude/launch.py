"""A whole run from a program or a notebook: what `etude train` does, with arguments that an editor completes.

    import etude

    run = etude.train("grpo", model="Qwen3-0.6B", train=["gsm8k/train.parquet"], reward="gsm8k", steps=200)

Each argument is an option of the command line, and one that is left out leaves what the preset says.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from etude.config.compose import compose
from etude.errors import ConfigError
from etude.recipes.run.build import build
from etude.recipes.run.config import Run
from etude.recipes.run.directory import TASKS_FOLDER, new_directory
from etude.recipes.run.event_loop import run_outside_event_loop
from etude.recipes.run.loop import run_loop
from etude.trainer import preset_path, refuse_duplicates, tasks_as_files

if TYPE_CHECKING:
    from etude.trainer import Tasks

__all__ = ["train"]


RUN_OPTIONS = {
    "model": "model.path",
    "reward": "reward",
    "steps": "steps",
    "tasks": "collect.tasks",
    "group_size": "collect.group_size",
    "updates": "updates",
    "learning_rate": "train.learning_rate",
    "precision": "train.precision",
    "max_prompt_length": "data.max_prompt_length",
    "max_tokens": "sampling.max_tokens",
    "temperature": "sampling.temperature",
    "loss": "loss",
    "advantage": "advantage",
    "kl": "kl",
    "lora_rank": "lora.rank",
    "device": "device",
    "seed": "seed",
}
"""The option that each argument sets."""
PATH_OPTIONS = {"train": "data.train", "val": "data.val", "directory": "directory"}
"""The options that follow from an argument, which may be other than the option's value."""


def train(
    preset: str | None = None,
    *,
    model: str | Path | None = None,
    train: Tasks | None = None,
    val: Tasks | None = None,
    reward: str | None = None,
    steps: int | None = None,
    tasks: int | None = None,
    group_size: int | None = None,
    updates: int | None = None,
    learning_rate: float | None = None,
    precision: Literal["bf16", "fp32", "fp16", "fp64"] | None = None,
    max_prompt_length: int | None = None,
    max_tokens: int | None = None,
    temperature: float | None = None,
    loss: str | None = None,
    advantage: str | None = None,
    kl: str | None = None,
    lora_rank: int | None = None,
    device: Literal["auto", "cpu", "cuda"] | None = None,
    seed: int | None = None,
    directory: str | Path | None = None,
    config: str | Path | None = None,
    options: Mapping[str, Any] | None = None,
) -> Path:
    """Train a language model by reinforcement learning, as `etude train` does; returns the run's directory.

    Works in a notebook too, where an event loop is running. Ctrl-C, or the notebook's stop, ends the step and saves it;
    called again with the same `directory`, the run goes on.

    Args:
        preset: a published recipe, such as `grpo` or `dapo`; `etude config show NAME` tells what it sets.
        model: a directory of Hugging Face's layout, or the name of a model on the hub.
        train: what to train on: files of tasks, data sets on the hub, or mappings with a `prompt` and an answer.
        val: held-out tasks, on which the model is scored before and after.
        reward: what an answer earns, by name: `exact`, `gsm8k`, `math`, …; `function` with `reward.path` is your own.
        steps: how often rollouts are collected and trained on.
        tasks: tasks of a step.
        group_size: answers to each of them, compared with each other.
        updates: optimizer steps of a step; from the second on the data is off-policy.
        learning_rate: AdamW's, at its highest.
        precision: what the model computes in.
        max_prompt_length: the longest prompt, in tokens.
        max_tokens: the longest answer, in tokens.
        temperature: of sampling.
        loss: how the policy is pushed, by name.
        advantage: how a rollout's worth is judged, by name.
        kl: what holds the policy to a reference, by name.
        lora_rank: the width of adapters that are trained in place of the weights; 0 trains the weights.
        device: what computes.
        seed: what all chance in the run is derived from.
        directory: the run's own; a new one in `runs` if left out.
        config: a file of options, over the preset and under the arguments.
        options: any other option by its name: `{"loss.clip_high": 0.28, "checkpoint.every": 5}`.
    """
    run, written = _resolve_arguments(locals())
    return run_outside_event_loop(lambda: _run_training(run, written))


def _resolve_arguments(arguments: Mapping[str, Any]) -> tuple[Run, dict[str, str]]:
    options = arguments["options"] or {}
    if callable(arguments["reward"]):
        title = getattr(arguments["reward"], "__name__", "score")
        raise ConfigError(
            "`reward` is given by name, so that a run that goes on, and processes beside it, find it again. Write the "
            f'function into a file and name it: reward="function", options={{"reward.path": "my_reward.py:{title}"}}.'
        )
    option_of = {**RUN_OPTIONS, **PATH_OPTIONS}
    refuse_duplicates(
        {option: f"`{name}=…`" for name, option in option_of.items() if arguments[name] is not None}, options
    )
    values = {option: arguments[name] for name, option in RUN_OPTIONS.items() if arguments[name] is not None}
    paths = (arguments[name] for name in ("train", "val", "directory", "config"))
    return _compose_run(arguments["preset"], {**values, **options}, *paths)


def _run_training(run: Run, written: Mapping[str, str]) -> Path:
    with build(run, tasks=written) as parts:
        run_loop(parts)
        return parts.directory


def _compose_run(
    preset: str | None,
    options: dict[str, Any],
    train: Tasks | None,
    val: Tasks | None,
    directory: str | Path | None,
    config: str | Path | None,
) -> tuple[Run, dict[str, str]]:
    """The run that the arguments ask for, and the tasks that lie in no file yet."""
    file, preset_file = None if config is None else Path(config), preset_path(preset)
    chosen = directory or options.get("directory")
    if chosen is None and file is not None:
        chosen = compose(Run, values=options, file=file, preset=preset_file).directory
    run_directory = Path(chosen or new_directory(Path("runs"), "train"))
    written: dict[str, str] = {}
    for name, tasks in {"train": train, "val": val}.items():
        if tasks is not None:
            path = run_directory / TASKS_FOLDER / f"{name}.jsonl"
            options[f"data.{name}"], text = tasks_as_files(tasks, path)
            written |= {} if text is None else {name: text}
    return compose(Run, values={**options, "directory": run_directory}, file=file, preset=preset_file), written
