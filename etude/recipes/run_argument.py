"""The run that a command uses: the directory of a run or of a model comes first, options follow.

Nothing heavy is loaded here, so that a mistyped option is reported at once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

from etude.config.compose import compose
from etude.config.env import etude_command
from etude.config.secrets import MASK
from etude.config.tree import to_tree
from etude.errors import ConfigError, RunError
from etude.recipes.evaluate import EvaluationConfig
from etude.recipes.hub import locate_model, resolve_hub_names
from etude.recipes.registry import read_recipe_class
from etude.recipes.run import directory as run_directory
from etude.recipes.run.config import Run

SHARED = (
    "model.path",
    "model.tokenizer",
    "lora.path",
    "lora.publish",
    "chat",
    "rollout",
    "train.precision",
    "seed",
    "device",
    "threads",
    "observe.console",
    "observe.level",
    "checkpoint.fall_back",
)
IMAGES = ("vision.max_pixels", "vision.max_images")
READ_OPTIONS = {
    "eval": (
        "data.val",
        "data.columns",
        "data.max_prompt_length",
        "data.overlong",
        "reward",
        "judging",
        "env",
        "evaluate.samples",
        "evaluate.limit",
        "evaluate.sampling",
        "sampling.max_tokens",
        "collect.timeout",
        "collect.retries",
        "agent.path",
        "agent.sources",
        "agent.strategy",
        "agent.runners",
        "agent.max_concurrency",
        "agent.timeout",
        "agent.heartbeat_timeout",
        "agent.failed_reward",
        "agent.parameters",
        "agent.strict",
        "agent.image_hosts",
        "agent.max_calls",
        *IMAGES,
        *SHARED,
    ),
    "optimize-prompt": (
        "data.train",
        "data.val",
        "data.columns",
        "reward",
        "judging",
        "collect.retries",
        "evaluate.sampling",
        "sampling",
        "agent",
        *IMAGES,
        *SHARED,
    ),
    "generate": ("sampling", *SHARED),
    "chat": ("sampling", *SHARED),
    "serve": ("sampling", "agent.image_hosts", *IMAGES, *SHARED),
}
"""The options that each command reads; any other would do nothing there."""
ALIKE = ("model", "lora", "chat", "train", "checkpoint", "observe", "seed", "device", "threads")
"""The options that runs of all recipes have."""
OPTION = re.compile(r"[A-Za-z_]\w*(\.\w+)*=")
"""The beginning of an option; a prompt such as `2 + 2 =` does not match."""


def parse_question(overrides: Sequence[str], file: Path | None, typed: TextIO | None) -> tuple[Run, str]:
    """Return the run that `etude generate` uses, and the prompt: the words after it, or the text on standard input."""
    options = [word for word in overrides if OPTION.match(word)]
    words = [word for word in overrides if not OPTION.match(word)]
    named = any(option.startswith("model.path=") for option in options)
    first = [] if named and not (words and Path(words[0]).is_dir()) else words[:1]
    if not (first or named):
        raise ConfigError('Name a model or a run\'s directory first: `etude generate runs/mine "2 + 2 ="`.')
    run, _ = resolve_run([*first, *options], file, "generate", masked=without_secrets)
    source = first[0] if first else str(run.model.path)
    prompt = " ".join(words[len(first) :]) or (typed.read().strip() if typed is not None else "")
    if not prompt:
        raise ConfigError(f'There is no prompt. Write it after {source}: `etude generate {source} "What is 2 + 2?"`.')
    return run, prompt


def without_secrets(path: str) -> str:  # noqa: ARG001
    """Return the mask as the value of a secret that is not needed."""
    return MASK


def resolve_run(
    words: Sequence[str], file: Path | None, command: str, masked: Callable[[str], object] | None = None
) -> tuple[Run, str]:
    """Return the run that a command uses, and the name of its source. A directory of a run, or of a model, may come
    first.

    The console options of the training run do not apply.
    """
    run, source = _parse_run(words, file, command, masked)
    return resolve_hub_names(run), source


def _parse_run(
    words: Sequence[str], file: Path | None, command: str, masked: Callable[[str], object] | None
) -> tuple[Run, str]:
    if not words or OPTION.match(words[0]):
        run = compose(Run, words, file=file)
        _refuse_unread(words, command, run.evaluate)
        return run.model_copy(update={"directory": None}), "model.path"
    where, options = Path(words[0]), list(words[1:])
    if (where / run_directory.OPTIONS).exists():
        if file is not None:
            raise ConfigError(
                f"{where} is a run, whose options are in its own {run_directory.OPTIONS}: --config has no place "
                "beside it. Write the options that change as key=value."
            )
        console_option = (
            [] if any(option.startswith("observe.console=") for option in options) else ["observe.console=auto"]
        )
        run = _read_run_for_inference(where, [*options, *console_option], masked)
        _refuse_unread(options, command, run.evaluate)
        return run, words[0]
    run = compose(Run, options, file=file)
    _refuse_unread(options, command, run.evaluate)
    where = locate_model(where, "model.path")
    if not where.is_dir():
        raise RunError(f"There is no directory {where}. Give the directory of a run or of a model.")
    if run.model.path is not None:
        raise ConfigError(f"Two models were named: {where} and `model.path={run.model.path}`. Keep one of them.")
    model = run.model.model_copy(update={"path": where})
    return run.model_copy(update={"model": model, "directory": None}), words[0]


def _read_run_for_inference(where: Path, options: Sequence[str], masked: Callable[[str], object] | None) -> Run:
    """Read the run in a directory as a run that samples. A supervised run has only the shared options; the others are
    given, or defaults."""
    kind = read_recipe_class(where)
    if kind is Run:
        run = run_directory.read_run(where, options, masked=masked)
        return run.model_copy(update={"cluster": "local"})  # inference computes in this process
    if kind.head != "language":
        raise ConfigError(
            f"The run in {where} trains a model that scores, and cannot generate text. Write it with "
            f"`{etude_command()} export {where} my-judge`, and judge answers by it: `reward=reward_model "
            "reward.path=my-judge`."
        )
    options_of_run = to_tree(run_directory.read_recipe(kind, where, masked=masked))
    run = compose(Run, options, base={name: options_of_run[name] for name in ALIKE})
    return run.model_copy(update={"directory": where})


def _refuse_unread(options: Sequence[str], command: str, evaluate: EvaluationConfig) -> None:
    """Refuse an option that the command does not read, because it would have no effect."""
    for option in options:
        name = option.partition("=")[0].strip("+ ")
        hidden = name == "sampling.max_tokens" and command == "eval" and evaluate.sampling.max_tokens is not None
        if not hidden and any(name == read or name.startswith(f"{read}.") for read in READ_OPTIONS[command]):
            continue
        remedy = "Leave it out."
        if command == "eval" and name.startswith("sampling."):
            remedy = f"Sampling for scoring is set by `evaluate.{name}`."
        elif command == "eval" and name == "data.train":
            remedy = "Tasks to score on are given by `data.val`."
        elif command == "generate" and name.startswith("evaluate."):
            remedy = "Sampling is set by `sampling`, the number of answers by -n."
        elif name.startswith("evaluate."):
            remedy = "Sampling is set by `sampling`."
        raise ConfigError(f"`etude {command}` does not read `{name}`: it would change nothing here. {remedy}")
