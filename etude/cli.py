"""The command line: the commands that train, evaluate, sample and export a model.

`commands.py`, `run_commands.py` and `service_commands.py` hold the other commands. A command imports heavy libraries
when it runs, so that `--help` returns at once.

Exit codes:
    1     the system refused something (a full disk, no memory): one sentence on standard error
    2     an `EtudeError`, or a wrong command line: one sentence on standard error
    130   Ctrl-C, without a message
    141   the reader of standard output has ended, without a message

A standard output that is closed, or that only takes ASCII, is not an error.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from etude import __version__
from etude.commands import BEST, RUN, OverrideParser, add_command, add_command_group, add_commands, add_run_command
from etude.errors import ConfigError, EtudeError, describe_system_error
from etude.help_texts import (
    ABOUT,
    ALGORITHMS,
    CONFIG_SHOW,
    DEMO,
    DEMO_AGENT,
    EVAL,
    EXPORT,
    GENERATE,
    GETTING_STARTED,
    SUPERVISED_CLASSES,
    SUPERVISED_COMMANDS,
    SUPERVISED_EPILOG,
    TRAIN,
)
from etude.lazy import pause_gc
from etude.run_commands import add_reading_commands, add_rollout_export
from etude.service_commands import add_service_commands

FAILED = 1
REFUSED = 2
INTERRUPTED = 130
BROKEN_PIPE = 141
LANGUAGE, MODEL = "language", "model"
DEMO_VISION = """\
examples:
  etude demo vision                      the vision tower is trained too
  etude demo vision vision.train=false   only the text part is trained
  etude demo vision seed=1 --json        print the result as JSON"""
DEMO_RUN = "etude.demo.tabular.run:DemoRun"
RESUME = "continue the run in this directory from its last checkpoint"
MULTIRUN = "start one run for each combination of values a,b,c"


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of all commands."""
    raw = argparse.RawDescriptionHelpFormatter
    top = OverrideParser("etude", description=ABOUT, epilog=GETTING_STARTED, formatter_class=raw, allow_abbrev=False)
    top.add_argument("--version", action="version", version=f"etude {__version__}", help="print the version")
    commands = top.add_subparsers(metavar="COMMAND", required=True, parser_class=OverrideParser)
    _add_training(commands)
    _add_inference(commands)
    _add_exports(commands)
    _add_demos(commands)

    config = add_command_group(commands, "config", "print the options of a run")
    summary = "print every option of a run, with its value and its meaning"
    roots = {"": RUN, "--demo": DEMO_RUN} | SUPERVISED_CLASSES
    show = add_run_command(config, "show", summary, CONFIG_SHOW, "[PRESET|RECIPE] ", roots)
    show.add_argument("--yaml", action="store_true", help="print YAML that --config accepts")
    show.add_argument("--demo", action="store_true", help="print the options of `etude demo algorithms` instead")
    show.set_defaults(command=_config_show)

    add_service_commands(commands)
    add_reading_commands(commands)
    add_commands(top, commands)
    return top


def _add_training(commands: Any) -> None:
    summary = "train a language model by reinforcement learning"
    train = add_run_command(commands, "train", summary, TRAIN, "[PRESET] ")
    train.add_argument("--resume", type=Path, metavar="RUN", help=RESUME)
    train.add_argument("--multirun", action="store_true", help=MULTIRUN)
    train.set_defaults(command=_train)

    for name, (summary, options) in SUPERVISED_COMMANDS.items():
        epilog = SUPERVISED_EPILOG.replace("NAME", name).replace("OPTIONS", options)
        supervised = add_run_command(commands, name, summary, epilog, roots={"": SUPERVISED_CLASSES[name]})
        supervised.add_argument("--resume", type=Path, metavar="RUN", help=RESUME)
        supervised.add_argument("--multirun", action="store_true", help=MULTIRUN)
        supervised.set_defaults(command=_train_supervised, recipe=name)


