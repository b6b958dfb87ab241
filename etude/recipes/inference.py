"""Uses of a trained model: scoring it, sampling from it, or exporting it as a Hugging Face directory.

Each takes either the directory of a run, whose checkpoint it reads, or a model directory.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain, count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from etude.chat import ChatRenderer, Tokenizer
from etude.checkpoint import Checkpoint, CheckpointManager, check_export_directory, export, export_adapter
from etude.config.secrets import mask_text
from etude.config.tree import replace_option
from etude.errors import ConfigError, RunError
from etude.models import Model, adapter_config
from etude.models.published_names import PublishedNames
from etude.models.weight_files import find_weights
from etude.observe import configure_logging, make_console, progress
from etude.protocols import Ids
from etude.recipes.collect.sampling import derived_seed
from etude.recipes.evaluate import compute_scores, write_answers
from etude.recipes.event_loop import LoopThread, run_outside_event_loop
from etude.recipes.recipe import Recipe
from etude.recipes.registry import read_recipe_class
from etude.recipes.run import directory as run_directory
from etude.recipes.run.builders import lengths
from etude.recipes.run.builders.collection import RolloutBuilder
from etude.recipes.run.builders.hubs import name_task_files, open_hubs
from etude.recipes.run.builders.policy import load_policy
from etude.recipes.run.config import Run
from etude.recipes.run.machine.placement import gpus_of_servers
from etude.recipes.run.resume import inputs
from etude.recipes.run.resume.precision import resolve_precision
from etude.recipes.run.rules import checks
from etude.recipes.run_argument import without_secrets
from etude.recipes.servers.reward_models import load_reward_models
from etude.recipes.servers.server_weights import DTYPES, server_device_kind
from etude.records import Message, SamplingParams
from etude.rewards import Judge
from etude.rollout import ServerConfig, ServerPool, TorchEngine, TorchEngineConfig
from etude.rollout.engine_thread import release_omp_workers
from etude.rollout.image_reader import ImageReader
from etude.rollout.launch import start_servers
from etude.rollout.served_images import ImageOptions
from etude.train import load_weights, read_weights


def evaluate(run: Run, *, best: bool, answers: Path | None = None) -> dict[str, Any]:
    """Score a model on `data.val` and show the scores; return them with a description of the evaluation.

    answers: the file for the answers; by default one in the run's directory.
    """
    return run_outside_event_loop(lambda: _evaluated(run, best=best, answers=answers))


def _evaluated(run: Run, *, best: bool, answers: Path | None) -> dict[str, Any]:
    checks.check_agents(run)
    console = make_console(run.observe.console)
    asked = run.data.val
    with ExitStack() as stack:
        drawn = None if run.directory else Path(stack.enter_context(TemporaryDirectory(prefix="etude-")))
        run = name_task_files(run, drawn).model_copy(update={"directory": run.directory})
        hubs = stack.enter_context(open_hubs(run))
        step, chat, engine, max_total_tokens = stack.enter_context(load_for_inference(run, best=best))
        judge = stack.enter_context(Judge(load_reward_models(run.reward, run.compute_device()), run.judging))
        loop = stack.enter_context(LoopThread(release_omp_workers))
        with progress("reading the tasks", None, console):
            rollouts = RolloutBuilder(run, chat, engine, judge, loop, max_total_tokens, hubs)
            evaluator = rollouts.build_evaluator(stack)
        assert evaluator is not None
        with progress(f"answering {evaluator.tasks} tasks", evaluator.tasks * evaluator.samples, console) as bar:
            results = evaluator.answer_all(bar.advance, step=step or 0)
    path = answers or _answers_path(run.directory, step)
    summary: dict[str, Any] = {"tasks": evaluator.tasks, "samples": evaluator.samples}
    summary |= {} if step is None else {"step": step}
    summary |= {} if path is None else {"answers": str(path)}
    judge_metrics = {f"eval/{name}": value for name, value in evaluator.pop_metrics().reduce().items()}
    reduced = {**compute_scores(results).reduce(), **judge_metrics}
    scored = str(run.model.path) if step is None else f"step {step} of {run.directory}"
    _show_scores(console, scored, asked, summary, reduced)
    if path is not None:
        write_answers(results, path)
        console.print(Text(f"answers  {path}"), soft_wrap=True)
    return summary | reduced


def _answers_path(directory: Path | None, step: int | None) -> Path | None:
    """Return a new file among the evaluations of a run; None for a model without a run."""
    if directory is None or step is None:
        return None
    name = f"eval-step-{step:08d}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = chain([name], (f"{name}-{n}" for n in count(2)))
    files = (directory / "evaluations" / f"{candidate}.jsonl" for candidate in names)
    return next(file for file in files if not file.exists())


def _show_scores(
    console: Console, scored: str, val: Sequence[str], summary: dict[str, Any], scores: dict[str, float]
) -> None:
    """Print the evaluated model, the tasks and the scores."""
    per_task = "one answer" if summary["samples"] == 1 else f"{summary['samples']} answers"
    data = ", ".join(val)
    console.print(
        Text(f"{scored}, on {_count(summary['tasks'], 'task')} of {data}, {per_task} to each"), soft_wrap=True
    )
    table = Table("score", "value")
    for name, value in scores.items():
        table.add_row(name, f"{value:.4g}")
    console.print(table)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def generate(run: Run, prompt: str, *, answers: int, best: bool, raw: bool) -> None:
    """Sample answers of the model and print them; a single answer is streamed.

    The prompt is a user's message if the model has a chat template. raw: continue the prompt as it is.
    """
    console = make_console(run.observe.console)
    with load_for_inference(run, best=best) as (_, chat, engine, _):
        prompt_ids = chat.prompt_ids(prompt if raw or not chat.tokenizer.template else [Message("user", prompt)])
        seeds = [derived_seed(run.seed, "generate", number) for number in range(answers)]
        params = [run.sampling.params(seed) for seed in seeds]
        asyncio.run(_answer(prompt_ids, params, engine, console))


async def _answer(
    prompt_ids: Ids, params: Sequence[SamplingParams], engine: TorchEngine | ServerPool, console: Console
) -> None:
    if len(params) == 1:
        async for delta in engine.stream(prompt_ids, params[0]):
            console.print(Text(delta.text), end="", soft_wrap=True)
        console.print()
        return
    for n, completion in enumerate(
        await asyncio.gather(*(engine.generate(prompt_ids, parameters) for parameters in params)), start=1
    ):
        console.print(Text.assemble((f"{n:>3}  ", "dim"), completion.text), soft_wrap=True)


def export_run(directory: Path, to: Path, *, best: bool, adapter: bool = False, fall_back: bool = False) -> None:
    """Export the model of a run's checkpoint as a directory that `from_pretrained` loads, with its adapters merged.

    adapter: export only the adapters, in peft's format. fall_back: if the newest checkpoint is damaged, export the
    newest intact one.
    """
    options = ["checkpoint.fall_back=true"] if fall_back else []
    run = run_directory.read_recipe(read_recipe_class(directory), directory, options, masked=without_secrets)
    assert run.model.path is not None
    if adapter and (not run.lora.is_enabled or run.head != "language"):
        trained = (
            "trained the model itself"
            if not run.lora.is_enabled
            else "also trained a head, which an adapter cannot hold"
        )
        raise ConfigError(f"--adapter writes an adapter, and the run in {directory} {trained}. Leave it out.")
    check_export_directory(to)
    model, chat = load_policy(run.model_copy(update={"device": "cpu"}))
    checkpoints, checkpoint = _find_checkpoint(run, best=best)
    if adapter:
        export_adapter(read_weights(model, checkpoints, checkpoint), adapter_config(model, run.model.path), to)
    else:
        load_weights(model, checkpoints, checkpoint)
        generation = None if model.has_score_head else model.module.generation_config
        export(
            PublishedNames(model.module).publish(model.with_buffers(model.merged_weights())),
            _described(model, chat.tokenizer),
            to,
            tokenizer=run.model.tokenizer or run.model.path,
            generation=None if generation is None else generation.to_dict(),
            processor=run.processor_files,
        )
    what = "adapter" if adapter else "model"
    make_console().print(Text(f"Wrote the {what} of step {checkpoint.step} to {to}."), soft_wrap=True)


def _described(model: Model, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the config.json of a model.

    A scoring model also names its padding token, so that the score of a row is read before the padding. A padding token
    that also ends answers is not named, because the end itself would be skipped. Such a model scores one row at a time.
    """
    config = model.config_dict()
    if model.has_score_head:
        config["pad_token_id"] = None if tokenizer.pad_id in tokenizer.eos_ids else tokenizer.pad_id
    return config


