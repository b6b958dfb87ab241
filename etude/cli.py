"""The command line: the commands that train a model or ask one; `commands.py` and `services.py` hold the others.

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
from etude.commands import RUN, Parser, add, add_rollouts, of_a_run
from etude.errors import ConfigError, EtudeError
from etude.lazy import loading
from etude.services import add_services

__all__ = ["main", "parser", "spelled_out"]

FAILED, REFUSED, INTERRUPTED, NOBODY_READS = 1, 2, 130, 141
LANGUAGE, MODEL = "language", "model"
DEMO_RUN = "etude.demo.algorithms:DemoRun"

ABOUT = """\
Etude trains language models, and agents built on them, by reinforcement learning.
Again and again: collect, score, estimate, update, publish."""

START = """\
start here:
  etude demo                                  a language model learns to sort digits, in about two minutes
  etude train grpo model.path=my-model data.train=[tasks.parquet] reward=gsm8k
  etude config show                           every option of a run, with its meaning

`etude COMMAND --help` tells more of each."""

OVERRIDES = """\
options of the run are written key=value:
  steps=200                                   a number, a text, a list [1,2]
  loss=gspo                                   a choice, by its name; a wrong name lists the right ones
  loss.clip_high=0.3                          an option of what was chosen
  loss=my_package.losses:MyLoss               a class of your own, from anywhere on PYTHONPATH
  directory='${oc.env:HOME}/runs'             a value from the environment
"""

TRAIN = f"""\
{OVERRIDES}
presets, each a published recipe (`etude config show NAME` tells what it sets):
  cispo, clip_cov, dapo, decoupled_ppo, distillation, dppo, dr_grpo, gdpo, gmpo, gpg,
  grpo, gspo, high_entropy, kl_cov, lite_ppo, m2po, maxrl, opo, pass_at_k, ppo,
  reinforce_pp, reinforce_pp_baseline, remax, rloo, sapo, scalerl, vespo

examples:
  etude train grpo model.path=Qwen3-0.6B data.train=[gsm8k/train.parquet] data.val=[gsm8k/test.parquet] reward=gsm8k
  etude train dapo --config mine.yaml         a preset, then a file over it, then the command line over both
  etude train --resume runs/train-20260101-120000
  etude train grpo … reward=function reward.path=my_reward.py:score
  etude train grpo … --multirun seed=0,1,2    one run for each

Ctrl-C finishes the step, saves, and says how to go on; pressed twice, it stops at once."""

EXAMPLES = {
    "sft": ("teach a model by demonstrations: supervised fine-tuning", "data.train=[chats.jsonl] epochs=2"),
    "dpo": ("teach a model what people prefer, by pairs of answers", "data.train=[pairs.jsonl] loss.beta=0.1"),
    "reward-model": ("train a model that scores answers, from what people prefer", "data.train=[pairs.jsonl]"),
    "distill": ("teach a model what a larger one thinks", "teacher.path=Qwen3-4B data.train=[texts.jsonl]"),
}
"""The commands that learn from examples: what each does, and what its options look like."""
LEARNERS = {
    "sft": "etude.recipes.sft:SFTRun",
    "dpo": "etude.recipes.dpo:DPORun",
    "reward-model": "etude.recipes.reward_model:RewardModelRun",
    "distill": "etude.recipes.distill:DistillRun",
}
"""The classes whose fields are their options, without importing them."""

LEARN = f"""\
{OVERRIDES}
examples:
  etude NAME model.path=Qwen3-0.6B OPTIONS
  etude NAME --config mine.yaml               a file, then the command line over it
  etude NAME --resume runs/NAME-20260101-120000
  etude NAME … --multirun train.learning_rate=1e-5,2e-5

`etude config show NAME` prints every option. Ctrl-C finishes the step, saves, and says how to go on."""

EVAL = """\
examples:
  etude eval runs/train-20260101-120000                       the run's own data.val, by its newest checkpoint
  etude eval runs/train-20260101-120000 --best evaluate.samples=8 data.val=[other.parquet]
  etude eval model.path=Qwen3-0.6B data.val=[gsm8k/test.parquet] reward=gsm8k"""

GENERATE = """\
examples:
  etude generate runs/train-20260101-120000 "What is 2 + 2?"
  etude generate Qwen3-0.6B "What is 2 + 2?" sampling.temperature=0 sampling.max_tokens=200
  echo "What is 2 + 2?" | etude generate Qwen3-0.6B -n 4
  etude generate Qwen3-0.6B --raw "Once upon a time"