def _add_inference(commands: Any) -> None:
    evaluate = add_run_command(commands, "eval", "score a model or a run's checkpoint on tasks", EVAL, "[RUN] ")
    evaluate.add_argument("--best", action="store_true", help=BEST)
    evaluate.add_argument("--answers", type=Path, metavar="FILE", help="write every answer to FILE as JSON lines")
    evaluate.add_argument("--json", action="store_true", help="print the scores as one JSON object on the last line")
    evaluate.set_defaults(command=_eval)

    summary = "sample answers from a model or a run's checkpoint"
    generate = add_run_command(commands, "generate", summary, GENERATE, "RUN|MODEL [PROMPT] ")
    generate.add_argument("-n", type=int, default=1, metavar="N", help="number of answers (default 1)")
    generate.add_argument("--raw", action="store_true", help="continue the prompt as text, without a chat template")
    generate.add_argument("--best", action="store_true", help=BEST)
    generate.set_defaults(command=_generate)


def _add_exports(commands: Any) -> None:
    exports = add_command(commands, "export", "write a run's model or its rollouts to files", EXPORT)
    kinds = exports.add_subparsers(metavar="COMMAND", required=True, parser_class=OverrideParser)
    summary = "write the model in the Hugging Face format (`model` may be left out)"
    export = add_command(kinds, MODEL, summary, EXPORT)
    export.add_argument("run", type=Path, metavar="RUN", help="run directory")
    export.add_argument("to", type=Path, metavar="DIRECTORY", help="directory to write; it must not exist")
    export.add_argument("--best", action="store_true", help=BEST)
    fall_back = "if the newest checkpoint is damaged, use the newest intact one"
    export.add_argument("--fall-back", action="store_true", help=fall_back)
    export.add_argument("--adapter", action="store_true", help="write only the LoRA adapter, in the format of peft")
    upload = "also upload the model to this repository of the Hugging Face hub"
    export.add_argument("--push", metavar="OWNER/NAME", help=upload)
    export.add_argument("--private", action="store_true", help="with --push: create the repository as a private one")
    export.set_defaults(command=_export)
    add_rollout_export(kinds)


def _add_demos(commands: Any) -> None:
    demo = add_command(commands, "demo", "train something small and watch it learn", DEMO)
    demos = demo.add_subparsers(metavar="COMMAND", required=True, parser_class=OverrideParser)
    result = "print the result as one JSON object on the last line"

    summary = "train a small language model from random weights (`etude demo` alone does this)"
    language = add_run_command(demos, LANGUAGE, summary, DEMO)
    language.add_argument("--json", action="store_true", help=result)
    language.set_defaults(command=_demo, demo=LANGUAGE)

    summary = "train an agent that calls the model through the OpenAI client to use its tools"
    agent = add_run_command(demos, "agent", summary, DEMO_AGENT)
    agent.add_argument("--json", action="store_true", help=result)
    agent.set_defaults(command=_demo, demo="agent")

    summary = "train a small vision-language model to count the shapes of pictures"
    vision = add_run_command(demos, "vision", summary, DEMO_VISION)
    vision.add_argument("--json", action="store_true", help=result)
    vision.set_defaults(command=_demo, demo="vision")

    summary = "train a table of logits with each loss, and plot the exact expected reward"
    algorithms = add_run_command(demos, "algorithms", summary, ALGORITHMS, roots={"": DEMO_RUN})
    algorithms.add_argument("--multirun", action="store_true", help=MULTIRUN)
    algorithms.add_argument("--json", action="store_true", help=result)
    algorithms.set_defaults(command=_demo_algorithms)


