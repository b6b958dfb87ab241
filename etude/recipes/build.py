"""From a run's options to the parts of its loop: the only place that knows which concrete part stands where.

What is heavy is imported when a run is built, so that whoever can start one need not load it.
"""

from __future__ import annotations

import asyncio
import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from etude.chat import Chat, Tokenizer
from etude.config.env import etude_command
from etude.config.secrets import mask, mask_text
from etude.config.tree import to_tree
from etude.data import Dataset
from etude.dispatch import LocalCrew
from etude.errors import ConfigError, DataError
from etude.observe import RunInfo, configure, format_seconds, get_log, last_step, open_run_log
from etude.protocols import Crew, Generate, Ids
from etude.recipes.evaluate import Evaluator
from etude.recipes.interrupt import Interrupt
from etude.recipes.sources import EngineSource, PromptIds
from etude.records import Task
from etude.rewards import Judge, RewardFunction
from etude.store import open_store

if TYPE_CHECKING:
    from etude.models import Model
    from etude.recipes.parts import Engine, Parts
    from etude.recipes.run import Run
    from etude.recipes.workers import PolicyWorker
    from etude.rollout import TorchEngine

__all__ = ["build", "chat_of", "evaluator_of", "policy", "prompts", "rank", "tasks"]


@contextmanager
def build(run: Run, interrupt: Interrupt | None = None) -> Iterator[Parts]:
    """Every part of the run, checked against each other, open; and closed again in the end.

    Nothing is written of a run that cannot begin. One that somebody asked to stop ends in a `KeyboardInterrupt`.
    `interrupt`: who listens for that already, where several runs follow each other.
    """
    import torch

    from etude.recipes import checks, folder, inputs

    configure(run.observe.level, mask=mask_text)
    with ExitStack() as stack:
        asked = interrupt or stack.enter_context(Interrupt(get_log("recipes").warning))
        checks.before(run)
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        if run.threads is not None:
            torch.set_num_threads(run.threads)
        directory = run.directory or folder.new_directory(Path("runs"), "train")
        run = folder.rooted(run.model_copy(update={"directory": directory}))
        assert run.directory is not None
        stack.enter_context(folder.occupy(run.directory))
        began = time.perf_counter()
        folder.compare(run.directory, run)
        inputs.check_inputs(run.directory, run)
        parts = _assembled(run, run.directory, asked, stack)
        saver, first = parts.checkpoint, parts.checkpoint.step
        try:
            if asked.asked:
                raise KeyboardInterrupt
            yield parts
        except KeyboardInterrupt:
            if saver.step < run.steps:
                saved = f"Step {saver.saved} is the last that was saved" if saver.saved else "No step was saved yet"
                told = f"Stopped at once, in step %d. {saved}; the answers drawn since are kept."
                _tell_how_to_go_on(run, told, saver.step + 1)
            raise
        if asked.asked and saver.step < run.steps:
            _tell_how_to_go_on(run, "Stopped after step %d of %d.", saver.step, run.steps)
            raise KeyboardInterrupt
        if first < saver.step == run.steps:
            _conclude(run, time.perf_counter() - began)


def _assembled(run: Run, directory: Path, interrupt: Interrupt, stack: ExitStack) -> Parts:
    """The parts, each open until the stack closes; and the run written down, once all of them are there."""
    from etude.checkpoint import Checkpoints
    from etude.recipes import checks, folder, inputs
    from etude.recipes.parts import Learners, Parts, Scoring
    from etude.recipes.saving import Saver, taken_up
    from etude.recipes.workers import PolicyWorker

    chat = chat_of(run)
    train, overlong = tasks(run, chat, "data.train", run.data.train)
    judge = stack.enter_context(Judge(run.reward, run.judging))
    crew, engine = _crew(run, chat, directory, stack)
    runner = stack.enter_context(asyncio.Runner())
    evaluator = evaluator_of(run, chat, engine, judge, runner)
    store = stack.enter_context(closing(open_store(directory / "journal.sqlite")))
    source = EngineSource(
        run.collect,
        run.sampling,
        seed=run.seed,
        dataset=train,
        order=run.data.sampler.start(len(train), run.seed, train.sources),
        prompt_ids=prompts(run, chat),
        engine=engine,
        judge=judge,
        store=store,
        runner=runner,
        at_once=run.rollout.max_running * run.ranks,
    )
    kept = Checkpoints(directory / "checkpoints", run.checkpoint.keep)
    step = taken_up(run.checkpoint, kept, crew, source, run.steps)
    inputs.keep_inputs(directory, run)
    folder.settle(directory, run)
    written = last_step(directory)
    info = RunInfo(directory.name, directory, run.steps, mask(to_tree(run)))
    log = stack.enter_context(open_run_log(run.observe, info, _headline(run), written=written))
    _introduce(run, *crew.call(PolicyWorker.parameters), len(train), step, written, source.replays)
    measured = inputs.yardstick(run)
    source.watch = log.progress
    scoring = Scoring(evaluator, directory, run.steps, store, engine, measured, log.progress)
    saver = Saver(
        *(run.checkpoint, kept, crew, source, store, run.steps, interrupt, log, scoring.best),
        measured=measured,
        step=step,
        saved=step,
    )
    learners = Learners(crew, checks.from_the_models(run), run.updates, run.loss.split_unit)
    if run.train.offload:
        learners.make_room = lambda: crew.call(PolicyWorker.make_room)
    return Parts(directory, log, source, learners, scoring, saver, engine, store, runner, overlong)


