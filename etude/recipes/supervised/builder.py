"""Builds the components of a supervised run from its options: its loss decides which auxiliary model there is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from etude.algorithms.losses.distill import TopKDistillation
from etude.batch import OWN_NAMES
from etude.chat import ChatRenderer
from etude.checkpoint import CheckpointManager
from etude.config.secrets import mask
from etude.config.together import problems_of, told_together
from etude.config.tree import to_tree
from etude.data.examples import Examples
from etude.dispatch import LocalCrew
from etude.errors import ConfigError
from etude.images.pixel_cache import PixelCache
from etude.models import Model, read_context_length
from etude.observe import RunInfo, get_logger, make_console, open_run_log, progress, read_last_step
from etude.protocols import Crew
from etude.recipes.event_loop import run_outside_event_loop
from etude.recipes.hub import resolve_hub_names
from etude.recipes.interrupt import Interrupt
from etude.recipes.recipe import ReferenceConfig
from etude.recipes.run import directory as run_directory
from etude.recipes.run.builders.auxiliary_models import AuxiliaryLoader, build_mesh, load_pixels
from etude.recipes.run.builders.policy import PolicyLoader, build_chat_renderer
from etude.recipes.run.resume import inputs
from etude.recipes.run.rules import checks
from etude.recipes.run.rules.required import find_missing_options
from etude.recipes.run.rules.sources import DataSources
from etude.recipes.run.rules.vision import check_vision
from etude.recipes.run.session import log_start, run_session
from etude.recipes.run.steps.save_resume import CheckpointSaver, resume_run
from etude.recipes.servers.rank_engines import start_ranks
from etude.recipes.supervised.config import SupervisedRun, ValidationConfig
from etude.recipes.supervised.examples import ExampleStream
from etude.recipes.supervised.loop import PeriodicValidation, SupervisedComponents, run_supervised_loop
from etude.recipes.supervised.runs import DistillRun, DistillTeacherConfig, DPORun
from etude.recipes.supervised.worker import (
    Annotate,
    SupervisedLearner,
    SupervisedWorker,
    annotate_with_reference,
    annotate_with_teacher,
)
from etude.recipes.workers.utilization import measure_peak_flops
from etude.train import Learner, ScoringModel
from etude.train.backend import HeldModel, model_of
from etude.train.device_mesh import ShardMeshes
from etude.train.optim import PRECISIONS

COMMON = frozenset({"turn", "source"})
"""Columns that every example has."""
COLUMN_SOURCES = {
    "ref_logp": "a reference: `etude dpo` has one",
    "teacher_topk_ids": "a teacher: `etude distill` has one",
    "teacher_topk_logp": "a teacher: `etude distill` has one",
    "reward": "pairs of which one is preferred: `etude dpo` and `etude reward-model` train on such",
}
"""The source of each column that a run may lack."""


def train_supervised(run: SupervisedRun, interrupt: Interrupt | None = None) -> Path:
    """Train until all steps are done, and return the run's directory.

    Ctrl-C finishes the step, saves it, and is raised again as `KeyboardInterrupt`. interrupt: the signal listener to
    use, when several runs follow each other in one process.
    """

    def learned() -> Path:
        with build(run, interrupt) as parts:
            run_supervised_loop(parts)
            return parts.directory

    return run_outside_event_loop(learned)


@contextmanager
def build(run: SupervisedRun, interrupt: Interrupt | None = None) -> Iterator[SupervisedComponents]:
    """Yield the components of the run, checked against each other and open; close them at the end."""
    with run_session(
        resolve_hub_names(run), _assemble_parts, interrupt, check=_check_run, inspect_commands=("plot",)
    ) as parts:
        yield parts


def _check_run(run: SupervisedRun) -> None:
    """Refuse a run that cannot work, and warn of options that do nothing."""
    _check_options(run)
    warnings = checks.check_ranks(run, run.batch_size, "batch_size") + checks.idle_tracker_warnings(run.observe)
    if run.evaluate != ValidationConfig() and not run.data.val:
        warnings.append(
            "`evaluate` says how to measure on held-out examples, and there are none, so nothing is measured. Give "
            "them with `data.val=[held_out.parquet]`."
        )
    for warning in warnings:
        get_logger("recipes").warning("%s", warning)


@told_together
def _check_options(run: SupervisedRun) -> Iterator[ConfigError]:
    """Refuse options that do not fit together, or that lack something."""
    yield from find_missing_options(run)
    yield from problems_of(check_loss, run)
    yield from problems_of(check_vision, run)
    if run.lora.publish != "adapter":
        yield ConfigError("`lora.publish` says how adapters reach an engine, and nothing samples here. Leave it out.")
    if run.observe.rollouts:
        yield ConfigError("`observe.rollouts` shows rollouts in trackers, and nothing samples here. Leave it out.")


@told_together
def check_loss(run: SupervisedRun) -> Iterator[ConfigError]:
    """Refuse a loss that this run cannot compute, and models that the loss would not read."""
    for name in sorted(run.loss.required_columns() - run.provided_columns - COMMON):
        other = "a model that computes it" if name in OWN_NAMES else "`data.batch_columns` of `etude train`"
        yield ConfigError(
            f"This loss needs the column `{name}`, which takes {COLUMN_SOURCES.get(name, other)}. Choose another loss."
        )
    for name in sorted(run.loss.forward_outputs() - run.outputs):
        yield ConfigError(
            f"This loss needs the model's `{name}`, which a model of `etude {run.recipe}` does not compute."
        )
    yield from _find_idle_models(run)


def _find_idle_models(run: SupervisedRun) -> Iterator[ConfigError]:
    """Yield a problem for an auxiliary model that the loss does not read, and for a loss that lacks one."""
    if isinstance(run, DPORun) and run.reference != ReferenceConfig() and "ref_logp" not in run.loss.required_columns():
        yield ConfigError(
            "`reference.path` names a reference policy, and this loss compares with none. Leave it out, or choose "
            "`loss=dpo`."
        )
    if isinstance(run, DistillRun) and not run.loss.required_columns() & run.provided_columns:
        yield ConfigError(
            "This loss reads no output of a teacher: `etude sft` trains on the same texts without one. Start that, "
            "or choose `loss=distill_topk`."
        )
    if isinstance(run, DistillRun) and not run.teacher.is_given:
        yield ConfigError(
            "There is no teacher: give its model directory with `teacher.path=…`, or one for each data source with "
            "`teacher.paths={…}`."
        )


def _assemble_parts(
    run: SupervisedRun, directory: Path, interrupt: Interrupt, stack: ExitStack
) -> SupervisedComponents:
    """Build the components, which stay open until the stack closes, and write the run's options once all of them
    exist."""
    chat = build_chat_renderer(run)
    assert run.model.path is not None, "a run has a model"
    context = read_context_length(run.model.path)
    examples = _read(run, "data.train", run.data.train, chat, context)
    held_out = _read(run, "data.val", run.data.val, chat, context) if run.data.val else None
    if isinstance(run, DistillRun):
        _check_sources(run, examples, held_out)
    order = run.data.sampler.start(len(examples), run.seed, examples.sources)
    stream = ExampleStream(examples, order, run.batch_size, steps=run.steps, epochs=run.epochs or 1.0)
    learner = SupervisedLearner(stack.enter_context(closing(_crew(run, chat, stream.total_steps, directory))))
    checkpoints = CheckpointManager(directory / "checkpoints", run.checkpoint.keep)
    step = resume_run(run.checkpoint, checkpoints, learner, stream, run.steps)
    steps = step + stream.remaining_steps(step)
    inputs.RunInputs(directory, run).record(run.describe_threads())
    run_directory.write_options(directory, run)
    written = read_last_step(directory)
    info = RunInfo(directory.name, directory, steps, mask(to_tree(run)))
    log = stack.enter_context(open_run_log(run.observe, info, _headline(run), last_written_step=written))
    evaluation_id = inputs.evaluation_id(run.data.val, {"limit": run.evaluate.limit})
    validation = PeriodicValidation(run.evaluate, learner, held_out, steps)
    saver = CheckpointSaver(
        run.checkpoint,
        checkpoints,
        learner,
        stream,
        steps,
        interrupt,
        log,
        validation.score_at,
        evaluation_id=evaluation_id,
        step=step,
        saved_step=step,
    )
    stack.push(saver.close)
    log_start(run, *learner.parameters(), f"examples: {len(examples)}", saver, written)
    return SupervisedComponents(directory, log, stream, learner, validation, saver, examples.skip_metrics())


def _check_sources(run: DistillRun, examples: Examples, held_out: Examples | None) -> None:
    """Refuse data sources without a teacher, and options that name none of the data's sources."""
    sources = DataSources("data.train", examples.sources(), run.data.sampler)
    sources.check_teachers(run.teacher.paths)
    sources.refuse_others("teacher.paths", run.teacher.paths)
    if isinstance(run.loss, TopKDistillation):
        sources.refuse_others("loss.weights", run.loss.weights)
    if held_out is not None:
        DataSources("data.val", held_out.sources()).check_teachers(run.teacher.paths)