The prompt is a user's message where the model has a chat template, unless --raw has it continued as it stands."""

EXPORT = """\
examples:
  etude export runs/train-20260101-120000 my-model          the newest checkpoint, to load anywhere
  etude export runs/train-20260101-120000 my-model --best
  etude export rollouts --help                              what a run has collected, for others to learn from"""

DEMO = """\
examples:
  etude demo                                  a language model from nothing to good, in about two minutes
  etude demo seed=1 --json                    the outcome as one JSON object on the last line
  etude demo agent                            an agent written for OpenAI's client learns to use its tools
  etude demo algorithms --help                every loss on a problem that can be solved exactly"""

AGENT_DEMO = """\
examples:
  etude demo agent                            runners are processes of their own
  etude demo agent agent.strategy=shm         runners are threads of this process
  etude demo agent seed=1 --json              the outcome as one JSON object on the last line"""

ALGORITHMS = f"""\
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
  etude config show                           the defaults of `etude train`
  etude config show dapo                      a preset
  etude config show sft                       the options of `etude sft`
  etude config show kl=reverse                what changes, and which options it brings
  etude config show --demo loss=gspo          the options of `etude demo algorithms`
  etude config show grpo loss=gspo --yaml > mine.yaml
  etude config show --config mine.yaml"""


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    debug = Parser(add_help=False)
    debug.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error")
    raw = argparse.RawDescriptionHelpFormatter
    top = Parser("etude", description=ABOUT, epilog=START, formatter_class=raw, parents=[debug], allow_abbrev=False)
    top.add_argument("--version", action="version", version=f"etude {__version__}")
    commands = top.add_subparsers(metavar="COMMAND", required=True, parser_class=Parser)
    _add_runs(commands, debug)

    config = commands.add_parser("config", help="look at the options of a run").add_subparsers(
        metavar="COMMAND", required=True, parser_class=Parser
    )
    told, roots = "print every option of a run, with its value and its meaning", {"": RUN, "--demo": DEMO_RUN}
    show = of_a_run(config, "show", told, SHOW, debug, "[PRESET|RECIPE] ", roots | LEARNERS)
    show.add_argument("--yaml", action="store_true", help="print YAML that --config reads")
    show.add_argument("--demo", action="store_true", help="the options of `etude demo algorithms` instead")
    show.set_defaults(command=_config_show)

    add_services(commands, debug)
    add(top, commands, debug)
    return top


