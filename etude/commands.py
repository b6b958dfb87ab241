"""The commands around a run: its curves and its answers, data, this machine. `etude/cli.py` holds those that train.

And what all commands are made with: a parser that leaves the options of a run to the run.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from etude import __version__
from etude.config.suggestions import suggest_name
from etude.errors import ConfigError
from etude.lazy import pause_gc

__all__ = ["OverrideParser", "add_commands", "add_rollout_export", "add_run_command"]

PREPARE = """\
the sets, from raw files as they were published:
  gsm8k           openai/gsm8k: Parquet or JSONL with `question` and `answer`
  math            MATH, MATH-500: a JSON file for each problem, Parquet or JSONL
  instructions    google/IFEval: JSONL with prompts and their constraints
  preferences     pairs of answers: Anthropic's HH, UltraFeedback, and TRL's columns
and made up:
  countdown       reach a number with others
  arithmetic      sums, differences and products

examples:
  etude data prepare gsm8k raw=raw/gsm8k
  etude data prepare math raw=raw/math held_out=0.05 levels=[3,4,5]
  etude data prepare countdown train=50000 test=500 numbers=[3,4] seed=1
  etude data prepare arithmetic operations=[add,multiply] digits=3 form=text prompt="'{question} ='"
  etude data prepare preferences raw=[raw/hh/helpful-base,raw/hh/harmless-base] directory=data/hh
  etude data prepare gsm8k --options          every option of a set, with its meaning"""

DATA_SHOW = """\
examples:
  etude data show data/gsm8k/train.parquet
  etude data show data/gsm8k/train.parquet --model Qwen3-0.6B -n 1 chat.template_kwargs.enable_thinking=false
  etude data show openai/gsm8k/main:test columns.prompt=question
  etude data show mine.jsonl columns.prompt=question columns.answer=result"""


RUN = "etude.recipes.run.config:Run"
PREPARATION_CLASSES = {
    "gsm8k": "etude.data.prepare.gsm8k:Gsm8kPreparation",
    "math": "etude.data.prepare.maths:MathPreparation",
    "countdown": "etude.data.prepare.countdown:CountdownPreparation",
    "arithmetic": "etude.data.prepare.arithmetic:ArithmeticPreparation",
    "instructions": "etude.data.prepare.instructions:InstructionPreparation",
    "preferences": "etude.data.prepare.preferences:PreferencePreparation",
}
"""The sets that can be prepared, and the classes whose fields are their options, without importing them."""

PLAN_CLASSES = {
    "": "etude.tools.plan.options:PlanRun",
    "sft": "etude.tools.plan.options:PlanSFT",
    "dpo": "etude.tools.plan.options:PlanDPO",
    "reward-model": "etude.tools.plan.options:PlanRewardModel",
    "distill": "etude.tools.plan.options:PlanDistill",
}
"""What can be planned, by the word that says so."""


ROLLOUTS = """\
what it is written as:
  --as sft      rows that `etude sft` learns from (.parquet, .jsonl): rollouts that succeeded and earned enough
  --as dpo      pairs that `etude dpo` and `etude reward-model` learn from: the best and the worst try at each task
  --as jsonl    all that is known, a rollout a line: its task, every attempt, turns with text, token ids and log-probs
  --as otlp     a trace of OpenTelemetry's a line (OTLP in JSON), for a collector or its otlpjsonfile receiver

sets hold the very tokens that were read and written (--form ids), for models with the same vocabulary. --form text
writes what they say, for any model. The run may be going on: what is there by now is written.

examples:
  etude export rollouts runs/mine good.parquet --as sft --min-reward 1
  etude export rollouts runs/mine pairs.parquet --as dpo --min-gap 0.5
  etude export rollouts runs/mine plans.jsonl --as sft --tags planner --form text
  etude export rollouts runs/mine everything.jsonl --split all
  etude export rollouts runs/mine traces.jsonl --as otlp"""


CHAT = """\
examples:
  etude chat runs/train-20260101-120000                 the run's newest checkpoint
  etude chat runs/train-20260101-120000 --best
  etude chat Qwen3-0.6B sampling.temperature=0.7 sampling.max_tokens=1000
  printf 'Hello.\\nAnd again?\\n' | etude chat Qwen3-0.6B

