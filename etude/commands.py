"""The commands around a run: data sets, memory plans, simulations, chat, checks of this machine.

The file also holds the parser of all commands, and the functions that add a command to it. `cli.py`, `run_commands.py`
and `service_commands.py` hold the other commands.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

from etude import __version__
from etude.config.suggestions import suggest_name
from etude.errors import ConfigError, UnknownChoiceError
from etude.help_texts import CHAT, COMPLETION, DATA_SHOW, DOCTOR, PLAN, PREPARE, SIMULATE
from etude.lazy import pause_gc

RUN = "etude.recipes.run.config:Run"
PREPARATIONS = {
    "gsm8k": "etude.data.prepare.gsm8k:Gsm8kPreparation",
    "math": "etude.data.prepare.maths:MathPreparation",
    "pictures": "etude.data.prepare.pictures:PicturesPreparation",
    "countdown": "etude.data.prepare.countdown:CountdownPreparation",
    "arithmetic": "etude.data.prepare.arithmetic:ArithmeticPreparation",
    "instructions": "etude.data.prepare.instructions:InstructionPreparation",
    "preferences": "etude.data.prepare.preferences:PreferencePreparation",
}
"""The preparation of each data set, whose fields are its options, as `module:Name`: it is imported when it is run."""

PROJECT_KINDS = ("answer", "tools", "game", "agent", "pictures")
"""The kinds of runs that `etude init` writes files for."""
INIT = """\
examples:
  etude init my-run                  one answer to a prompt, judged by a function
  etude init my-run --kind tools     the model calls your functions
  etude init my-run --kind game      several turns with an environment
  etude init my-run --kind agent     a program that calls the model
  etude init my-run --kind pictures  answers about pictures

Each directory has 20 tasks, the code, run.yaml, README.md and test_run.py,
which trains a tiny model for two steps. Replace them by your own."""

PLAN_CLASSES = {
    "": "etude.tools.plan.options:PlanRun",
    "sft": "etude.tools.plan.options:PlanSFT",
    "dpo": "etude.tools.plan.options:PlanDPO",
    "reward-model": "etude.tools.plan.options:PlanRewardModel",
    "distill": "etude.tools.plan.options:PlanDistill",
}
"""The class of the options of `etude plan`, by the recipe that the command line names."""

SIMULATE_CLASSES = {"": "etude.tools.simulate.options:SimulateOptions"}

BEST = "use the run's best checkpoint instead of its newest"
SHELLS = ("bash", "zsh", "fish")


class OverrideParser(argparse.ArgumentParser):
    """A parser that can collect all words without a dash as the run's `overrides`."""

    takes_overrides = False

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        traceback = "print the traceback of an error"
        self.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=traceback)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Refuse a word that is not among the choices of an argument, and suggest the nearest choice."""
        choices = list(action.choices or ())
        if action.choices is not None and value not in choices:
            listed = [choice.dest for choice in getattr(action, "_choices_actions", ())]  # those that have a help
            names = listed or [str(choice) for choice in choices]
            kind = "command" if action.nargs == argparse.PARSER else str(action.dest).rstrip("_")
            message = f"there is no {kind} '{value}'.{suggest_name(str(value), names)} There are {', '.join(names)}."
            raise argparse.ArgumentError(None, message)

    def _refuse_port(self, words: Sequence[str]) -> None:
        """Refuse `--port` and `--host` of a command that listens: both are in `--listen`."""
        if "--listen" not in self._option_string_actions:
            return
        host, _, port = self.get_default("listen").rpartition(":")
        given = {"--host": host, "--port": port}
        for word, following in pairwise([*words, ""]):
            name, equals, value = word.partition("=")
            if name in given:
                given[name] = value if equals else following
        if flags := [word.partition("=")[0] for word in words if word.partition("=")[0] in given]:
            address = ":".join(given.values())
            self.error(f"an address is given by --listen, not by {' and '.join(flags)}: --listen {address}")

    def _answer_name(self, name: str) -> str:
        """Return the sentence about an option's name in another trainer; empty for other names."""
        from etude.config import load_plugin
        from etude.config.foreign_names import answer_foreign_names

        return " ".join(answer_foreign_names(load_plugin(self.get_default("roots")[""], None), name, None, ()))

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Return the known arguments and the remaining words; a run's command leaves no word over."""
        self._refuse_port(args or ())
        known, rest = super().parse_known_args(args, namespace)
        if not self.takes_overrides:
            if rest and self._subparsers is None:  # print the usage of this command, not that of `etude`
                self.error(f"unrecognized arguments: {' '.join(rest)}")
            return known, rest
        known.overrides = [word for word in rest if not word.startswith("-")]
        dashed = [word for word in rest if word.startswith("-")]
        if dashed:
            name, _, value = dashed[0].lstrip("-").partition("=")
            written = f"{name.replace('-', '_')}={value or '…'}"
            message = f"{dashed[0]} is unknown here. Options of the run are written without dashes: {written}"
            answer = self._answer_name(name.replace("-", "_"))
            self.error(f"{message}. And {answer}" if answer else message)
        return known, []