def _add_runs(commands: Any, debug: Parser) -> None:
    """The commands that train a model, or ask one."""
    train = of_a_run(commands, "train", "train a language model by reinforcement learning", TRAIN, debug, "[PRESET] ")
    train.add_argument("--resume", type=Path, metavar="RUN", help="go on with the run in this directory")
    train.add_argument("--multirun", action="store_true", help="one run for each combination of a,b,c values")
    train.set_defaults(command=_train)

    for name, (told, options) in EXAMPLES.items():
        epilog, roots = LEARN.replace("NAME", name).replace("OPTIONS", options), {"": LEARNERS[name]}
        learn = of_a_run(commands, name, told, epilog, debug, roots=roots)
        learn.add_argument("--resume", type=Path, metavar="RUN", help="go on with the run in this directory")
        learn.add_argument("--multirun", action="store_true", help="one run for each combination of a,b,c values")
        learn.set_defaults(command=_learn, recipe=name)

    evaluate = of_a_run(commands, "eval", "score a model, or a run's checkpoint, on tasks", EVAL, debug, "[RUN] ")
    evaluate.add_argument("--best", action="store_true", help="the run's best checkpoint instead of its newest")
    evaluate.add_argument("--answers", type=Path, metavar="FILE", help="write the answers there, a JSON object a line")
    evaluate.add_argument("--json", action="store_true", help="print the scores as JSON, on the last line")
    evaluate.set_defaults(command=_eval)

    generate = of_a_run(
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
    demos = demo.add_subparsers(metavar="COMMAND", required=True, parser_class=Parser)
    told = "a language model from nothing to good (this is what `etude demo` alone does)"
    language = of_a_run(demos, LANGUAGE, told, DEMO, debug)
    language.add_argument("--json", action="store_true", help="print the outcome as JSON, on the last line")
    language.set_defaults(command=_demo_language)
    told = "an agent that calls the model by OpenAI's client learns to use its tools"
    agent = of_a_run(demos, "agent", told, AGENT_DEMO, debug)
    agent.add_argument("--json", action="store_true", help="print the outcome as JSON, on the last line")
    agent.set_defaults(command=_demo_agent)
    told = "train a table of logits by each loss, and draw the exact expected reward"
    algorithms = of_a_run(demos, "algorithms", told, ALGORITHMS, debug, roots={"": DEMO_RUN})
    algorithms.add_argument("--multirun", action="store_true", help="one run for each combination of a,b,c values")
    algorithms.add_argument("--json", action="store_true", help="print the outcome as JSON, on the last line")
    algorithms.set_defaults(command=_demo_algorithms)


def _add_exports(commands: Any, debug: Parser) -> None:
    raw = argparse.RawDescriptionHelpFormatter
    told = "write a run's model, or its rollouts, as files that others read"
    exports = commands.add_parser("export", help=told, epilog=EXPORT, parents=[debug], formatter_class=raw)
    kinds = exports.add_subparsers(metavar="COMMAND", required=True, parser_class=Parser)
    told = "write its model as a Hugging Face directory (this is what `etude export RUN DIRECTORY` does)"
    export = kinds.add_parser(MODEL, help=told, epilog=EXPORT, parents=[debug], formatter_class=raw)
    export.add_argument("run", type=Path, metavar="RUN", help="the directory of a run")
    export.add_argument("to", type=Path, metavar="DIRECTORY", help="where to write; it must not be there yet")
    export.add_argument("--best", action="store_true", help="the run's best checkpoint instead of its newest")
    export.add_argument("--adapter", action="store_true", help="a run's LoRA adapter alone, as peft loads it")
    export.set_defaults(command=_export)
    add_rollouts(kinds, debug)


def spelled_out(argv: Sequence[str]) -> list[str]:
    """`etude` alone is its help, `etude demo` its first demo, and `etude export RUN` is `etude export model RUN`."""
    words = list(argv) or ["--help"]
    if words[:1] == ["export"] and words[1:2] not in ([], [MODEL], ["rollouts"], ["-h"], ["--help"]):
        words.insert(1, MODEL)
    if words[:1] == ["demo"] and words[1:2] not in (["agent"], ["algorithms"], [LANGUAGE], ["-h"], ["--help"]):
        words.insert(1, LANGUAGE)
    return words


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    debug = False
    try:
        try:
            arguments = parser().parse_args(spelled_out(sys.argv[1:] if argv is None else argv))
        except SystemExit:  # the help was asked for, or the words are wrong
            _flush()
            raise
        debug = "debug" in arguments
        code: int | None = arguments.command(arguments)
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
    return code or 0


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


def _config_show(arguments: argparse.Namespace) -> None:
    from etude.config.compose import compose
    from etude.config.show import rendered, to_yaml
    from etude.observe import make_console
    from etude.recipes.commands import SUPERVISED, asked
    from etude.recipes.presets import split
    from etude.recipes.run import Run

    run: Any
    words = arguments.overrides
    if arguments.demo:
        from etude.demo.algorithms import DemoRun

        run = compose(DemoRun, words, file=arguments.config)
    elif words[:1] and words[0] in SUPERVISED:
        run = asked(SUPERVISED[words[0]], words[1:], arguments.config)
    else:
        preset, overrides = split(words)
        run = asked(Run, overrides, arguments.config, preset)
    if arguments.yaml:
        print(to_yaml(run), end="")
    else:
        make_console().print(rendered(run), soft_wrap=True, end="")


def _train(arguments: argparse.Namespace) -> None:
    from etude.config.env import role
    from etude.recipes.commands import asked
    from etude.recipes.folder import read_run
    from etude.recipes.loop import train
    from etude.recipes.presets import split
    from etude.recipes.run import Run
    from etude.recipes.sweep import sweep

    if arguments.resume is not None:
        _goes_on_as_it_was(arguments)
        _train_or_play(read_run(arguments.resume, arguments.overrides))
    elif arguments.multirun:
        if role() is not None:
            raise ConfigError(f"--multirun is many runs, and ETUDE_ROLE={role()} a part of one. Leave one of them out.")
        preset, overrides = split(arguments.overrides)
        sweep(Run, train, overrides, arguments.config, preset)
    else:
        preset, overrides = split(arguments.overrides)
        _train_or_play(asked(Run, overrides, arguments.config, preset))


def _train_or_play(run: Any) -> None:
    """Train; or play what another trains, where ETUDE_ROLE says that this process is a runner."""
    from etude.config.env import role
    from etude.recipes.loop import train

    if role() is not None:
        from etude.agents.agent import load_agent
        from etude.recipes.roles import plays_instead

        if run.agent.path is None:
            raise ConfigError(
                f"ETUDE_ROLE={role()} says which part of the work with agents is this process's, and this run has no "
                "`agent.path`. Unset it."
            )
        if plays_instead(load_agent(run.agent.path), run.agent.at_once):
            return
        run = run.model_copy(update={"agent": run.agent.model_copy(update={"runners": 0})})
    train(run)


def _learn(arguments: argparse.Namespace) -> None:
    from etude.recipes.commands import SUPERVISED, asked
    from etude.recipes.folder import check_before, read_kind
    from etude.recipes.sweep import sweep

    def learn(run: Any, interrupt: Any = None) -> Path:
        check_before(run)
        with loading():
            from etude.recipes.school import study

        return study(run, interrupt)

    kind = SUPERVISED[arguments.recipe]
    if arguments.resume is not None:
        _goes_on_as_it_was(arguments)
        learn(read_kind(kind, arguments.resume, arguments.overrides))
    elif arguments.multirun:
        sweep(kind, learn, arguments.overrides, arguments.config)
    else:
        learn(asked(kind, arguments.overrides, arguments.config))


def _goes_on_as_it_was(arguments: argparse.Namespace) -> None:
    if arguments.config is not None or arguments.multirun:
        raise ConfigError(
            "--resume goes on with one run as it was started, and takes neither --config nor --multirun. Write what "
            "may change as key=value."
        )


def _eval(arguments: argparse.Namespace) -> None:
    from etude.recipes.ask import evaluate

    told = evaluate(arguments.overrides, arguments.config, best=arguments.best, answers=arguments.answers)
    if arguments.json:
        print(json.dumps(told))


def _generate(arguments: argparse.Namespace) -> None:
    from etude.recipes.ask import generate

    told = None if sys.stdin is None or sys.stdin.isatty() else sys.stdin
    asked = arguments.overrides
    generate(asked, arguments.config, answers=arguments.n, best=arguments.best, raw=arguments.raw, typed=told)


def _export(arguments: argparse.Namespace) -> None:
    from etude.recipes.ask import export_run

    export_run(arguments.run, arguments.to, best=arguments.best, adapter=arguments.adapter)


def _demo_language(arguments: argparse.Namespace) -> None:
    from etude.demo.language import demonstrate

    told = demonstrate(arguments.overrides, arguments.config)
    if arguments.json:
        print(json.dumps(told))


def _demo_agent(arguments: argparse.Namespace) -> None:
    from etude.agents import openai_clients

    openai_clients()  # without it no attempt would come to anything, which is better known at once
    from etude.demo.agent import demonstrate

    told = demonstrate(arguments.overrides, arguments.config)
    if arguments.json:
        print(json.dumps(told))


def _demo_algorithms(arguments: argparse.Namespace) -> None:
    from etude.demo.demonstrate import demonstrate

    told = demonstrate(arguments.overrides, arguments.config, sweep=arguments.multirun)
    if arguments.json:
        print(json.dumps(told))