def expand_shorthand(argv: Sequence[str]) -> list[str]:
    """Write out the short forms: `etude` prints the help, `etude demo` is `etude demo language`, and `etude export RUN`
    is `etude export model RUN`."""
    words = list(argv) or ["--help"]
    if words[:1] == ["export"] and words[1:2] not in ([], [MODEL], ["rollouts"], ["-h"], ["--help"]):
        words.insert(1, MODEL)
    if words[0] == "demo" and words[1:2] not in (["-h"], ["--help"]):
        names_no_demo = len(words) == 1 or "=" in words[1] or words[1].startswith("-")
        if names_no_demo:
            words.insert(1, LANGUAGE)
    return words


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, and return the exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    debug = False
    try:
        try:
            arguments = build_parser().parse_args(expand_shorthand(sys.argv[1:] if argv is None else argv))
        except SystemExit:  # argparse printed a help, or refused the words
            _flush()
            raise
        debug = "debug" in arguments
        code: int | None = arguments.command(arguments)
        _flush()
    except EtudeError as error:
        if debug:
            raise
        _print_error(str(error))
        return REFUSED
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _discard_stdout()
        return BROKEN_PIPE
    except (OSError, MemoryError) as error:
        _discard_stdout()
        if debug:
            raise
        _print_error(describe_system_error(error))
        _release_quietly(error)
        return FAILED
    return code or 0


def _release_quietly(error: Exception) -> None:
    """Release what an error holds. An event loop that the system refused raises another error then, and the coroutine
    that it should have run warns; both would be printed after the sentence."""
    hook = sys.unraisablehook
    sys.unraisablehook = lambda _: None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            traceback.clear_frames(error.__traceback__)
    finally:
        sys.unraisablehook = hook


def _flush() -> None:
    """Flush standard output, which is None where it was closed before the program started."""
    if sys.stdout is not None:
        sys.stdout.flush()


def _discard_stdout() -> None:
    """Point standard output at /dev/null where a flush fails: the interpreter flushes it once more as it ends."""
    try:
        _flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print_error(sentence: str) -> None:
    """Print an error on standard error, if that is open."""
    if sys.stderr is not None:
        with suppress(OSError):
            print(f"etude: {sentence}", file=sys.stderr)


def _config_show(arguments: argparse.Namespace) -> None:
    from etude.config.compose import compose
    from etude.config.show import render_config, to_yaml
    from etude.observe import make_console
    from etude.recipes.presets import split_preset
    from etude.recipes.registry import SUPERVISED, compose_run
    from etude.recipes.run.config import Run

    run: Any
    words = arguments.overrides
    if arguments.demo:
        from etude.demo.tabular.run import DemoRun

        run = compose(DemoRun, words, file=arguments.config)
    elif words[:1] and words[0] in SUPERVISED:
        run = compose_run(SUPERVISED[words[0]], words[1:], arguments.config)
    else:
        preset, overrides = split_preset(words)
        run = compose_run(Run, overrides, arguments.config, preset)
    if arguments.yaml:
        print(to_yaml(run), end="")
    else:
        make_console().print(render_config(run), soft_wrap=True, end="")


def _train(arguments: argparse.Namespace) -> None:
    from etude.config.env import read_role
    from etude.recipes.presets import split_preset

    preset, overrides = split_preset(arguments.overrides) if arguments.resume is None else (None, arguments.overrides)
    from etude.recipes.registry import compose_run
    from etude.recipes.run.config import Run
    from etude.recipes.run.directory import read_run

    if arguments.resume is not None:
        _check_resume_flags(arguments)
        _train_or_run_agents(read_run(arguments.resume, arguments.overrides))
    elif arguments.multirun:
        if read_role() is not None:
            raise ConfigError(
                f"--multirun starts many runs, and ETUDE_ROLE={read_role()} is a part of one. Leave one of them out."
            )
        from etude.recipes.run.loop import train
        from etude.recipes.sweep import sweep

        sweep(Run, train, overrides, arguments.config, preset)
    else:
        _train_or_run_agents(compose_run(Run, overrides, arguments.config, preset))


def _train_or_run_agents(run: Any) -> None:
    """Train a run; with ETUDE_ROLE=runner, run its agent for the trainer instead."""
    from etude.config.env import prefer_expandable_segments, read_role
    from etude.recipes.run.loop import train

    servers = run.servers
    if servers is None or servers.weight_transport != "ipc":  # handles of such segments differ between torch's versions
        prefer_expandable_segments()
    if read_role() is not None:
        from etude.agents.execution.runner_process import serve_if_runner
        from etude.agents.source_agents import load_agents

        agent = load_agents(run.agent.path, run.agent.sources)
        if agent is None:
            raise ConfigError(
                f"ETUDE_ROLE={read_role()} chooses this process's part in a run with agents, and this run has no "
                "`agent.path`. Unset ETUDE_ROLE."
            )
        if serve_if_runner(agent, run.agent.max_concurrency):
            return
        run = run.model_copy(update={"agent": run.agent.model_copy(update={"runners": 0})})
    train(run)