# -- shared helpers ---------------------------------------------------------------------------------------------------


@contextmanager
def load_for_inference(
    run: Run, *, best: bool
) -> Iterator[tuple[int | None, ChatRenderer, TorchEngine | ServerPool, int]]:
    """Load the model of a run's checkpoint, or a model without a run, ready to sample.

    Yields the checkpoint's step, the chat renderer, the engine, and the most tokens that it can hold.
    """
    if best and run.directory is None:
        raise ConfigError("--best chooses among the checkpoints of a run, and no run was named. Leave it out.")
    configure_logging(run.observe.level, mask=mask_text)
    run, threads = resolve_precision(run), torch.get_num_threads()
    torch.set_num_threads(run.threads or threads)
    model, chat = load_policy(run)
    step = None
    if run.directory is not None:
        checkpoints, checkpoint = _find_checkpoint(run, best=best)
        load_weights(model, checkpoints, checkpoint)
        step = checkpoint.step
    try:
        with _open_engine(run, model, chat) as engine:
            yield step, chat, engine, lengths.max_total_tokens(model, run.embedded_engine)
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _open_engine(run: Run, model: Model, chat: ChatRenderer) -> Iterator[TorchEngine | ServerPool]:
    """Open the engine that samples from a model: the embedded engine, or servers that load its weights from files."""
    config = run.rollout
    if isinstance(config, TorchEngineConfig):
        merge = run.lora.publish == "merged"
        images = ImageReader.of(model, run.model.path, run.max_pixels)
        with TorchEngine(model, chat.tokenizer, config, merge=merge, images=images) as engine:
            yield engine
        return
    assert isinstance(config, ServerConfig) and run.model.path is not None
    # servers load files with the adapters merged, however the run published them
    checks.check_servers(replace_option(run, "lora.publish", "adapter"))
    device = server_device_kind(run.compute_device())
    if device == "cuda":
        config = config.model_copy(update={"devices": gpus_of_servers(config, 0)})
    parent = run.directory if config.url else None  # so that remote servers can read it
    with TemporaryDirectory(prefix="etude-", dir=parent) as temporary:
        where = Path(temporary) / "model"
        logs = Path(temporary) / "logs"
        untied = config.needs_untied_head(device)
        described = model.config_dict() | ({"tie_word_embeddings": False} if untied else {})
        weights = model.with_buffers(model.untied_weights() if untied else model.merged_weights())
        # servers that run may serve the whole model that this one is a part of
        names = PublishedNames(model.module, find_weights(run.model.path) if config.url else ())
        tokenizer = run.model.tokenizer or run.model.path
        export(names.publish(weights), described, where, tokenizer=tokenizer, processor=run.processor_files)
        dtype, threads = DTYPES[run.train.precision], run.rank_threads()
        console = make_console(run.observe.console)
        with start_servers(
            config,
            where,
            chat.tokenizer,
            dtype=dtype,
            device=device,
            logs=logs,
            threads=threads,
            images=ImageOptions(run.max_pixels, run.vision.max_images, run.vision.tower),
            console=console,
        ) as served:
            if config.url:
                asyncio.run(served.load(where, 0))
            yield served


def _find_checkpoint(run: Recipe, *, best: bool) -> tuple[CheckpointManager, Checkpoint]:
    """Return a run's checkpoint and its checkpoint manager."""
    assert run.directory is not None
    checkpoints = CheckpointManager(run.directory / "checkpoints", run.checkpoint.keep)
    checkpoint = checkpoints.best() if best else checkpoints.newest(fall_back=run.checkpoint.fall_back)
    if checkpoint is None:
        which = "best checkpoint: none was scored and saved" if best else "checkpoint yet"
        raise RunError(f"{run.directory} has no {which}. Let the run continue, or name a model directory instead.")
    inputs.RunInputs(run.directory, run).check_base_model()
    return checkpoints, checkpoint
