"""The command line: the commands that train a model or ask one; `commands.py` and `service_commands.py` hold the
others.

Nothing heavy is imported until a command needs it, so that `--help` answers at once. An error of ours is a sentence on
standard error and exit code 2, what the system refuses one and 1; Ctrl-C ends with 130, a reader that went away with
141, both quietly. A standard output that is closed, or carries only ASCII, is no error.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from etude import __version__
from etude.commands import RUN, OverrideParser, add_commands, add_rollout_export, add_run_command
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
from etude.service_commands import add_service_commands

__all__ = ["build_parser", "expand_shorthand", "main"]

FAILED, REFUSED, INTERRUPTED, BROKEN_PIPE = 1, 2, 130, 141
LANGUAGE, MODEL = "language", "model"
DEMO_RUN = "etude.demo.algorithms:DemoRun"


def build_parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    debug = OverrideParser(add_help=False)
    debug.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error")
    raw = argparse.RawDescriptionHelpFormatter
    top = OverrideParser(
        "etude", description=ABOUT, epilog=GETTING_STARTED, formatter_class=raw, parents=[debug], allow_abbrev=False
    )
    top.add_argument("--version", action="version", version=f"etude {__version__}")
    commands = top.add_subparsers(metavar="COMMAND", required=True, parser_class=OverrideParser)
    _add_runs(commands, debug)

    config = commands.add_parser("config", help="look at the options of a run").add_subparsers(
        metavar="COMMAND", required=True, parser_class=OverrideParser
    )
    told, roots = "print every option of a run, with its value and its meaning", {"": RUN, "--demo": DEMO_RUN}
    show = add_run_command(config, "show", told, CONFIG_SHOW, debug, "[PRESET|RECIPE] ", roots | SUPERVISED_CLASSES)
    show.add_argument("--yaml", action="store_true", help="print YAML that --config reads")
    show.add_argument("--demo", action="store_true", help="the options of `etude demo algorithms` instead")
    show.set_defaults(command=_config_show)

    add_service_commands(commands, debug)
    add_commands(top, commands, debug)
    return top


def _add_runs(commands: Any, debug: OverrideParser) -> None:
    """The commands that train a model, or ask one."""
    train = add_run_command(
        commands, "train", "train a language model by reinforcement learning", TRAIN, debug, "[PRESET] "
    )
    train.add_argument("--resume", type=Path, metavar="RUN", help="go on with the run in this directory")
    train.add_argument("--multirun", action="store_true", help="one run for each combination of a,b,c values")
    train.set_defaults(command=_train)

    for name, (told, options) in SUPERVISED_COMMANDS.items():
        epilog, roots = (
            SUPERVISED_EPILOG.replace("NAME", name).replace("OPTIONS", options),
            {"": SUPERVISED_CLASSES[name]},
        )
        learn = add_run_command(commands, name, told, epilog, debug, roots=roots)
        learn.add_argument("--resume", type=Path, metavar="RUN", help="go on with the run in this directory")
        learn.add_argument("--multirun", action="store_true", help="one run for each combination of a,b,c values")
        learn.set_defaults(command=_learn, recipe=name)

    evaluate = add_run_command(
        commands, "eval", "score a model, or a run's checkpoint, on tasks", EVAL, debug, "[RUN] "
    )
    evaluate.add_argument("--best", action="store_true", help="the run's best checkpoint instead of its newest")
    evaluate.add_argument("--answers", type=Path, metavar="FILE", help="write the answers there, a JSON object a line")
    evaluate.add_argument("--json", action="store_true", help="print the scores as JSON, on the last line")
    evaluate.set_defaults(command=_eval)

    generate = add_run_command(
        commands, "generate", "ask a model, or a run's checkpoint", GENERATE, debug, "RUN|MODEL [PROMPT] "
    )
    generate.add_argument("-n", type=int, default=1, metavar="N", help="how many answers")
    generate.add_argument("--raw", action="store_true", help="continue the prompt as it stands, without chat template")
    generate.add_argument("--best", action="store_true", help="the run's best checkpoint instead of its newest")
    generate.set_defaults(command=_generate)

    _add_exports(commands, debug)
    demo = commands.add_parser(
        "demo",
        help="watch Etude learn something small",
        epilog=DEMO,
        parents=[debug],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    demos = demo.add_subparsers(metavar="COMMAND", required=True, parser_class=OverrideParser)
    told = "a language model from nothing to good (this is what `etude demo` alone does)"
    language = add_run_command(demos, LANGUAGE, told, DEMO, debug)
    language.add_argument("--json", action="store_true", help="print the outcome as JSON, on the last line")
    language.set_defaults(command=_demo_language)
    told = "an agent that calls the model by OpenAI's client learns to use its tools"
    agent = add_run_command(demos, "agent", told, DEMO_AGENT, debug)
    agent.add_argument("--json", action="store_true", help="print the outcome as JSON, on the last line")
    agent.set_defaults(command=_demo_agent)
    told = "train a table of logits by each loss, and draw the exact expected reward"
    algorithms = add_run_command(demos, "algorithms", told, ALGORITHMS, debug, roots={"": DEMO_RUN})
    algorithms.add_argument("--multirun", action="store_true", help="one run for each combination of a,b,c values")
    algorithms.add_argument("--json", action="store_true", help="print the outcome as JSON, on the last line")
    algorithms.set_defaults(command=_demo_algorithms)


def _add_exports(commands: Any, debug: OverrideParser) -> None:
    raw = argparse.RawDescriptionHelpFormatter
    told = "write a run's model, or its rollouts, as files that others read"
    exports = commands.add_parser("export", help=told, epilog=EXPORT, parents=[debug], formatter_class=raw)
    kinds = exports.add_subparsers(metavar="COMMAND", required=True, parser_class=OverrideParser)
    told = "write its model as a Hugging Face directory (this is what `etude export RUN DIRECTORY` does)"
    export = kinds.add_parser(MODEL, help=told, epilog=EXPORT, parents=[debug], formatter_class=raw)
    export.add_argument("run", type=Path, metavar="RUN", help="the directory of a run")
    export.add_argument("to", type=Path, metavar="DIRECTORY", help="where to write; it must not be there yet")
    export.add_argument("--best", action="store_true", help="the run's best checkpoint instead of its newest")
    told = "where the newest checkpoint is damaged, the newest that is whole"
    export.add_argument("--fall-back", action="store_true", help=told)
    export.add_argument("--adapter", action="store_true", help="a run's LoRA adapter alone, as peft loads it")
    told = "upload it as this model of the Hugging Face hub, too"
    export.add_argument("--push", metavar="OWNER/NAME", help=told)
    export.add_argument("--private", action="store_true", help="with --push: a new model is seen by its owner alone")
    export.set_defaults(command=_export)
    add_rollout_export(kinds, debug)


def expand_shorthand(argv: Sequence[str]) -> list[str]:
    """`etude` alone is its help, `etude demo` its first demo, and `etude export RUN` is `etude export model RUN`."""
    words = list(argv) or ["--help"]
    if words[:1] == ["export"] and words[1:2] not in ([], [MODEL], ["rollouts"], ["-h"], ["--help"]):
        words.insert(1, MODEL)
    if words[0] == "demo" and words[1:2] not in (["-h"], ["--help"]):
        names_no_demo = len(words) == 1 or "=" in words[1] or words[1].startswith("-")
        if names_no_demo:
            words.insert(1, LANGUAGE)
    return words


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    debug = False
    try:
        try:
            arguments = build_parser().parse_args(expand_shorthand(sys.argv[1:] if argv is None else argv))
        except SystemExit:  # the help was asked for, or the words are wrong
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
        return FAILED
    return code or 0


def _flush() -> None:
    """Hand on what was printed; there is no standard output where it was closed before we began."""
    if sys.stdout is not None:
        sys.stdout.flush()


def _discard_stdout() -> None:
    """The interpreter flushes standard output once more as it ends; where that would fail, let it go nowhere."""
    try:
        _flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print_error(sentence: str) -> None:
    """Say it on standard error, if there is one."""
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
        from etude.demo.algorithms import DemoRun

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
                f"--multirun is many runs, and ETUDE_ROLE={read_role()} a part of one. Leave one of them out."
            )
        from etude.recipes.run.loop import train
        from etude.recipes.sweep import sweep

        sweep(Run, train, overrides, arguments.config, preset)
    else:
        _train_or_run_agents(compose_run(Run, overrides, arguments.config, preset))


def _train_or_run_agents(run: Any) -> None:
    """Train; or play what another trains, where ETUDE_ROLE says that this process is a runner."""
    from etude.config.env import read_role
    from etude.recipes.run.loop import train

    if read_role() is not None:
        from etude.agents.agent import load_agent
        from etude.recipes.agents.process_role import serve_if_runner

        if run.agent.path is None:
            raise ConfigError(
                f"ETUDE_ROLE={read_role()} says which part of the work with agents is this process's, and this run has "
                "no `agent.path`. Unset it."
            )
        if serve_if_runner(load_agent(run.agent.path), run.agent.max_concurrency):
            return
        run = run.model_copy(update={"agent": run.agent.model_copy(update={"runners": 0})})
    train(run)


def _learn(arguments: argparse.Namespace) -> None:
    from etude.recipes.hub import resolve_hub_names
    from etude.recipes.registry import SUPERVISED, compose_run
    from etude.recipes.run.directory import read_recipe
    from etude.recipes.sweep import sweep

    def learn(run: Any, interrupt: Any = None) -> Path:
        run = resolve_hub_names(run)
        with pause_gc():
            from etude.recipes.supervised.builder import train_supervised

        return train_supervised(run, interrupt)

    kind = SUPERVISED[arguments.recipe]
    if arguments.resume is not None:
        _check_resume_flags(arguments)
        learn(read_recipe(kind, arguments.resume, arguments.overrides))
    elif arguments.multirun:
        sweep(kind, learn, arguments.overrides, arguments.config)
    else:
        learn(compose_run(kind, arguments.overrides, arguments.config))


def _check_resume_flags(arguments: argparse.Namespace) -> None:
    if arguments.config is not None or arguments.multirun:
        raise ConfigError(
            "--resume goes on with one run as it was started, and takes neither --config nor --multirun. Write what "
            "may change as key=value."
        )


def _eval(arguments: argparse.Namespace) -> None:
    from etude.recipes.run_argument import resolve_run

    run, _ = resolve_run(arguments.overrides, arguments.config, "eval")
    with pause_gc():
        from etude.recipes.inference import evaluate

    told = evaluate(run, best=arguments.best, answers=arguments.answers)
    if arguments.json:
        print(json.dumps(told))


def _generate(arguments: argparse.Namespace) -> None:
    from etude.recipes.run_argument import parse_question

    if arguments.n < 1:
        raise ConfigError(f"-n {arguments.n} asks for no answer. Ask for 1 or more.")
    typed = None if sys.stdin is None or sys.stdin.isatty() else sys.stdin
    run, prompt = parse_question(arguments.overrides, arguments.config, typed)
    with pause_gc():
        from etude.recipes.inference import generate

    generate(run, prompt, answers=arguments.n, best=arguments.best, raw=arguments.raw)


def _export(arguments: argparse.Namespace) -> None:
    from etude.recipes.hub import check_push, push

    if arguments.push is not None:
        check_push(arguments.push)
    elif arguments.private:
        raise ConfigError(
            "--private says how a model is uploaded, and none is. Add `--push OWNER/NAME`, or leave it out."
        )
    with pause_gc():
        from etude.recipes.inference import export_run

    export_run(
        arguments.run, arguments.to, best=arguments.best, adapter=arguments.adapter, fall_back=arguments.fall_back
    )
    if arguments.push is not None:
        print(f"Uploaded it to {push(arguments.to, arguments.push, private=arguments.private)}.")


def _demo_language(arguments: argparse.Namespace) -> None:
    began = time.perf_counter()
    from etude.demo.demo_setup import LANGUAGE_DEMO, compose_demo

    compose_demo(LANGUAGE_DEMO, arguments.overrides, arguments.config)
    with pause_gc():
        from etude.demo.language import run_demo

    told = run_demo(arguments.overrides, arguments.config, began)
    if arguments.json:
        print(json.dumps(told))


def _demo_agent(arguments: argparse.Namespace) -> None:
    began = time.perf_counter()
    from etude.agents import load_openai_clients
    from etude.demo.demo_setup import AGENT_DEMO, compose_demo

    compose_demo(AGENT_DEMO, arguments.overrides, arguments.config)
    load_openai_clients()  # without it no attempt would come to anything, which is better known at once
    with pause_gc():
        from etude.demo.agent import run_demo

    told = run_demo(arguments.overrides, arguments.config, began)
    if arguments.json:
        print(json.dumps(told))


def _demo_algorithms(arguments: argparse.Namespace) -> None:
    from etude.demo.algorithms_demo import run_demo

    told = run_demo(arguments.overrides, arguments.config, sweep=arguments.multirun)
    if arguments.json:
        print(json.dumps(told))
