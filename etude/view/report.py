"""`etude report RUN`: a run as one Markdown page with its curves beside it, for a paper or an issue."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from etude.config.secrets import mask_text
from etude.errors import ConfigError, EtudeError
from etude.observe import format_number, format_seconds
from etude.observe.step_history import StepHistory
from etude.recipes.diagnosis import RULES
from etude.recipes.run.resume.session_log import Session
from etude.tools.answers import answer_text, load_answers
from etude.tools.doctor.run import ExaminedRun, examine, is_run
from etude.tools.metric_curves import DEFAULT_METRICS, RunCurves, describe_missing
from etude.tools.plot import WINDOWS, draw, smooth_values
from etude.tools.rollout_reader import messages_text
from etude.view import markdown
from etude.view.queries.curves import phase_times, select_names
from etude.view.queries.run import RunPage, read_run
from etude.view.run_reader import RunReader

PAGE, PICTURE = "report.md", "curves.png"
SCORES = ("eval/mean@*", "eval/maj@*", "eval/pass@*", "eval/accuracy", "eval/loss", "eval/margin")
RATES = {
    "sampled_tokens_per_second": "sampled tokens a second, while the engine samples",
    "trained_tokens_per_second": "trained tokens a second, while the policy trains",
    "mfu": "share of the device's arithmetic that training uses",
    "time/step": "seconds a step",
}
MOST_EVALUATIONS = 20
LONGEST = 2000
"""Characters of a text of a sample; of a longer one the beginning and the end are shown."""


def write_report(directory: Path, out: Path | None = None) -> Path:
    """Write the page and the picture of a run, and return the page.

    out: their directory; None is `report` in the run's directory.
    """
    if not is_run(directory):
        raise ConfigError(describe_missing(directory))
    out = directory / "report" if out is None else out
    out.mkdir(parents=True, exist_ok=True)
    with closing(RunReader(directory.resolve().name, directory)) as reader:
        page = read_run(reader)
        metrics = reader.metrics
        examined = examine(directory)
        curves = {name: metrics.curve(name) for name in select_names(metrics.names, DEFAULT_METRICS)}
        curves = {name: curve for name, curve in curves.items() if len(curve)}
        blocks = [f"# {markdown.sentence(reader.name)}", _summary(page, metrics)]
        if curves:
            draw([RunCurves(directory, curves, "")], [reader.name], list(curves), out / PICTURE)
            rows = [(markdown.code(name), *_ends(curve.values)) for name, curve in curves.items()]
            blocks += [f"![The curves of the run]({PICTURE})", markdown.table(["metric", "first", "last"], rows)]
            if any(len(curve) >= WINDOWS for curve in curves.values()):
                blocks.append(f"The ends of a curve of {WINDOWS} points or more are means over neighboring steps.")
        blocks += [*_evaluations(metrics), *_findings(examined), *_speed(reader, metrics), *_options(page)]
        blocks += _samples(directory) if reader.has_journal else []
        problems = dict.fromkeys([*page.problems, *examined.problems])
        blocks += ["## What could not be read", markdown.bullets(map(markdown.sentence, problems))] if problems else []
    (out / PAGE).write_text("\n\n".join(blocks) + "\n", encoding="utf-8")
    return out / PAGE


def _summary(page: RunPage, metrics: StepHistory) -> str:
    summary, sessions = page.summary, page.sessions
    asked = "" if summary.steps is None else f" of {summary.steps}"
    rows = [("status", f"{summary.status} after step {summary.step or 0}{asked}")]
    recipe = markdown.code(f"etude {summary.recipe or 'train'}")
    rows.append(("recipe", recipe + (f", preset {markdown.code(page.preset)}" if page.preset else "")))
    rows.append(("model", markdown.code(summary.model)))
    if sessions:
        seconds = sum(_durations(sessions, metrics, summary.written_at))
        started = f", started {len(sessions)} times" if len(sessions) > 1 else ""
        began = time.strftime("%Y-%m-%d %H:%M", time.localtime(sessions[0].began_at))
        rows.append(("trained", f"{began}, for {format_seconds(seconds)}{started}"))
        versions = ", ".join(f"{name} {version}" for name, version in sessions[-1].versions.items())
        rows.append(("device", markdown.sentence(sessions[-1].device)))
        rows.append(("versions", markdown.sentence(versions)))
    if page.rollouts is not None:
        rows.append(("rollouts trained on", f"{page.rollouts:,}"))
    if len(tokens := metrics.curve("action_tokens")):
        rows.append(("tokens trained on", f"{int(tokens.values.sum()):,}"))
    text = markdown.table(["", ""], rows)
    return f"{text}\n\n{markdown.fence(summary.message)}" if summary.message else text


def _durations(sessions: Sequence[Session], metrics: StepHistory, written_at: float) -> Iterator[float]:
    """Yield the seconds of each session. One that was killed ends with its last metrics before the next start."""
    times = metrics.values("time")
    for session, following in zip_longest(sessions, sessions[1:]):
        ended = session.ended_at
        if ended is None:
            ended = written_at if following is None else np.max(times[times < following.began_at], initial=0.0)
        yield max(ended - session.began_at, 0.0)


def _ends(values: np.ndarray[Any, np.dtype[np.float64]]) -> tuple[str, str]:
    smooth = smooth_values(values)
    return format_number(smooth[0]), format_number(smooth[-1])


def _evaluations(metrics: StepHistory) -> Iterator[str]:
    """Yield the table of scores: of the last steps, and of the first one."""
    names = [name for name in select_names(metrics.names, SCORES) if len(metrics.curve(name))]
    if not names:
        return
    columns = [metrics.values(name) for name in names]
    scored = np.flatnonzero(np.isfinite(columns).any(0))
    shown = scored if len(scored) <= MOST_EVALUATIONS else [scored[0], *scored[1 - MOST_EVALUATIONS :]]
    rows = [[str(metrics.steps[row]), *(_number(column[row]) for column in columns)] for row in shown]
    yield "## Evaluations"
    yield markdown.table(["step", *map(markdown.code, names)], rows)


def _findings(examined: ExaminedRun) -> Iterator[str]:
    """Yield what `etude doctor` finds."""
    yield "## Findings of `etude doctor`"
    if not examined.findings:
        yield f"None, by {len(RULES)} rules. Steps with metrics: {examined.steps}."
        return
    yield markdown.bullets(
        f"**{finding.rule}** (steps {finding.first} to {finding.last}): {markdown.sentence(finding.what)} "
        f"Remedy: {markdown.sentence(finding.remedy)}"
        for finding in examined.findings
    )


def _speed(reader: RunReader, metrics: StepHistory) -> Iterator[str]:
    """Yield the measured rates, and the shares of the phases of a step."""
    curves = {text: metrics.curve(name) for name, text in RATES.items()}
    rates = [(text, format_number(float(np.median(curve.values)))) for text, curve in curves.items() if len(curve)]
    if rates:
        yield "## Speed"
        yield markdown.table(["measured, median of the steps", ""], rates)
    columns = {name: np.asarray(column) for name, column in phase_times(reader).columns.items()}
    total = float(np.nansum(columns.pop("total")))
    if total > 0:
        sums = {name: float(np.nansum(column)) for name, column in columns.items() if name != "step"}
        rows = [(name, format_seconds(seconds), f"{seconds / total:.1%}") for name, seconds in sums.items() if seconds]
        yield markdown.table(["phase", "in all steps", "share"], [*rows, ("all", format_seconds(total), "100%")])


def _options(page: RunPage) -> Iterator[str]:
    """Yield the options that are neither defaults nor those of the preset."""
    columns = page.options.columns
    rows = [
        (markdown.code(option), markdown.code(_value(value)), markdown.code(_value(default)))
        for option, value, default, is_default, from_preset in zip(*columns.values(), strict=True)
        if not (is_default or from_preset or option in ("recipe", "directory"))
    ]
    if rows:
        than = f"in the preset {markdown.code(page.preset)}, and not the defaults" if page.preset else "the defaults"
        yield "## Options"
        yield f"Those that are not {than}:"
        yield markdown.table(["option", "value", "default"], rows)


def _samples(directory: Path) -> Iterator[str]:
    """Yield the best, the median and the worst rollout of the last step."""
    yield "## Samples"
    try:
        step, answers = load_answers(directory)
    except EtudeError as error:  # the rest of the page does not need the journal
        yield markdown.sentence(str(error))
        return
    answers.sort(key=lambda answer: -np.inf if answer["reward"] is None else -answer["reward"])
    scored = [answer for answer in answers if answer["reward"] is not None]
    failed = f", {len(answers) - len(scored)} of which failed" if len(scored) < len(answers) else ""
    yield f"Step {step} has {len(answers)} rollouts{failed}."
    places = {"best": 0, "median": len(scored) // 2, "worst": len(scored) - 1} if scored else {}
    for place in dict.fromkeys(places.values()):
        yield from _sample(" and ".join(name for name in places if places[name] == place), scored[place])


def _sample(name: str, answer: Mapping[str, Any]) -> Iterator[str]:
    parts = "".join(f", {markdown.code(part)} {format_number(value)}" for part, value in answer["parts"].items())
    yield f"### The {name}: reward {format_number(answer['reward'])}"
    truth = answer["ground_truth"]
    expected = "" if truth is None else f", expected {markdown.code(_shown(str(truth)))}"
    yield f"{answer['tokens']} tokens, end by {markdown.code(answer['finish'])}{parts}{expected}"
    yield markdown.fence(_shown(messages_text(answer["prompt"])))
    yield markdown.fence(_shown(answer_text(answer)))


def _shown(text: str) -> str:
    """Return a text of a rollout with its secrets masked, and then without the middle of a long one."""
    text = mask_text(text, yaml=False)
    if len(text) > LONGEST:
        left_out = len(text) - LONGEST
        text = f"{text[: 2 * LONGEST // 3]}\n… {left_out:,} characters are left out …\n{text[-LONGEST // 3 :]}"
    return text


def _value(value: Any) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{', '.join(map(_value, value))}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _number(value: float) -> str:
    return format_number(value) if np.isfinite(value) else "–"