Each line is a message, and each answer continues the very tokens of the conversation. /new begins another one; /quit,
Ctrl-D or Ctrl-C at the prompt ends. Ctrl-C during an answer stops that answer. For one question and its answer there
is `etude generate`, for programs `etude serve`."""


PLAN = """\
examples:
  etude plan grpo model.path=Qwen3-0.6B
  etude plan grpo model.path=Qwen3-4B gpus=8 gpu_gib=80 sampling.max_tokens=8192
  etude plan grpo model.path=Qwen3-4B gpus=1 gpu_gib=80 train.offload=true --quick
  etude plan grpo model.path=Qwen3-4B gpus=4 gpu_gib=80 rollout=vllm rollout.replicas=2 rollout.devices=[2,3]
  etude plan dpo model.path=Qwen3-4B gpus=2 gpu_gib=80 data.max_tokens=4096

The first word is a preset of `etude train`, or a recipe that learns from examples: sft, dpo, reward-model, distill.

A step is rehearsed on tensors that take no memory: of the model, only config.json and the tokenizer are read. Exit code
1 if it does not fit."""

SHELLS = ("bash", "zsh", "fish")
COMPLETION = """\
put it where your shell starts:
  ~/.bashrc                     source <(etude completion bash)
  ~/.zshrc, after compinit      source <(etude completion zsh)
  ~/.config/fish/config.fish    etude completion fish | source

Commands, flags, presets, options and what they can be set to, files: each is offered after a press of the key."""


class OverrideParser(argparse.ArgumentParser):
    """A parser that can leave words without a dash to the run, wherever they stand, as its `overrides`."""

    takes_overrides = False

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Refuse a word that is none of those that may stand there, with the nearest that may."""
        known = list(action.choices or ())
        if action.choices is not None and value not in known:
            shown = [each.dest for each in getattr(action, "_choices_actions", ())] or [str(each) for each in known]
            what = "command" if action.nargs == argparse.PARSER else str(action.dest).rstrip("_")
            told = f"there is no {what} '{value}'.{suggest_name(str(value), shown)} There are {', '.join(shown)}."
            raise argparse.ArgumentError(None, told)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """The arguments that are known, and the others; of a run's command all words are."""
        known, rest = super().parse_known_args(args, namespace)
        if not self.takes_overrides:
            return known, rest
        known.overrides = [word for word in rest if not word.startswith("-")]
        dashed = [word for word in rest if word.startswith("-")]
        if dashed:
            name, _, value = dashed[0].lstrip("-").partition("=")
            written = f"{name.replace('-', '_')}={value or '…'}"
            self.error(f"{dashed[0]} is unknown here. Options of the run are written without dashes: {written}")
        return known, []


def add_run_command(
    commands: Any,
    name: str,
    summary: str,
    epilog: str,
    debug: argparse.ArgumentParser,
    positionals: str = "",
    roots: Mapping[str, str] = MappingProxyType({"": RUN}),
) -> argparse.ArgumentParser:
    """A command that takes options as `key=value`: the fields of the class that `roots` names as `module:Name`.

    Where one of its words is a key of `roots`, they are those of the class that stands there.
    """
    command: OverrideParser = commands.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        usage=f"{commands._prog_prefix} {name} {positionals}[key=value …] [--config FILE] [options]",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[debug],
        allow_abbrev=False,
    )
    command.takes_overrides = True
    command.set_defaults(roots=dict(roots), words=positionals)
    command.add_argument("--config", type=Path, metavar="FILE", help="YAML that the options start from")
    return command


