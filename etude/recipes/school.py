"""From the options of a supervised run to the parts of its loop: what its loss needs decides what stands there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from etude.chat import Chat
from etude.checkpoint import Checkpoints
from etude.config.secrets import mask
from etude.config.tree import to_tree
from etude.data.examples import Examples
from etude.dispatch import LocalCrew
from etude.errors import ConfigError
from etude.models import Model, context_of
from etude.observe import RunInfo, get_log, last_step, make_console, open_run_log, progress
from etude.protocols import Crew
from etude.recipes import checks, folder, inputs, models
from etude.recipes.apart import apart
from etude.recipes.build import chat_of, model_of
from etude.recipes.distill import DistillRun, Tutor
from etude.recipes.dpo import DPORun
from etude.recipes.frame import framed, introduce
from etude.recipes.hub import located
from etude.recipes.interrupt import Interrupt
from etude.recipes.lessons import Lessons, batch_of
from etude.recipes.meter import peak_of
from etude.recipes.pupil import Annotate, Pupil, PupilWorker, by_reference, by_teacher
from etude.recipes.recipe import Reference
from etude.recipes.replicas import start
from etude.recipes.saving import Saver, taken_up
from etude.recipes.study import Measuring, Study, learn
from etude.recipes.supervised import Supervised, Validation
from etude.train import Frozen, Learner, Mesh

__all__ = ["build", "of_loss", "rank", "study", "worker_of"]

COMMON = frozenset({"turn"})
"""Columns that every example has."""
TELLS = {
    "ref_logp": "a reference: `etude dpo` has one",
    "teacher_topk_ids": "a teacher: `etude distill` has one",
    "teacher_topk_logp": "a teacher: `etude distill` has one",
    "reward": "pairs of which one is preferred: `etude dpo` and `etude reward-model` learn from such",
}
"""Who tells a column, where a run has nobody who does."""


def study(run: Supervised, interrupt: Interrupt | None = None) -> Path:
    """Learn until the steps are done; returns the run's directory. Ctrl-C ends the step, saves, and passes on.

    `interrupt`: who listens for that already, where several runs follow each other.
    """

    def learned() -> Path:
        with build(run, interrupt) as parts:
            learn(parts)
            return parts.directory

    return apart(learned)


@contextmanager
def build(run: Supervised, interrupt: Interrupt | None = None) -> Iterator[Study]:
    """Every part of the run, checked against each other, open; and closed again in the end."""
    with framed(located(run), _assembled, interrupt, checked=_checked, looks=("plot",)) as parts:
        yield parts


def _checked(run: Supervised) -> None:
    """Refuse what this run cannot do, and say what it may not mean."""
    if not run.data.train:
        raise ConfigError("A run needs examples: give files with `data.train=[examples.parquet]`.")
    of_loss(run)
    if run.lora.publish != "adapter":
        raise ConfigError(
            "`lora.publish` is how an engine is told of an adapter, and nothing samples here. Leave it out."
        )
    warnings = checks.of_ranks(run, run.batch_size, "batch_size") + checks.idle_trackers(run.observe)
    if run.evaluate != Validation() and not run.data.val:
        warnings.append(
            "`evaluate` says how to measure on held-out examples, and there are none, so nothing is measured. Give "
            "them with `data.val=[held_out.parquet]`."
        )
    for warning in warnings:
        get_log("recipes").warning("%s", warning)


def of_loss(run: Supervised) -> None:
    """Refuse a loss that cannot be computed in such a run, and models that it would not read."""
    for name in sorted(run.loss.needs() - run.told - COMMON):
        raise ConfigError(
            f"This loss needs the column `{name}`, which takes {TELLS.get(name, 'somebody to compute it')}. Choose "
            f"another loss."
        )
    for name in sorted(run.loss.outputs() - run.outputs):
        raise ConfigError(f"This loss needs the model's `{name}`, which a model of `etude {run.recipe}` does not tell.")
    _refuse_idle_models(run)


def _refuse_idle_models(run: Supervised) -> None:
    """Refuse a model beside the one that learns of which the loss reads nothing, and a loss that lacks one."""
    if isinstance(run, DPORun) and run.reference != Reference() and "ref_logp" not in run.loss.needs():
        raise ConfigError(
            "`reference.path` names a reference policy, and this loss compares with none. Leave it out, or choose "
            "`loss=dpo`."
        )
    if isinstance(run, DistillRun) and not run.loss.needs() & run.told:
        raise ConfigError(
            "This loss reads nothing of what a teacher tells: `etude sft` learns from the same texts without one. "
            "Start that, or choose `loss=distill_topk`."
        )
    if isinstance(run, DistillRun) and run.teacher.path is None:
        raise ConfigError("Nobody teaches: give the teacher's model directory with `teacher.path=…`.")


def _assembled(run: Supervised, directory: Path, interrupt: Interrupt, stack: ExitStack) -> Study:
    """The parts, each open until the stack closes; and the run written down, once all of them are there."""
    chat = chat_of(run)
    assert run.model.path is not None, "a run has a model"
    context = context_of(run.model.path)
    examples = _read(run, "data.train", run.data.train, chat, context)
    held_out = _read(run, "data.val", run.data.val, chat, context) if run.data.val else None
    order = run.data.sampler.start(len(examples), run.seed, examples.sources)
    lessons = Lessons(examples, order, run.batch_size, steps=run.steps, epochs=run.epochs or 1.0)
    pupil = Pupil(stack.enter_context(closing(_crew(run, chat, lessons.steps, directory))))
    kept = Checkpoints(directory / "checkpoints", run.checkpoint.keep)
    step = taken_up(run.checkpoint, kept, pupil, lessons, run.steps)
    steps = step + lessons.left(step)
    inputs.keep_inputs(directory, run)
    folder.settle(directory, run)
    written = last_step(directory)
    info = RunInfo(directory.name, directory, steps, mask(to_tree(run)))
    log = stack.enter_context(open_run_log(run.observe, info, _headline(run), written=written))
    measured = inputs.yardstick(run, {"limit": run.evaluate.limit})
    shown = None if held_out is None else batch_of(held_out.first(run.evaluate.limit))
    measuring = Measuring(run.evaluate, pupil, shown, steps)
    saver = Saver(
        *(run.checkpoint, kept, pupil, lessons, steps, interrupt, log, measuring.best),
        measured=measured,
        step=step,
        saved=step,
    )
    introduce(run, *pupil.parameters(), f"examples: {len(examples)}", saver, written)
    return Study(directory, log, lessons, pupil, measuring, saver, examples.counts())


def _read(run: Supervised, name: str, files: Sequence[str], chat: Chat, context: int) -> Examples:
    """The examples of some files, shown as they are read."""
    with progress(f"reading {name}", None, make_console(run.observe.console)) as bar:
        return run.data.read(name, files, chat, context, bar.advance)


def _crew(run: Supervised, chat: Chat, steps: int, directory: Path) -> Crew:
    """Whoever learns: here, or in as many processes as there are to be ranks, in so many steps."""
    run = run.model_copy(update={"steps": steps, "epochs": None})
    here = run.ranks == 1 and run.cluster == "local"
    return LocalCrew(_worker(run, chat)) if here else start(rank, run, directory / folder.RANKS)


def rank(run: Supervised) -> PupilWorker:
    """The worker of one rank, made in its own process; the run says in how many steps it learns."""
    return _worker(run, chat_of(run))


def _worker(run: Supervised, chat: Chat) -> PupilWorker:
    model = model_of(run, chat, trained=True)
    mesh = models.mesh_of(run)
    return worker_of(run, model, _other(run, model, mesh), mesh)


def worker_of(run: Supervised, model: Model, other: Frozen | None, mesh: Mesh) -> PupilWorker:
    """Whoever learns, of models that are there. other: the reference or the teacher, where the loss reads what such a
    one tells."""
    peak = peak_of(model)
    learner = Learner(model, run.train, temperature=_temperature(run), steps=run.steps, peak=peak, mesh=mesh)
    return PupilWorker(run.loss, learner, _telling(run, model, other))


def _other(run: Supervised, model: Model, mesh: Mesh) -> Frozen | None:
    """Who tells what the loss reads and the model itself does not tell."""
    if isinstance(run, DPORun) and "ref_logp" in run.loss.needs():
        return models.reference(run, model, run.reference.path, mesh=mesh)
    if isinstance(run, DistillRun):
        return models.frozen(run, model, "teacher", run.teacher.path, run.temperature, mesh=mesh)
    return None


def _telling(run: Supervised, model: Model, other: Frozen | None) -> Annotate | None:
    """How it is asked for that."""
    if other is None or not isinstance(run, DistillRun):
        return None if other is None else by_reference(other)
    among = min(model.vocabulary, other.model.vocabulary)
    if run.teacher.top > among and run.teacher.top != Tutor.model_fields["top"].default:
        raise ConfigError(
            f"`teacher.top={run.teacher.top}` asks for more tokens than both models know, which is {among}. Lower it."
        )
    return by_teacher(other, min(run.teacher.top, among), among)


def _temperature(run: Supervised) -> float:
    return run.temperature if isinstance(run, DistillRun) else 1.0


def _headline(run: Supervised) -> list[str]:
    """What the line of a step shows; all the rest is in metrics.jsonl."""
    telling = ["accuracy", "margin"] if "reward" in run.loss.needs() else []
    seen = [name for each in ("loss", *telling) for name in (each, f"eval/{each}")]
    return [*seen, "grad_norm", "trained_tokens_per_second"]
