"""The commands that read a run, finished or in progress: plots, reports, answers, replays, exported rollouts."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from etude.commands import add_command, add_run_command
from etude.errors import ConfigError
from etude.help_texts import ANSWERS, PLOT, REPLAY, REPORT, ROLLOUTS
from etude.lazy import pause_gc


def add_reading_commands(commands: Any) -> None:
    """Add the commands of this file to those of `etude`, but for `etude export rollouts`."""
    plot = add_command(commands, "plot", "plot the metrics of runs, in the terminal and as a PNG", PLOT)
    plot.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run directories, drawn in the same panels")
    plot.add_argument("--metrics", default="", metavar="A,B", help="metrics to plot (default: a selection)")
    picture = "PNG file to write (default: RUN/plot.png, or plot.png here for several runs)"
    plot.add_argument("--out", type=Path, metavar="FILE", help=picture)
    plot.set_defaults(command=_plot)

    summary = "write a page about a run: curves, options, versions, speed, findings and samples"
    report = add_command(commands, "report", summary, REPORT)
    report.add_argument("run", type=Path, metavar="RUN", help="run directory; the run may still be in progress")
    report.add_argument("--out", type=Path, metavar="DIRECTORY", help="directory to write (default: RUN/report)")
    report.set_defaults(command=_report)

    answers = add_command(commands, "answers", "print the answers that a training step used", ANSWERS)
    answers.add_argument("run", type=Path, metavar="RUN", help="run directory; the run may still be in progress")
    answers.add_argument("--step", type=int, metavar="K", help="training step (default: the last one)")
    answers.add_argument("-n", type=int, metavar="N", help="number of tasks (default 3; all with --json)")
    answers.add_argument("--whole", action="store_true", help="print long answers in full")
    answers.add_argument("--json", action="store_true", help="print every answer of the step as JSON lines")
    answers.set_defaults(command=_answers)

    summary = "compute a recorded step again under another algorithm, without sampling"
    replay = add_run_command(commands, "replay", summary, REPLAY, "RUN ")
    replay.add_argument("--step", type=int, required=True, metavar="K", help="training step to compute again")
    replay.add_argument("--to", type=int, metavar="END", help="train on up to this step, in a new directory")
    out = "directory of the files (default: RUN/replays; with --to a new one in runs)"
    replay.add_argument("--out", type=Path, metavar="DIRECTORY", help=out)
    replay.add_argument("--json", action="store_true", help="print one JSON object instead")
    replay.set_defaults(command=_replay)


def add_rollout_export(kinds: Any) -> None:
    """Add `etude export rollouts`."""
    summary = "export rollouts as training data, JSON lines or traces"
    rollouts = add_command(kinds, "rollouts", summary, ROLLOUTS)
    rollouts.add_argument("run", type=Path, metavar="RUN", help="run directory; the run may still be in progress")
    rollouts.add_argument("to", type=Path, metavar="FILE", help="file to write; it must not exist")
    kind = "format of the file (default jsonl), see below"
    rollouts.add_argument("--as", dest="kind", choices=("sft", "dpo", "jsonl", "otlp"), default="jsonl", help=kind)
    reward = "sft, dpo: smallest reward of a rollout, or of the better one of a pair; larger keeps fewer"
    rollouts.add_argument("--min-reward", type=float, metavar="X", help=reward)
    gap = "dpo: smallest reward difference within a pair (default 0); larger keeps fewer pairs"
    rollouts.add_argument("--min-gap", type=float, default=0.0, metavar="X", help=gap)
    rollouts.add_argument("--tags", default="", metavar="A,B", help="sft, dpo: train on turns with one of these tags")
    split = "rollouts of training (default), of evaluation, or both"
    rollouts.add_argument("--split", choices=("train", "val", "all"), default="train", help=split)
    form = "sft, dpo: write token ids (default) or text"
    rollouts.add_argument("--form", choices=("ids", "text"), default="ids", help=form)
    tokenizer = "directory of the tokenizer, if it is no longer where the run found it"
    rollouts.add_argument("--model", type=Path, metavar="DIRECTORY", help=tokenizer)
    rollouts.add_argument("--json", action="store_true", help="print the result as one JSON object on the last line")
    rollouts.set_defaults(command=_export_rollouts)


def _report(arguments: argparse.Namespace) -> None:
    from etude.view.report import write_report

    print(write_report(arguments.run, arguments.out))


def _answers(arguments: argparse.Namespace) -> None:
    from etude.tools.answers import load_answers, show

    if not arguments.json:
        show(arguments.run, step=arguments.step, tasks=arguments.n, whole=arguments.whole)
        return
    for answer in load_answers(arguments.run, arguments.step, arguments.n)[1]:
        print(json.dumps(answer, default=str))


def _replay(arguments: argparse.Namespace) -> None:
    runs = [word for word in arguments.overrides if "=" not in word]
    if len(runs) != 1:
        raise ConfigError("Name the directory of one run: `etude replay runs/mine --step 3 loss=gspo`.")
    if arguments.config is not None:
        raise ConfigError("--config has no place here: the options are those of the run. Write changes as key=value.")
    from etude.tools.replay.options import check_steps, read_options

    options = read_options(Path(runs[0]), [word for word in arguments.overrides if "=" in word])
    check_steps(options.directory, arguments.step, arguments.to)
    with pause_gc():
        from etude.tools.replay.command import replay

    result = replay(options, arguments.step, to=arguments.to, out=arguments.out, silent=arguments.json)
    if arguments.json:
        print(json.dumps(result))


def _export_rollouts(arguments: argparse.Namespace) -> None:
    from etude.tools.rollouts import ExportOptions, export_rollouts

    options = {name: getattr(arguments, name) for name in ExportOptions.__dataclass_fields__ if name != "tags"}
    tags = tuple(tag for item in arguments.tags.split(",") if (tag := item.strip()))
    exported = export_rollouts(ExportOptions(**options, tags=tags))
    if arguments.json:
        print(json.dumps(exported))


def _plot(arguments: argparse.Namespace) -> None:
    from etude.tools.plot import plot

    plot(arguments.runs, [name for name in arguments.metrics.split(",") if name], into=arguments.out)
