"""A trained model put to use: scored, asked, or written out as a Hugging Face directory.

Each takes either the directory of a run, whose checkpoint it reads, or a model directory.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain, count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from etude.chat import Chat, Tokenizer
from etude.checkpoint import Checkpoint, Checkpoints, export, export_adapter
from etude.config.secrets import mask_text
from etude.errors import ConfigError, RunError
from etude.models import Model, adapter_config
from etude.observe import configure, make_console, progress
from etude.protocols import Ids
from etude.recipes import checks, folder, inputs
from etude.recipes.apart import apart
from etude.recipes.build import agents_evaluator, episodes_of, evaluator_of, policy
from etude.recipes.device import device_of
from etude.recipes.evaluate import scores, write_answers
from etude.recipes.named import without_secrets
from etude.recipes.placement import gpus_of_servers
from etude.recipes.recipe import Recipe
from etude.recipes.run import Run
from etude.recipes.sampling import derived_seed
from etude.recipes.scoring import live
from etude.recipes.serving import DTYPES, device_name
from etude.records import Message
from etude.rewards import Judge
from etude.rollout import EngineConfig, Served, ServerConfig, TorchEngine
from etude.rollout.engines import serve
from etude.train import load_weights, read_weights

__all__ = ["evaluate", "export_run", "generate", "loaded"]


def evaluate(run: Run, *, best: bool, answers: Path | None = None) -> dict[str, Any]:
    """Score a model on `data.val` and show how; returns the scores, and what was scored.

    The answers are written to the file `answers`, or beside those of the run.
    """
    return apart(lambda: _evaluated(run, best=best, answers=answers))


def _evaluated(run: Run, *, best: bool, answers: Path | None) -> dict[str, Any]:
    if not run.data.val:
        raise ConfigError("There is nothing to score on: give tasks with `data.val=[tasks.parquet]`.")
    checks.of_agents(run)
    console = make_console(run.observe.console)
    with ExitStack() as stack:
        step, chat, engine, longest = stack.enter_context(loaded(run, best=best))
        judge = stack.enter_context(Judge(live(run.reward, device_of(run)), run.judging))
        runner = stack.enter_context(asyncio.Runner())
        with progress("reading the tasks", None, console):
            if run.agent.path is None:
                evaluator = evaluator_of(run, chat, engine, judge, runner, episodes_of(run, longest, chat))
            else:
                evaluator = agents_evaluator(run, chat, engine, judge, runner, longest, stack)
        assert evaluator is not None
        with progress(f"answering {evaluator.tasks} tasks", evaluator.tasks * evaluator.samples, console) as bar:
            found = evaluator.answers(bar.advance, step=step or 0)
    written = answers or _place_of_answers(run, step)
    told: dict[str, Any] = {"tasks": evaluator.tasks, "samples": evaluator.samples}
    told |= {} if step is None else {"step": step}
    told |= {} if written is None else {"answers": str(written)}
    spent = {f"eval/{name}": value for name, value in evaluator.spent().reduce().items()}
    _show_scores(console, run, told, reduced := {**scores(found).reduce(), **spent})
    if written is not None:
        write_answers(found, written)
        console.print(Text(f"answers  {written}"), soft_wrap=True)
    return told | reduced


def _place_of_answers(run: Run, step: int | None) -> Path | None:
    """A new file among the evaluations of a run; a model that belongs to no run has none."""
    if run.directory is None or step is None:
        return None
    name = f"eval-step-{step:08d}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = chain([name], (f"{name}-{n}" for n in count(2)))
    places = (run.directory / "evaluations" / f"{each}.jsonl" for each in names)
    return next(place for place in places if not place.exists())


def _show_scores(console: Console, run: Run, told: dict[str, Any], found: dict[str, float]) -> None:
    """What was scored, and how well it did."""
    what = str(run.model.path) if "step" not in told else f"step {told['step']} of {run.directory}"
    each = "one answer" if told["samples"] == 1 else f"{told['samples']} answers"
    on = ", ".join(run.data.val)
    console.print(Text(f"{what}, on {_count(told['tasks'], 'task')} of {on}, {each} to each"), soft_wrap=True)
    table = Table("score", "value")
    for name, value in found.items():
        table.add_row(name, f"{value:.4g}")
    console.print(table)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def generate(run: Run, prompt: str, *, answers: int, best: bool, raw: bool) -> None:
    """Ask the model and print what it answers, as it is written where there is one answer.

    The prompt is a user's message where the model has a chat template; `raw` has it continued as it stands.
    """
    console = make_console(run.observe.console)
    with loaded(run, best=best) as (_, chat, engine, _):
        asked = chat.prompt_ids(prompt if raw or not chat.tokenizer.template else [Message("user", prompt)])
        asyncio.run(_answer(run, asked, engine, console, answers))


async def _answer(run: Run, asked: Ids, engine: TorchEngine | Served, console: Console, answers: int) -> None:
    params = [run.sampling.params(derived_seed(run.seed, "generate", n)) for n in range(answers)]
    if answers == 1:
        async for delta in engine.stream(asked, params[0]):
            console.print(Text(delta.text), end="", soft_wrap=True)
        console.print()
        return
    for n, completion in enumerate(await asyncio.gather(*(engine.generate(asked, each) for each in params)), start=1):
        console.print(Text.assemble((f"{n:>3}  ", "dim"), completion.text), soft_wrap=True)


def export_run(directory: Path, to: Path, *, best: bool, adapter: bool = False, fall_back: bool = False) -> None:
    """Write the model of a run's checkpoint as a directory that `from_pretrained` loads, with its adapters added in;
    or, with `adapter`, these alone, as peft loads them. fall_back: where the newest checkpoint is damaged, write the
    newest that is whole."""
    options = ["checkpoint.fall_back=true"] if fall_back else []
    run = folder.read_kind(folder.kind_of(directory), directory, options, masked=without_secrets)
    assert run.model.path is not None
    if adapter and (not run.lora.on or run.head != "language"):
        trained = "trained the model itself" if not run.lora.on else "trained a head besides, which is no adapter's"
        raise ConfigError(f"--adapter writes an adapter, and the run in {directory} {trained}. Leave it out.")
    model, chat = policy(run.model_copy(update={"device": "cpu"}))
    kept, found = _checkpoint(run, best=best)
    if adapter:
        export_adapter(read_weights(model, kept, found), adapter_config(model, run.model.path), to)
    else:
        load_weights(model, kept, found)
        generation = None if model.scores else model.module.generation_config
        export(
            model.merged_weights(),
            _described(model, chat.tokenizer),
            to,
            tokenizer=run.model.tokenizer or run.model.path,
            generation=None if generation is None else generation.to_dict(),
        )
    what = "adapter" if adapter else "model"
    make_console().print(Text(f"Wrote the {what} of step {found.step} to {to}."), soft_wrap=True)


def _described(model: Model, tokenizer: Tokenizer) -> dict[str, Any]:
    """What config.json says of a model. Of one that scores it says which token is padding, so that the score of a row
    is read before it; a padding token that also ends answers is not named, because the end itself would be passed over:
    such a model scores one row at a time."""
    config = model.described()
    if model.scores:
        config["pad_token_id"] = None if tokenizer.pad_id in tokenizer.eos_ids else tokenizer.pad_id
    return config


# -- what they share --------------------------------------------------------------------------------------------------


@contextmanager
def loaded(run: Run, *, best: bool) -> Iterator[tuple[int | None, Chat, TorchEngine | Served, int]]:
    """The model of a run's checkpoint, of which step that is, or a model that belongs to no run; ready to be asked for
    as many tokens as it has room for."""
    if best and run.directory is None:
        raise ConfigError("--best chooses among the checkpoints of a run, and no run was named. Leave it out.")
    configure(run.observe.level, mask=mask_text)
    threads = torch.get_num_threads()
    torch.set_num_threads(run.threads or threads)
    model, chat = policy(run)
    step = None if run.directory is None else _load_checkpoint(run, model, best=best)
    try:
        with _sampler(run, model, chat) as engine:
            yield step, chat, engine, checks.longest(run, model)
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _sampler(run: Run, model: Model, chat: Chat) -> Iterator[TorchEngine | Served]:
    """What samples from a model: the embedded engine, or servers that are given its weights as files."""
    config = run.rollout
    if isinstance(config, EngineConfig):
        with TorchEngine(model, chat.tokenizer, config, merge=run.lora.publish == "merged") as engine:
            yield engine
        return
    assert isinstance(config, ServerConfig) and run.model.path is not None
    checks.of_servers(run)
    device = device_name(run)
    if device == "cuda":
        config = config.model_copy(update={"devices": gpus_of_servers(run, config, learns=False)})
    seen = run.directory if config.url else None  # by servers elsewhere
    with TemporaryDirectory(prefix="etude-", dir=seen) as made:
        where, logs, untied = Path(made) / "model", Path(made) / "logs", config.untied(device)
        described = model.described() | ({"tie_word_embeddings": False} if untied else {})
        weights = model.untied_weights() if untied else model.merged_weights()
        export(weights, described, where, tokenizer=run.model.tokenizer or run.model.path)
        dtype, threads = DTYPES[run.train.precision], checks.threads_of(run)
        console = make_console(run.observe.console)
        with serve(
            config, where, chat.tokenizer, dtype=dtype, device=device, logs=logs, threads=threads, console=console
        ) as served:
            if config.url:
                asyncio.run(served.load(where, 0))
            yield served


def _load_checkpoint(run: Recipe, model: Model, *, best: bool) -> int:
    """Bring a run's checkpoint into the model; returns its step."""
    kept, found = _checkpoint(run, best=best)
    load_weights(model, kept, found)
    return found.step


def _checkpoint(run: Recipe, *, best: bool) -> tuple[Checkpoints, Checkpoint]:
    """A run's checkpoint, and those it is one of."""
    assert run.directory is not None
    kept = Checkpoints(run.directory / "checkpoints", run.checkpoint.keep)
    found = kept.best() if best else kept.newest(fall_back=run.checkpoint.fall_back)
    if found is None:
        which = "best checkpoint: none was scored and saved" if best else "checkpoint yet"
        raise RunError(f"{run.directory} has no {which}. Let the run go on, or name a model directory instead.")
    inputs.check_base(run.directory, run)
    return kept, found