def add_command(commands: Any, name: str, summary: str, epilog: str | None = None) -> argparse.ArgumentParser:
    """Add a command that takes flags and positional arguments, and no options of a run."""
    command: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=_describe(summary),
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return command


def add_command_group(commands: Any, name: str, summary: str) -> Any:
    """Add a command that only has subcommands, and return argparse's object that they are added to."""
    group = commands.add_parser(name, help=summary, description=_describe(summary))
    return group.add_subparsers(metavar="COMMAND", required=True, parser_class=OverrideParser)


def add_run_command(
    commands: Any,
    name: str,
    summary: str,
    epilog: str,
    positionals: str = "",
    roots: Mapping[str, str] = MappingProxyType({"": RUN}),
) -> argparse.ArgumentParser:
    """Add a command that takes options as `key=value`.

    roots: the class whose fields are the options, as `module:Name`, by the word of the command line that selects it;
    the empty word stands for any other command line.
    """
    command: OverrideParser = commands.add_parser(
        name,
        help=summary,
        description=_describe(summary),
        usage=f"{commands._prog_prefix} {name} {positionals}[key=value …] [--config FILE] [options]",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.takes_overrides = True
    command.set_defaults(roots=dict(roots), words=positionals)
    command.add_argument("--config", type=Path, metavar="FILE", help="YAML file of options; key=value overrides it")
    return command


def _describe(summary: str) -> str:
    return f"{summary[0].upper()}{summary[1:]}."


def add_commands(top: argparse.ArgumentParser, commands: Any) -> None:
    """Add the commands of this file to those of `etude`, whose parser is `top`."""
    _add_init(commands)
    _add_data(commands)
    chat = add_run_command(commands, "chat", "chat with a model or a run's checkpoint", CHAT, "RUN|MODEL ")
    chat.add_argument("--best", action="store_true", help=BEST)
    chat.set_defaults(command=_chat)

    summary = "estimate the memory and step time of a run, and what each option saves"
    plan = add_run_command(commands, "plan", summary, PLAN, "[PRESET|RECIPE] ", PLAN_CLASSES)
    plan.add_argument("--quick", action="store_true", help="skip the estimate of what each option saves")
    plan.add_argument("--json", action="store_true", help="print one JSON object instead")
    plan.set_defaults(command=_plan)

    summary = "simulate a run on a cluster, or replay a finished one, with several staleness bounds"
    simulate = add_run_command(commands, "simulate", summary, SIMULATE, "[RUN] ", SIMULATE_CLASSES)
    cluster = "with RUN: simulate its rollouts on the cluster of the options, and not on its own machine"
    simulate.add_argument("--cluster", action="store_true", help=cluster)
    simulate.add_argument("--json", action="store_true", help="print one JSON object instead")
    simulate.set_defaults(command=_simulate)

    _add_machine(commands)
    completion = add_command(commands, "completion", "print a shell's completion script", COMPLETION)
    completion.add_argument("shell", choices=SHELLS, help="name of the shell")
    completion.set_defaults(command=_completion)
    complete = commands.add_parser("complete")  # the completion scripts call it; without `help` it is not listed
    complete.add_argument("for_", choices=SHELLS)
    complete.add_argument("words", nargs=argparse.REMAINDER)
    complete.set_defaults(command=_complete, top=top)


def _add_init(commands: Any) -> None:
    summary = "write the files of a first run: data, code, options and a test"
    init = add_command(commands, "init", summary, INIT)
    init.add_argument("directory", type=Path, metavar="DIRECTORY", help="directory to write; new or empty")
    kinds = "one answer, calls of your functions, a game of several turns, an agent, pictures (default answer)"
    init.add_argument("--kind", choices=PROJECT_KINDS, default=PROJECT_KINDS[0], help=kinds)
    init.set_defaults(command=_init)


def _add_data(commands: Any) -> None:
    data = add_command_group(commands, "data", "prepare and print data sets of tasks")
    summary = "write the files of a data set that a run reads"
    prepare = add_run_command(data, "prepare", summary, PREPARE, "SET ", PREPARATIONS)
    prepare.add_argument("--options", action="store_true", help="print the data set's options and write nothing")
    prepare.add_argument("--json", action="store_true", help="print the result as one JSON object on the last line")
    prepare.set_defaults(command=_data_prepare)

    summary, roots = "print tasks as the model's prompt shows them", {"": "etude.tools.data_commands:ShowOptions"}
    show = add_run_command(data, "show", summary, DATA_SHOW, "FILE|NAME ", roots)
    show.add_argument("-n", type=int, default=3, metavar="N", help="number of tasks (default 3)")
    show.add_argument("--row", type=int, default=0, metavar="K", help="first row to print (default 0)")
    template = "model directory; its chat template and tokens are printed too"
    show.add_argument("--model", type=Path, metavar="DIRECTORY", help=template)
    show.set_defaults(command=_data_show)


def _add_machine(commands: Any) -> None:
    summary = "check a run for reasons why it does not learn, or this machine for problems that would stop a run"
    doctor = add_command(commands, "doctor", summary, DOCTOR)
    where = "directory of a run, or one in which runs will be written (default: this one)"
    doctor.add_argument("directory", nargs="?", type=Path, default=Path(), metavar="RUN|DIRECTORY", help=where)
    doctor.add_argument("--json", action="store_true", help="print one JSON object instead")
    doctor.set_defaults(command=_doctor)

    version = add_command(commands, "version", "print the versions of packages and the devices found")
    version.add_argument("--json", action="store_true", help="print one JSON object instead")
    version.set_defaults(command=_version)


def _split_name(arguments: argparse.Namespace, kind: str, example: str) -> tuple[str, list[str]]:
    """Split the words into the one name, of a data set or a file, and the options."""
    names = [word for word in arguments.overrides if "=" not in word]
    if len(names) != 1:
        given = " and ".join(names) or "none"
        raise ConfigError(f"Name {kind}, and only one; {given} was named. For example: `{example}`.")
    return names[0], [word for word in arguments.overrides if word != names[0]]


def _init(arguments: argparse.Namespace) -> None:
    from etude.tools.project.new_project import show_new_project

    show_new_project(arguments.directory, arguments.kind)


def _data_prepare(arguments: argparse.Namespace) -> None:
    from etude.config import load_plugin
    from etude.config.compose import compose
    from etude.config.show import render_config
    from etude.observe import make_console
    from etude.tools.data_commands import prepare, to_dict

    name, options = _split_name(arguments, "a data set to prepare", "etude data prepare gsm8k raw=raw/gsm8k")
    if name not in PREPARATIONS:
        raise UnknownChoiceError(
            f"There is no data set '{name}' to prepare.{suggest_name(name, PREPARATIONS)} There are "
            f"{', '.join(PREPARATIONS)}. Files of your own need no preparation if `data.columns` can name their "
            "columns."
        )
    preparation = compose(load_plugin(PREPARATIONS[name], None), options, file=arguments.config)
    if arguments.options:
        make_console().print(render_config(preparation), soft_wrap=True, end="")
        return
    prepared = prepare(preparation)
    if arguments.json:
        print(json.dumps(to_dict(prepared)))


def _data_show(arguments: argparse.Namespace) -> None:
    from etude.config.compose import compose
    from etude.tools.data_commands import ShowOptions, show

    file, options = _split_name(arguments, "a file of tasks", "etude data show data/gsm8k/train.parquet")
    show_options = compose(ShowOptions, options, file=arguments.config)
    show(file, show_options, first=arguments.row, tasks=arguments.n, model=arguments.model)


def _chat(arguments: argparse.Namespace) -> None:
    from etude.recipes.run_argument import resolve_run, without_secrets

    run, source = resolve_run(arguments.overrides, arguments.config, "chat", masked=without_secrets)
    with pause_gc():
        from etude.tools.chat import run_chat

    with suppress(ImportError):  # `input` edits its line where the system has this library
        import readline  # noqa: F401
    piped = None if sys.stdin is not None and sys.stdin.isatty() else sys.stdin
    run_chat(run, source, best=arguments.best, piped=piped)


def compose_recipe(arguments: argparse.Namespace, classes: Mapping[str, str]) -> tuple[str, Any]:
    """Return the recipe that a command line names, empty for `etude train`, and its run. classes: of the options, by
    the recipe."""
    from etude.config import load_plugin
    from etude.recipes.presets import split_preset
    from etude.recipes.registry import compose_run

    recipe = next((word for word in arguments.overrides if word in classes), "")
    preset, overrides = split_preset([word for word in arguments.overrides if word != recipe])
    if recipe and preset is not None:
        raise ConfigError(f"The preset {preset.stem} belongs to `etude train`, and `etude {recipe}` takes none.")
    return recipe, compose_run(load_plugin(classes[recipe], None), overrides, arguments.config, preset)


def _plan(arguments: argparse.Namespace) -> int:
    _, run = compose_recipe(arguments, PLAN_CLASSES)
    with pause_gc():
        from etude.tools.plan.planner import plan_memory, to_dict
        from etude.tools.plan.report import show

    plan = (plan_memory if arguments.json else show)(run, with_savings=not arguments.quick)
    if arguments.json:
        print(json.dumps(to_dict(plan)))
    return 1 if plan.fits is False else 0


def _simulate(arguments: argparse.Namespace) -> None:
    from etude.config.compose import compose
    from etude.tools.simulate.options import SimulateOptions

    runs = [word for word in arguments.overrides if "=" not in word]
    if len(runs) > 1:
        raise ConfigError(f"One run can be simulated at a time; {' and '.join(runs)} were named.")
    options = compose(SimulateOptions, [word for word in arguments.overrides if "=" in word], file=arguments.config)
    if not runs and arguments.cluster:
        raise ConfigError("--cluster is about the rollouts of a run, and none was named. Name its directory first.")
    with pause_gc():
        from etude.tools.simulate.report import show_replay, show_search

    if runs and not arguments.cluster:
        result = show_replay(options, Path(runs[0]), silent=arguments.json)
    else:
        result = show_search(options, Path(runs[0]) if runs else None, silent=arguments.json)
    if arguments.json:
        print(json.dumps(result))


def _doctor(arguments: argparse.Namespace) -> int:
    from etude.tools.doctor import is_healthy, run_checks, show, to_dict
    from etude.tools.doctor.run import examine, is_run, show_examined

    if is_run(arguments.directory):
        examined = examine(arguments.directory)
        if arguments.json:
            print(json.dumps(examined.to_dict()))
        else:
            show_examined(examined)
        return 0 if examined.is_healthy else 1
    if arguments.json:
        findings = run_checks(arguments.directory)
        print(json.dumps(to_dict(findings)))
    else:
        findings = show(arguments.directory)
    return 0 if is_healthy(findings) else 1


def _completion(arguments: argparse.Namespace) -> None:
    from etude.tools.shell_completion.suggest import completion_script

    print(completion_script(arguments.shell), end="")


def _complete(arguments: argparse.Namespace) -> None:
    from etude.tools.shell_completion import suggest as completion

    if arguments.for_ == "bash":
        program, breaks, line = arguments.words
        words = completion.split_words(line, program)
        suggestions = [] if words is None else completion.suggest(arguments.top, words)
        print("\n".join(completion.format_for_bash(suggestions, words[-1] if words else "", breaks)))
    else:
        *before, current = (completion.unquote(word) for word in arguments.words)
        for suggestion in completion.suggest(arguments.top, [*before, current]):
            text = suggestion.text.rstrip() if arguments.for_ == "fish" else suggestion.text  # fish adds the space
            print(f"{text}\t{suggestion.meaning}")


def _version(arguments: argparse.Namespace) -> None:
    from etude.tools import versions

    if arguments.json:
        print(json.dumps(versions.to_dict(__version__)))
    else:
        print("\n".join(versions.format_lines(__version__)))