def _read(run: SupervisedRun, name: str, files: Sequence[str], chat: ChatRenderer, context: int) -> Examples:
    """Load the examples of some files, with a progress bar."""
    with progress(f"reading {name}", None, make_console(run.observe.console)) as bar:
        return run.data.load_examples(name, files, chat, context, bar.advance, max_images=run.vision.max_images)


def _crew(run: SupervisedRun, chat: ChatRenderer, steps: int, directory: Path) -> Crew:
    """Return the workers that train, in this process or in one process per rank. steps: the length of the run."""
    run = run.model_copy(update={"steps": steps, "epochs": None})
    return (
        LocalCrew(_worker(run, chat))
        if run.in_process
        else start_ranks(build_rank_worker, run, directory / run_directory.RANK_LOGS)
    )


def build_rank_worker(run: SupervisedRun) -> SupervisedWorker:
    """Build the worker of one rank, in the rank's own process. The run must have its length in steps."""
    return _worker(run, build_chat_renderer(run))


def _worker(run: SupervisedRun, chat: ChatRenderer) -> SupervisedWorker:
    mesh = build_mesh(run)
    model = PolicyLoader(run, chat.tokenizer).load_trained(mesh)
    pixels = load_pixels(run, model)
    return build_supervised_worker(run, model, _load_other_model(run, model, mesh, pixels), pixels)