def add_commands(top: argparse.ArgumentParser, commands: Any, debug: argparse.ArgumentParser) -> None:
    """Add the commands of this file to those of `etude`, whose parser is `top`."""
    plot = commands.add_parser("plot", help="draw the curves of runs, here and as a PNG", parents=[debug])
    plot.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="directories of runs, drawn over each other")
    plot.add_argument("--metrics", default="", metavar="A,B", help="which metrics; by default the most telling ones")
    plot.add_argument(
        "--out", type=Path, metavar="FILE", help="of the picture; by default RUN/plot.png, or here of several"
    )
    plot.set_defaults(command=_plot)

    answers = commands.add_parser("answers", help="look at the answers that a step was trained on", parents=[debug])
    answers.add_argument("run", type=Path, metavar="RUN", help="the directory of a run, which may be going on")
    answers.add_argument("--step", type=int, metavar="K", help="which step; by default the last one")
    answers.add_argument("-n", type=int, metavar="N", help="how many of its tasks (default 3, and all with --json)")
    answers.add_argument("--whole", action="store_true", help="answers in full, however long")
    answers.add_argument("--json", action="store_true", help="print every answer of the step, a JSON object a line")
    answers.set_defaults(command=_answers)

    data = commands.add_parser("data", help="make tasks of published data, and look at them").add_subparsers(
        metavar="COMMAND", required=True, parser_class=OverrideParser
    )
    prepare = add_run_command(
        data, "prepare", "make the files that a run reads", PREPARE, debug, "SET ", PREPARATION_CLASSES
    )
    prepare.add_argument("--options", action="store_true", help="print the options of the set, and write nothing")
    prepare.add_argument("--json", action="store_true", help="print what was written as JSON, on the last line")
    prepare.set_defaults(command=_data_prepare)
    roots = {"": "etude.tools.data_commands:ShowOptions"}
    show = add_run_command(
        data, "show", "look at tasks as a model would be asked them", DATA_SHOW, debug, "FILE|NAME ", roots
    )
    show.add_argument("-n", type=int, default=3, metavar="N", help="how many (default 3)")
    show.add_argument("--row", type=int, default=0, metavar="K", help="from which row on (default 0)")
    show.add_argument("--model", type=Path, metavar="DIRECTORY", help="a model, whose template and tokens are shown")
    show.set_defaults(command=_data_show)

    chat = add_run_command(commands, "chat", "talk with a model, or with a run's checkpoint", CHAT, debug, "RUN|MODEL ")
    chat.add_argument("--best", action="store_true", help="the run's best checkpoint instead of its newest")
    chat.set_defaults(command=_chat)

    _add_plan(commands, debug)
    _add_machine(commands, debug)

    completion = commands.add_parser(
        "completion",
        help="print what makes a shell complete words after `etude`",
        epilog=COMPLETION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[debug],
    )
    completion.add_argument("shell", choices=SHELLS, help="which shell")
    completion.set_defaults(command=_completion)
    complete = commands.add_parser("complete")  # what those scripts call; not for people, hence without help
    complete.add_argument("for_", choices=(*SHELLS, "read"))
    complete.add_argument("cache", type=Path)
    complete.add_argument("words", nargs=argparse.REMAINDER)
    complete.set_defaults(command=_complete, top=top)


def _add_plan(commands: Any, debug: argparse.ArgumentParser) -> None:
    told = "tell how much memory a run will take, and which option moves it"
    plan = add_run_command(commands, "plan", told, PLAN, debug, "[PRESET | RECIPE] ", PLAN_CLASSES)
    plan.add_argument("--quick", action="store_true", help="leave out what each option would save")
    plan.add_argument("--json", action="store_true", help="print one JSON object instead")
    plan.set_defaults(command=_plan)


