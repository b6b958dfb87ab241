"""The command line: `etude version`, `etude config show`, `etude demo algorithms`.

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
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from etude import __version__
from etude.errors import EtudeError

__all__ = ["main", "parser"]

FAILED, REFUSED, INTERRUPTED, NOBODY_READS = 1, 2, 130, 141

ABOUT = """\
Etude trains language models, and agents built on them, by reinforcement learning.
Again and again: collect, score, estimate, update, publish."""

START = """\
start here:
  etude demo algorithms                       every loss on a problem that can be solved exactly, in seconds
  etude config show                           every option of that run, with its meaning
  etude version                               what is installed, and which devices were found

then change one thing:
  etude demo algorithms loss=gspo advantage=rloo
  etude demo algorithms --multirun loss=ppo,cispo seed=0,1,2
  etude config show loss=gspo                 what gspo's own options are

`etude COMMAND --help` tells more of each."""

OVERRIDES = """\
options of the run are written key=value:
  steps=200                                   a number, a text, a list [1,2]
  loss=gspo                                   a choice, by its name; a wrong name lists the right ones
  loss.clip_high=0.3                          an option of what was chosen
  loss=my_package.losses:MyLoss               a class of your own, from anywhere on PYTHONPATH
  directory='${oc.env:HOME}/runs'             a value from the environment
"""

DEMO = f"""\
{OVERRIDES}
examples:
  etude demo algorithms                       every loss in turn
  etude demo algorithms loss=dppo updates=4   one loss, further off its data
  etude demo algorithms kl=reverse            every loss, held to the reference
  etude demo algorithms advantage=gae         with values that are exact
  etude demo algorithms noise=0.5 correction.weight=truncate loss=ppo
  etude demo algorithms --multirun advantage=grpo,rloo,remax
  etude demo algorithms --config mine.yaml    a file of `key: value` lines; the command line goes over it"""

SHOW = f"""\
{OVERRIDES}
examples:
  etude config show                           the defaults
  etude config show kl=reverse                what changes, and which options it brings
  etude config show loss=gspo --yaml > mine.yaml
  etude config show --config mine.yaml"""


class _Overridable(argparse.ArgumentParser):
    """A parser that leaves words without a dash to the run, wherever they stand, as its `overrides`."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        known, rest = super().parse_known_args(args, namespace)
        known.overrides = [word for word in rest if not word.startswith("-")]
        return known, [word for word in rest if word.startswith("-")]


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    debug = argparse.ArgumentParser(add_help=False)
    debug.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error")
    raw = argparse.RawDescriptionHelpFormatter
    top = argparse.ArgumentParser(
        "etude", description=ABOUT, epilog=START, formatter_class=raw, parents=[debug], allow_abbrev=False
    )
    top.add_argument("--version", action="version", version=f"etude {__version__}")
    commands = top.add_subparsers(metavar="COMMAND", required=True, parser_class=argparse.ArgumentParser)

    about = commands.add_parser("version", help="what is installed, and which devices were found", parents=[debug])
    about.add_argument("--json", action="store_true", help="print one JSON object instead")
    about.set_defaults(command=_version)

    config = commands.add_parser("config", help="look at the options of a run").add_subparsers(
        metavar="COMMAND", required=True, parser_class=_Overridable
    )
    show = _of_run(config, "show", "print every option of a run, with its value and its meaning", SHOW, debug)
    show.add_argument("--yaml", action="store_true", help="print YAML that --config reads")
    show.set_defaults(command=_config_show)

    demo = commands.add_parser("demo", help="watch Etude learn something small").add_subparsers(
        metavar="COMMAND", required=True, parser_class=_Overridable
    )
    told = "train a table of logits by each loss, and draw the exact expected reward"
    algorithms = _of_run(demo, "algorithms", told, DEMO, debug)
    algorithms.add_argument("--multirun", action="store_true", help="one run for each combination of a,b,c values")
    algorithms.add_argument("--json", action="store_true", help="print the outcome as JSON, on the last line")
    algorithms.set_defaults(command=_demo_algorithms)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    debug = False
    try:
        try:
            arguments = parser().parse_args(argv)
        except SystemExit:  # the help was asked for, or the words are wrong
            _flush()
            raise
        debug = "debug" in arguments
        arguments.command(arguments)
        _flush()
    except EtudeError as error:
        if debug:
            raise
        _complain(str(error))
        return REFUSED
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _let_go()
        return NOBODY_READS
    except OSError as error:
        _let_go()
        if debug:
            raise
        where = f" at {error.filename}" if error.filename else ""
        _complain(f"The system refused to read or write{where}: {error.strerror or error}.")
        return FAILED
    return 0


def _flush() -> None:
    """Hand on what was printed; there is no standard output where it was closed before we began."""
    if sys.stdout is not None:
        sys.stdout.flush()


def _let_go() -> None:
    """The interpreter flushes standard output once more as it ends; where that would fail, let it go nowhere."""
    try:
        _flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _complain(sentence: str) -> None:
    """Say it on standard error, if there is one."""
    if sys.stderr is not None:
        with suppress(OSError):
            print(f"etude: {sentence}", file=sys.stderr)


def _of_run(
    commands: Any, name: str, told: str, epilog: str, debug: argparse.ArgumentParser
) -> argparse.ArgumentParser:
    """A command that takes the options of a run."""
    command: argparse.ArgumentParser = commands.add_parser(
        name,
        help=told,
        description=told[0].upper() + told[1:] + ".",
        usage=f"{commands._prog_prefix} {name} [key=value …] [--config FILE] [options]",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[debug],
        allow_abbrev=False,
    )
    command.add_argument("--config", type=Path, metavar="FILE", help="YAML that the options start from")
    return command


def _version(arguments: argparse.Namespace) -> None:
    from etude.tools import versions

    if arguments.json:
        print(json.dumps(versions.tree(__version__)))
    else:
        print("\n".join(versions.lines(__version__)))


def _config_show(arguments: argparse.Namespace) -> None:
    from etude.config.compose import compose
    from etude.config.show import rendered, to_yaml
    from etude.demo.algorithms import DemoRun
    from etude.observe import make_console

    run = compose(DemoRun, arguments.overrides, file=arguments.config)
    if arguments.yaml:
        print(to_yaml(run), end="")
    else:
        make_console().print(rendered(run), soft_wrap=True, end="")


def _demo_algorithms(arguments: argparse.Namespace) -> None:
    from etude.demo.demonstrate import demonstrate

    told = demonstrate(arguments.overrides, arguments.config, sweep=arguments.multirun)
    if arguments.json:
        print(json.dumps(told))