def _train_supervised(arguments: argparse.Namespace) -> None:
    from etude.recipes.hub import resolve_hub_names
    from etude.recipes.registry import SUPERVISED, compose_run
    from etude.recipes.run.directory import read_recipe
    from etude.recipes.run.resume.missing_inputs import check_required
    from etude.recipes.sweep import sweep

    def train(run: Any, interrupt: Any = None) -> Path:
        run = resolve_hub_names(run)
        check_required(run)
        with pause_gc():
            from etude.recipes.supervised.builder import train_supervised

        return train_supervised(run, interrupt)

    kind = SUPERVISED[arguments.recipe]
    if arguments.resume is not None:
        _check_resume_flags(arguments)
        train(read_recipe(kind, arguments.resume, arguments.overrides))
    elif arguments.multirun:
        sweep(kind, train, arguments.overrides, arguments.config)
    else:
        train(compose_run(kind, arguments.overrides, arguments.config))


def _check_resume_flags(arguments: argparse.Namespace) -> None:
    if arguments.config is not None or arguments.multirun:
        raise ConfigError(
            "--resume continues one run with its own options, and takes neither --config nor --multirun. Write the "
            "options that change as key=value."
        )


def _eval(arguments: argparse.Namespace) -> None:
    from etude.recipes.run.resume.missing_inputs import check_scored
    from etude.recipes.run_argument import resolve_run

    run, _ = resolve_run(arguments.overrides, arguments.config, "eval")
    check_scored(run)
    with pause_gc():
        from etude.recipes.inference import evaluate

    scores = evaluate(run, best=arguments.best, answers=arguments.answers)
    if arguments.json:
        print(json.dumps(scores))


def _generate(arguments: argparse.Namespace) -> None:
    from etude.recipes.run_argument import parse_question

    if arguments.n < 1:
        raise ConfigError(f"-n {arguments.n} asks for no answer. Ask for 1 or more.")
    piped = None if sys.stdin is None or sys.stdin.isatty() else sys.stdin
    run, prompt = parse_question(arguments.overrides, arguments.config, piped)
    with pause_gc():
        from etude.recipes.inference import generate

    generate(run, prompt, answers=arguments.n, best=arguments.best, raw=arguments.raw)


def _export(arguments: argparse.Namespace) -> None:
    from etude.recipes.hub import check_push, push

    if arguments.push is not None:
        check_push(arguments.push)
    elif arguments.private:
        raise ConfigError(
            "--private is about an upload, and --push is missing. Add `--push OWNER/NAME`, or leave --private out."
        )
    with pause_gc():
        from etude.recipes.inference import export_run

    export_run(
        arguments.run, arguments.to, best=arguments.best, adapter=arguments.adapter, fall_back=arguments.fall_back
    )
    if arguments.push is not None:
        print(f"Uploaded it to {push(arguments.to, arguments.push, private=arguments.private)}.")


def _demo(arguments: argparse.Namespace) -> None:
    began = time.perf_counter()
    from etude.demo import demo_setup

    demo_setup.compose_demo(demo_setup.DEMOS[arguments.demo], arguments.overrides, arguments.config)
    if arguments.demo == "agent":
        from etude.agents import load_openai_clients

        load_openai_clients()  # fails now if the library is missing; every attempt would fail later
    with pause_gc():
        module = import_module(f"etude.demo.{arguments.demo}")

    result = module.run_demo(arguments.overrides, arguments.config, began)
    if arguments.json:
        print(json.dumps(result))


def _demo_algorithms(arguments: argparse.Namespace) -> None:
    from etude.demo.tabular.command import run_demo

    result = run_demo(arguments.overrides, arguments.config, sweep=arguments.multirun)
    if arguments.json:
        print(json.dumps(result))