def _add_machine(commands: Any, debug: argparse.ArgumentParser) -> None:
    doctor = commands.add_parser("doctor", help="look for what stands in the way of a run", parents=[debug])
    where = "where runs are to be kept; by default here"
    doctor.add_argument("directory", nargs="?", type=Path, default=Path(), metavar="DIRECTORY", help=where)
    doctor.add_argument("--json", action="store_true", help="print one JSON object instead")
    doctor.set_defaults(command=_doctor)

    about = commands.add_parser("version", help="what is installed, and which devices were found", parents=[debug])
    about.add_argument("--json", action="store_true", help="print one JSON object instead")
    about.set_defaults(command=_version)


def add_rollout_export(kinds: Any, debug: argparse.ArgumentParser) -> None:
    """Add `etude export rollouts`."""
    rollouts = kinds.add_parser(
        "rollouts",
        help="write what it has collected: sets to learn from, everything as JSONL, or traces",
        epilog=ROLLOUTS,
        parents=[debug],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    rollouts.add_argument("run", type=Path, metavar="RUN", help="the directory of a run, which may be going on")
    rollouts.add_argument("to", type=Path, metavar="FILE", help="where to write; it must not be there yet")
    rollouts.add_argument("--as", dest="kind", choices=("sft", "dpo", "jsonl", "otlp"), default="jsonl", help="as what")
    told = "sets: rollouts that earned at least this; of a pair, the better one"
    rollouts.add_argument("--min-reward", type=float, metavar="X", help=told)
    rollouts.add_argument("--min-gap", type=float, default=0.0, metavar="X", help="dpo: by how much a pair must differ")
    rollouts.add_argument("--tags", default="", metavar="A,B", help="sets: learn from turns with one of these tags")
    told = "rollouts to train on (the default), those that scored an agent, or both"
    rollouts.add_argument("--split", choices=("train", "val", "all"), default="train", help=told)
    told = "sets: as token ids (the default), or as text"
    rollouts.add_argument("--form", choices=("ids", "text"), default="ids", help=told)
    told = "where the tokenizer is, if it is not where the run found it"
    rollouts.add_argument("--model", type=Path, metavar="DIRECTORY", help=told)
    rollouts.add_argument("--json", action="store_true", help="print what was written as JSON, on the last line")
    rollouts.set_defaults(command=_export_rollouts)


def _split_name(arguments: argparse.Namespace, what: str, example: str) -> tuple[str, list[str]]:
    """The one word among the options that names what the command is about, and the options."""
    names = [word for word in arguments.overrides if "=" not in word]
    if len(names) != 1:
        found = " and ".join(names) or "none"
        raise ConfigError(f"Name {what}, and only one; {found} was named. For example: `{example}`.")
    return names[0], [word for word in arguments.overrides if word != names[0]]


def _data_prepare(arguments: argparse.Namespace) -> None:
    from etude.config.compose import compose
    from etude.config.show import render_config
    from etude.data.prepare import find_preparation
    from etude.observe import make_console
    from etude.tools.data_commands import prepare, to_dict

    name, options = _split_name(arguments, "a data set to prepare", "etude data prepare gsm8k raw=raw/gsm8k")
    asked = compose(find_preparation(name), options, file=arguments.config)
    if arguments.options:
        make_console().print(render_config(asked), soft_wrap=True, end="")
        return
    done = prepare(asked)
    if arguments.json:
        print(json.dumps(to_dict(done)))


def _data_show(arguments: argparse.Namespace) -> None:
    from etude.config.compose import compose
    from etude.tools.data_commands import ShowOptions, show

    file, options = _split_name(arguments, "a file of tasks", "etude data show data/gsm8k/train.parquet")
    shown = compose(ShowOptions, options, file=arguments.config)
    show(file, shown, first=arguments.row, tasks=arguments.n, model=arguments.model)


def _chat(arguments: argparse.Namespace) -> None:
    from etude.recipes.run_argument import resolve_run, without_secrets

    run, source = resolve_run(arguments.overrides, arguments.config, "chat", masked=without_secrets)
    with pause_gc():
        from etude.tools.chat import run_chat

    with suppress(ImportError):  # what is typed can be edited where the system has it
        import readline  # noqa: F401
    typed = None if sys.stdin is not None and sys.stdin.isatty() else sys.stdin
    run_chat(run, source, best=arguments.best, typed=typed)


def _plan(arguments: argparse.Namespace) -> int:
    from etude.recipes.presets import split_preset
    from etude.recipes.registry import compose_run
    from etude.tools.plan.options import PLAN_CONFIGS

    word = next((word for word in arguments.overrides if word in PLAN_CONFIGS), "")
    preset, overrides = split_preset([each for each in arguments.overrides if each != word])
    if word and preset is not None:
        raise ConfigError(f"The preset {preset.stem} is one of `etude train`, and `etude {word}` takes none.")
    run = compose_run(PLAN_CONFIGS[word], overrides, arguments.config, preset)
    with pause_gc():
        from etude.tools.plan.planner import plan_memory, to_dict
        from etude.tools.plan.report import show

    found = (plan_memory if arguments.json else show)(run, with_savings=not arguments.quick)
    if arguments.json:
        print(json.dumps(to_dict(found)))
    return 1 if found.fits is False else 0


def _doctor(arguments: argparse.Namespace) -> int:
    from etude.tools.doctor import is_healthy, run_checks, show, to_dict

    if arguments.json:
        findings = run_checks(arguments.directory)
        print(json.dumps(to_dict(findings)))
    else:
        findings = show(arguments.directory)
    return 0 if is_healthy(findings) else 1


def _completion(arguments: argparse.Namespace) -> None:
    from etude.config.env import cache_directory
    from etude.tools.shell_completion.suggest import completion_script, refresh

    print(completion_script(arguments.shell, cache_directory()), end="")
    refresh(cache_directory())


def _complete(arguments: argparse.Namespace) -> None:
    from etude.tools.shell_completion import suggest as offers

    if arguments.for_ == "read":
        from etude.tools.shell_completion.option_cache import write_cache

        write_cache(arguments.cache, offers.option_classes(arguments.top))
    elif arguments.for_ == "bash":
        program, breaks, line = arguments.words
        words = offers.split_words(line, program)
        found = [] if words is None else offers.suggest(arguments.top, words, arguments.cache)
        print("\n".join(offers.format_for_bash(found, words[-1] if words else "", breaks)))
    else:
        *before, current = (offers.unquote(word) for word in arguments.words)
        for offer in offers.suggest(arguments.top, [*before, current], arguments.cache):
            text = offer.text.rstrip() if arguments.for_ == "fish" else offer.text  # fish ends words itself
            print(f"{text}\t{offer.meaning}")


def _version(arguments: argparse.Namespace) -> None:
    from etude.tools import versions

    if arguments.json:
        print(json.dumps(versions.to_dict(__version__)))
    else:
        print("\n".join(versions.format_lines(__version__)))


def _answers(arguments: argparse.Namespace) -> None:
    from etude.tools.answers import load_answers, show

    if not arguments.json:
        show(arguments.run, step=arguments.step, tasks=arguments.n, whole=arguments.whole)
        return
    for answer in load_answers(arguments.run, arguments.step, arguments.n)[1]:
        print(json.dumps(answer, default=str))


def _export_rollouts(arguments: argparse.Namespace) -> None:
    from etude.tools.rollouts import ExportOptions, export_rollouts, to_dict

    asked = {name: getattr(arguments, name) for name in ExportOptions.__dataclass_fields__ if name != "tags"}
    tags = tuple(tag for each in arguments.tags.split(",") if (tag := each.strip()))
    done = export_rollouts(ExportOptions(**asked, tags=tags))
    if arguments.json:
        print(json.dumps(to_dict(done)))


def _plot(arguments: argparse.Namespace) -> None:
    from etude.tools.plot import plot

    plot(arguments.runs, [name for name in arguments.metrics.split(",") if name], into=arguments.out)