def _crew(run: Run, chat: Chat, directory: Path, stack: ExitStack) -> tuple[Crew, Engine]:
    """Whoever trains and samples: here, or in as many processes as there are to be ranks."""
    if run.ranks == 1:
        worker, engine = _rank(run, chat)
        stack.enter_context(closing(engine))
        return stack.enter_context(closing(LocalCrew(worker))), engine
    from etude.recipes.replicas import Replicas, start

    crew = stack.enter_context(closing(start(rank, run, directory / "ranks")))
    return crew, Replicas(crew)


def rank(run: Run) -> PolicyWorker:
    """The worker of one rank, made in its own process."""
    return _rank(run, chat_of(run))[0]


def _rank(run: Run, chat: Chat) -> tuple[PolicyWorker, TorchEngine]:
    """A model, the engine that samples from it, and whoever trains it."""
    from etude.recipes import checks
    from etude.rollout import TorchEngine

    model = _model(run, chat, trained=True)
    checks.room(run, model)
    engine = TorchEngine(model, chat.tokenizer, run.rollout, merge=run.lora.publish == "merged")
    try:
        return _worker(run, model, engine), engine
    except BaseException:
        engine.close()
        raise


def _tell_how_to_go_on(run: Run, told: str, *numbers: int) -> None:
    again = f"{etude_command()} train --resume {_from_here(run)}"
    get_log("recipes").warning(f"{told} Go on with: %s", *numbers, again)


def _from_here(run: Run) -> str:
    """The run's directory as a command that is typed here names it."""
    assert run.directory is not None
    here = Path.cwd()
    inside = run.directory.is_relative_to(here)
    return shlex.quote(str(run.directory.relative_to(here) if inside else run.directory))


def _conclude(run: Run, seconds: float) -> None:
    """The last word of a run that is done."""
    command, where = etude_command(), _from_here(run)
    get_log("recipes").info(
        "Done after step %d, in %s. Look: `%s plot %s`, `%s answers %s`; write the model: `%s export %s my-model`.",
        *(run.steps, format_seconds(seconds), command, where, command, where, command, where),
    )


def policy(run: Run, *, trained: bool = False) -> tuple[Model, Chat]:
    """The model of a run, and how it is spoken to: with the adapters that are trained in place of its weights, and with
    what is frozen frozen. To be trained, it brings its weights as exactly as its files do."""
    chat = chat_of(run)
    return _model(run, chat, trained=trained), chat


def chat_of(run: Run) -> Chat:
    """How the model of a run is spoken to."""
    from etude.recipes.folder import check_model

    if run.model.path is None:
        raise ConfigError("A run needs a model: give a Hugging Face model directory with `model.path=…`.")
    check_model(run.model.path)
    return run.chat.chat(Tokenizer.load(run.model.tokenizer or run.model.path))


def _model(run: Run, chat: Chat, *, trained: bool) -> Model:
    from etude.models import adapt, load
    from etude.train.optim import PRECISIONS

    assert run.model.path is not None, "a run has a model"
    tokenizer = chat.tokenizer
    model = load(run.model.path, dtype=PRECISIONS[run.train.precision], exact=trained and not run.lora.on)
    if tokenizer.size > model.vocabulary:
        raise ConfigError(
            f"The tokenizer in {tokenizer.directory} has {tokenizer.size} tokens, and the model in {run.model.path} "
            f"knows {model.vocabulary}: they belong to different models. Set `model.tokenizer`."
        )
    if run.lora.on:
        model = adapt(model, run.lora, seed=run.seed)
    if run.model.freeze:
        model.freeze(run.model.freeze)
    return model


