"""A trained model put to use: scored, asked, or written out as a Hugging Face directory.

Each takes either the directory of a run, whose checkpoint it reads, or a model directory.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from etude.chat import Chat
from etude.checkpoint import Checkpoints, export
from etude.config.compose import compose
from etude.config.secrets import MASK, mask_text
from etude.errors import ConfigError, RunError
from etude.models import Model
from etude.observe import configure, make_console, progress
from etude.recipes import folder
from etude.recipes.build import evaluator_of, policy
from etude.recipes.evaluate import scores, write_answers
from etude.recipes.run import Run
from etude.recipes.sampling import derived_seed
from etude.records import Message
from etude.rewards import Judge
from etude.rollout import TorchEngine
from etude.train import load_weights

__all__ = ["evaluate", "export_run", "generate"]

TRACKED = ("observe.every=", "observe.tensorboard", "observe.wandb", "observe.mlflow")
OPTION = re.compile(r"[A-Za-z_][\w.]*=")
"""How an option of the run begins; a prompt such as `2 + 2 =` does not."""


def evaluate(overrides: Sequence[str], file: Path | None, *, best: bool) -> dict[str, Any]:
    """Score a model on `data.val` and show how; returns the scores."""
    run, _ = _asked(overrides, file, "eval")
    if not run.data.val:
        raise ConfigError("There is nothing to score on: give tasks with `data.val=[tasks.parquet]`.")
    console = make_console(run.observe.console)
    with (
        _engine(run, best=best) as (_, chat, engine),
        Judge(run.reward, run.judging) as judge,
        asyncio.Runner() as runner,
    ):
        evaluator = evaluator_of(run, chat, engine, judge, runner)
        assert evaluator is not None
        with progress(f"answering {evaluator.tasks} tasks", None, console):
            answers = evaluator.answers()
    found = scores(answers).reduce()
    table = Table("score", "value")
    for name, value in found.items():
        table.add_row(name, f"{value:.4g}")
    console.print(table)
    if run.directory is not None:
        path = run.directory / "evaluations" / "eval.jsonl"
        write_answers(answers, path)
        console.print(Text(f"answers  {path}"), soft_wrap=True)
    return dict(found)


def generate(overrides: Sequence[str], file: Path | None, *, answers: int, best: bool, typed: TextIO | None) -> None:
    """Ask the model and print what it answers, as it is written where there is one answer."""
    options = [word for word in overrides if OPTION.match(word)]
    words = [word for word in overrides if not OPTION.match(word)]
    if not words:
        raise ConfigError('Name a model directory or a run\'s directory first: `etude generate runs/mine "2 + 2 ="`.')
    run, source = _asked([words[0], *options], file, "generate", masked=_left_out)
    prompt = " ".join(words[1:]) or (typed.read().strip() if typed is not None else "")
    if not prompt:
        raise ConfigError(f'There is no prompt. Write it after {source}: `etude generate {source} "What is 2 + 2?"`.')
    console = make_console(run.observe.console)
    with _engine(run, best=best) as (_, chat, engine):
        asyncio.run(_answer(run, chat, engine, console, prompt, answers))


async def _answer(run: Run, chat: Chat, engine: TorchEngine, console: Console, prompt: str, answers: int) -> None:
    asked = chat.prompt_ids([Message("user", prompt)] if chat.tokenizer.template else prompt)
    params = [run.sampling.params(derived_seed(run.seed, "generate", n)) for n in range(answers)]
    if answers == 1:
        async for delta in engine.stream(asked, params[0]):
            console.print(Text(delta.text), end="", soft_wrap=True)
        console.print()
        return
    for n, completion in enumerate(await asyncio.gather(*(engine.generate(asked, each) for each in params)), start=1):
        console.print(Text.assemble((f"{n:>3}  ", "dim"), completion.text), soft_wrap=True)


def export_run(directory: Path, to: Path, *, best: bool) -> None:
    """Write the model of a run's checkpoint as a directory that `from_pretrained` loads."""
    run = folder.read_run(directory, masked=_left_out)
    assert run.model.path is not None
    model, _ = policy(run)
    step = _load_checkpoint(run, model, best=best)
    config, generation = model.module.config.to_dict(), model.module.generation_config
    export(
        model.named_weights(),
        config,
        to,
        tokenizer=run.model.tokenizer or run.model.path,
        generation=None if generation is None else generation.to_dict(),
    )
    make_console().print(Text(f"Wrote the model of step {step} to {to}."), soft_wrap=True)


# -- what they share --------------------------------------------------------------------------------------------------


def _left_out(path: str) -> str:  # noqa: ARG001
    """What stands for a secret that is not needed."""
    return MASK


def _asked(
    words: Sequence[str], file: Path | None, command: str, masked: Callable[[str], object] | None = None
) -> tuple[Run, str]:
    """The run that is asked about: a run's directory, or a model's, may stand first.

    How a run showed itself as it was trained is no matter of those who ask it.
    """
    for word in words:
        if word.startswith(TRACKED):
            raise ConfigError(
                f"`{word.partition('=')[0]}` speaks of a run that is being trained: `etude {command}` measures no "
                f"steps and writes to no tracker. Leave it out."
            )
    if not words or OPTION.match(words[0]):
        return compose(Run, words, file=file), "model.path"
    where, options = Path(words[0]), list(words[1:])
    if (where / folder.OPTIONS).exists():
        shown = [] if any(option.startswith("observe.console=") for option in options) else ["observe.console=auto"]
        return folder.read_run(where, [*options, *shown], masked=masked), words[0]
    if not where.is_dir():
        raise RunError(f"There is no directory {where}. Give the directory of a run or of a model.")
    run = compose(Run, options, file=file)
    return run.model_copy(update={"model": run.model.model_copy(update={"path": where})}), words[0]


@contextmanager
def _engine(run: Run, *, best: bool) -> Iterator[tuple[Model, Chat, TorchEngine]]:
    configure(run.observe.level, mask=mask_text)
    threads = torch.get_num_threads()
    torch.set_num_threads(run.threads or threads)
    model, chat = policy(run)
    if run.directory is not None:
        _load_checkpoint(run, model, best=best)
    engine = TorchEngine(model, chat.tokenizer, run.rollout)
    try:
        yield model, chat, engine
    finally:
        engine.close()
        torch.set_num_threads(threads)


def _load_checkpoint(run: Run, model: Model, *, best: bool) -> int:
    """Bring a run's checkpoint into the model; returns its step."""
    assert run.directory is not None
    kept = Checkpoints(run.directory / "checkpoints", run.checkpoint.keep)
    found = kept.best() if best else kept.newest(fall_back=run.checkpoint.fall_back)
    if found is None:
        which = "best checkpoint: none was scored and saved" if best else "checkpoint yet"
        raise RunError(f"{run.directory} has no {which}. Let the run go on, or name a model directory instead.")
    load_weights(model, kept, found)
    return found.step
