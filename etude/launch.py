"""`etude.train`: a whole run from a program or a notebook, like `etude train` on the command line.

    import etude

    run = etude.train("grpo", model="Qwen3-0.6B", train=["gsm8k/train.parquet"], reward="gsm8k", steps=200)

Each argument is an option of the command line. An argument that is left out keeps the preset's value. An editor can
complete the arguments.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

from etude.config.compose import compose
from etude.config.suggestions import suggest_name
from etude.data.files import row_to_json
from etude.errors import ConfigError, UnknownChoiceError
from etude.recipes.presets import PRESETS
from etude.recipes.run import loop
from etude.recipes.run.config import Run
from etude.recipes.run.directory import TASKS_FOLDER, new_directory

Tasks: TypeAlias = "str | Path | Sequence[str | Path] | Iterable[Mapping[str, Any]]"
"""Files of tasks, or tasks as mappings."""
RUN_OPTIONS = {
    "model": "model.path",
    "reward": "reward",
    "steps": "steps",
    "tasks": "collect.tasks",
    "group_size": "collect.group_size",
    "mini_batches": "mini_batches",
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
"""The option of each argument."""
PATH_OPTIONS = {"train": "data.train", "val": "data.val", "directory": "directory"}
"""The options of arguments that need a conversion: tasks become files, and the directory gets a default."""


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
    mini_batches: int | None = None,
    learning_rate: float | None = None,
    precision: Literal["auto", "bf16", "fp32", "fp16", "fp64"] | None = None,
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
    """Train a language model by reinforcement learning, like `etude train`. Return the run's directory.

    It also works in a notebook, where an event loop is running. Ctrl-C, or the notebook's stop button, finishes the
    step and saves it. A later call with the same `directory` resumes the run.

    Args:
        preset: a published recipe, such as `grpo` or `dapo`; `etude config show NAME` prints its options.
        model: a directory in the Hugging Face format, or the name of a model on the hub.
        train: training tasks: files, data sets on the hub, or mappings with a `prompt` and an answer.
        val: held-out tasks, on which the model is scored before and after training.
        reward: reward function by name: `exact_match`, `gsm8k`, `math`, …; `function` with `reward.path` is your own.
        steps: training steps; each collects rollouts and trains on them.
        tasks: tasks of a step; more give a less noisy gradient and take longer.
        group_size: answers for each task, compared with each other; more give better baselines and take longer.
        mini_batches: optimizer steps per pass over the rollouts of a step; from the second on the data is off-policy.
        learning_rate: peak learning rate of AdamW; larger learns faster and less stably.
        precision: dtype of the model's computation.
        max_prompt_length: longest prompt, in tokens.
        max_tokens: longest answer, in tokens; more takes more memory and time.
        temperature: sampling temperature; larger explores more.
        loss: policy loss, by name.
        advantage: advantage estimator, by name.
        kl: KL term to the reference model, by name.
        lora_rank: rank of LoRA adapters, larger has more parameters; 0 trains all weights.
        device: device of the computation.
        seed: seed of all random numbers of the run.
        directory: directory of the run; by default a new one in `runs`.
        config: YAML file of options, applied after the preset and before the arguments.
        options: other options by name: `{"loss.clip_high": 0.28, "checkpoint.every": 5}`.
    """
    run, written = _resolve_arguments(locals())
    return loop.train(run, tasks=written)


def _resolve_arguments(arguments: Mapping[str, Any]) -> tuple[Run, dict[str, str]]:
    options = arguments["options"] or {}
    if callable(arguments["reward"]):
        title = getattr(arguments["reward"], "__name__", "score")
        raise ConfigError(
            "`reward` is a name, so that a resumed run and other processes find the reward again. Write the function "
            f'into a file and name it: reward="function", options={{"reward.path": "my_reward.py:{title}"}}.'
        )
    option_of = {**RUN_OPTIONS, **PATH_OPTIONS}
    refuse_duplicates(
        {option: f"`{name}=…`" for name, option in option_of.items() if arguments[name] is not None}, options
    )
    values = {option: arguments[name] for name, option in RUN_OPTIONS.items() if arguments[name] is not None}
    tasks = {name: arguments[name] for name in ("train", "val")}
    return compose_with_tasks({**values, **options}, tasks, *map(arguments.get, ("preset", "directory", "config")))


def compose_with_tasks(
    options: Mapping[str, Any],
    tasks: Mapping[str, Tasks | None],
    preset: str | None = None,
    directory: str | Path | None = None,
    config: str | Path | None = None,
) -> tuple[Run, dict[str, str]]:
    """Return the run of these options and tasks, by `train` and `val`, and the text of each tasks file that is still to
    be written. directory: by default that of the options or of the file `config`, else a new one in `runs`."""
    values = dict(options)
    file = None if config is None else Path(config)
    preset_file = preset_path(preset)
    directory = directory or values.get("directory")
    if directory is None and file is not None:
        directory = compose(Run, values=values, file=file, preset=preset_file).directory
    values["directory"] = Path(directory or new_directory(Path("runs"), "train"))
    written: dict[str, str] = {}
    for name, given in tasks.items():
        if given is not None:
            path = values["directory"] / TASKS_FOLDER / f"{name}.jsonl"
            values[f"data.{name}"], text = tasks_as_files(given, path)
            written |= {} if text is None else {name: text}
    run = compose(Run, values=values, file=file, preset=preset_file)
    return run.with_preset(preset_file), written


def preset_path(name: str | None) -> Path | None:
    """Return the file of a preset; None for no preset."""
    if name is not None and name not in PRESETS:
        hint = " Options are given by their names: `steps=3`, or in `options`." if "=" in name else ""
        raise UnknownChoiceError(
            f"There is no preset '{name}'.{suggest_name(name, PRESETS)}{hint} The presets are {', '.join(PRESETS)}."
        )
    return None if name is None else PRESETS[name]


def refuse_duplicates(arguments: Mapping[str, str], options: Mapping[str, Any]) -> None:
    """Refuse an option that is also given as an argument. arguments: the argument's name, by option."""
    by_option = {option.removesuffix(".name"): option for option in options}
    for option, name in arguments.items():
        if option in by_option:
            raise ConfigError(f"`{by_option[option]}` is in `options`, and is given as {name} too. Give it once.")


def tasks_as_files(tasks: Tasks, path: Path) -> tuple[list[str], str | None]:
    """Return the files of the tasks, and the text to write if the tasks are mappings.

    Mappings go to one file, `path`, so that a run can resume. The text is None if the tasks are files already.
    """
    if isinstance(tasks, str | Path):
        return [str(tasks)], None
    rows = list(tasks)
    if rows and all(isinstance(row, str | Path) for row in rows):
        return [str(row) for row in rows], None
    if not rows:
        raise ConfigError(
            "The list of tasks is empty. Give at least one, such as `[{'question': '2+2', 'answer': '4'}]`."
        )
    mappings = [row for row in rows if isinstance(row, Mapping)]
    if wrong := [row for row in rows if not isinstance(row, Mapping)]:
        raise ConfigError(
            f"Tasks are mappings, such as `{{'question': '2+2', 'answer': '4'}}`, or files of them; a "
            f"{type(wrong[0]).__name__} was given."
        )
    return [str(path)], "".join(row_to_json(row, f"Task {place}") + "\n" for place, row in enumerate(mappings))