def prompts(run: Run, chat: Chat) -> PromptIds:
    """How a task's prompt becomes ids."""

    def ids(task: Task) -> Ids:
        asked: Any = task.fields["prompt"]
        return run.data.cut(chat.prompt_ids(asked))

    return ids


def tasks(run: Run, chat: Chat, name: str, files: Sequence[str]) -> tuple[Dataset, int]:
    """The tasks of some files, without those whose prompts are too long, if that is wanted; and how many those are."""
    whole = _judged(run, Dataset.load(files, run.data.columns), name)
    fitting, counts = whole.fitting(chat.prompt_ids, run.data.max_prompt, run.data.overlong)
    over = int(counts.reduce()["overlong_prompts"])
    if over:
        done = "left out" if run.data.overlong == "filter" else "cut at the beginning"
        get_log("recipes").warning(
            f"{over} of {len(whole)} prompts in {name} are longer than `data.max_prompt={run.data.max_prompt}`: {done}."
        )
    return fitting, over


def _judged(run: Run, dataset: Dataset, name: str) -> Dataset:
    """The tasks that the reward can judge an answer to; refuses files that have none."""
    if type(run.reward).check is RewardFunction.check:
        return dataset
    wanted, why = np.ones(len(dataset), dtype=bool), ""
    for row in range(len(dataset)):
        try:
            run.reward.check(dataset.task(row, row))
        except DataError as error:
            wanted[row], why = False, why or f"{dataset.where(row)}: {error}"
    if wanted.all():
        return dataset
    if not wanted.any():
        raise DataError(f"None of the {len(dataset)} tasks in {name} can be judged. {why}")
    left = int((~wanted).sum())
    get_log("recipes").warning(f"{left} of {len(dataset)} tasks in {name} cannot be judged: left out. {why}")
    return dataset.only(wanted)


def evaluator_of(run: Run, chat: Chat, engine: Generate, judge: Judge, runner: asyncio.Runner) -> Evaluator | None:
    """Whoever scores the policy on `data.val`, if there are such tasks."""
    if not run.data.val:
        return None
    dataset, _ = tasks(run, chat, "data.val", run.data.val)
    return Evaluator(
        run.evaluate,
        sampling=run.evaluate.sampling.beside(run.sampling),
        seed=run.seed,
        dataset=dataset,
        prompt_ids=prompts(run, chat),
        engine=engine,
        judge=judge,
        timeout=run.collect.timeout,
        runner=runner,
        at_once=run.rollout.max_running * run.ranks,
    )


def _worker(run: Run, model: Model, engine: TorchEngine) -> PolicyWorker:
    from etude.recipes import checks, models
    from etude.recipes.workers import Beside, Foresee, PolicyWorker
    from etude.train import Learner, matmul_rate

    size, seconds = (8192, 0.2) if model.device.type == "cuda" else (512, 0.05)
    peak = matmul_rate(model.dtype, model.device, size, seconds)
    reference = models.reference(run, model) if checks.compares(run) else None
    held = {"ref_logp": reference} if reference is not None else {}
    taught = {"teacher_logp": models.teacher(run, model)} if checks.imitates(run) else {}
    critic = models.critic(run, model) if checks.foresees(run) else None
    alone = run.critic.warmup if critic is not None else 0
    learner = Learner(
        model,
        run.train,
        temperature=run.sampling.temperature,
        steps=(run.steps - alone) * run.updates * run.epochs,
        peak=peak,
        reference=reference if reference is not None and "full_kl" in run.outputs() else None,
    )
    beside = Beside(held | taught, critic, Foresee(run.critic.loss), alone)
    return PolicyWorker(run, learner, seed=run.seed, epochs=run.epochs, beside=beside, engine=engine)


def _headline(run: Run) -> list[str]:
    """What the line of a step shows; all the rest is in metrics.jsonl."""
    scored = f"eval/mean@{run.evaluate.samples}"
    return ["reward", scored, "loss", "answer_length", "policy_kl", "sampled_tokens_per_second"]


def _introduce(run: Run, size: int, trained: int, count: int, step: int, written: int, replays: int) -> None:
    log = get_log("recipes")
    told = f"{size:,} parameters" + (f", of which {trained:,} are trained" if trained < size else "")
    log.info("A model of %s; tasks: %d.", told, count)
    if step >= run.steps:
        log.info("All %d steps are done. To go on, ask for more of them: `steps=%d`.", step, 2 * step)
    elif step:
        log.info("Going on after step %d.", step)
    if replays:
        log.info("The answers of what was collected since, up to step %d, are read back and not drawn again.", replays)
    if step < written:
        log.info("What follows up to step %d was measured before; it is done again, and not written again.", written)