def build_supervised_worker(
    run: SupervisedRun, model: HeldModel, other: ScoringModel | None, pixels: PixelCache | None = None
) -> SupervisedWorker:
    """Build a worker from loaded models. other: the reference or the teacher, if the loss reads one. pixels: of the
    images of examples, for a model that takes images."""
    peak = measure_peak_flops(PRECISIONS[run.train.precision], model_of(model).device)
    temperature = run.temperature if isinstance(run, DistillRun) else 1.0
    learner = Learner(model, run.train, temperature=temperature, steps=run.steps, peak=peak, pixels=pixels)
    return SupervisedWorker(run.loss, learner, _build_annotate(run, model_of(model), other))


def _load_other_model(
    run: SupervisedRun, model: HeldModel, mesh: ShardMeshes | None, pixels: PixelCache | None
) -> ScoringModel | None:
    loader = AuxiliaryLoader(run, model, mesh, pixels)
    if isinstance(run, DPORun) and "ref_logp" in run.loss.required_columns():
        return loader.load_reference(run.reference.path)
    if isinstance(run, DistillRun):
        return loader.load_teacher(run.teacher, run.temperature)
    return None


def _build_annotate(run: SupervisedRun, model: Model, other: ScoringModel | None) -> Annotate | None:
    """Return the function that adds the other model's columns, if there is one."""
    if other is None or not isinstance(run, DistillRun):
        return None if other is None else annotate_with_reference(other)
    num_tokens = min(model.vocab_size, other.vocab_size)
    if run.teacher.top > num_tokens and run.teacher.top != DistillTeacherConfig.model_fields["top"].default:
        raise ConfigError(
            f"`teacher.top={run.teacher.top}` asks for more tokens than all models know, which is {num_tokens}. "
            "Lower it."
        )
    return annotate_with_teacher(other, min(run.teacher.top, num_tokens), num_tokens)


def _headline(run: SupervisedRun) -> list[str]:
    """Return the metrics on the console line of a step; all others are in metrics.jsonl."""
    preference_metrics = ["accuracy", "margin"] if "reward" in run.loss.required_columns() else []
    metrics = [name for metric in ("loss", *preference_metrics) for name in (metric, f"eval/{metric}")]
    return [*metrics, "grad_norm", "trained_tokens_per_second"]
