"""`etude env`: list the hubs of environments, install their packages, show tasks, and play an environment by hand."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from etude.agents.hubs import AGENTS, HUBS, name_example
from etude.agents.hubs.pool import HubEnv, HubPool
from etude.agents.hubs.process import HubSpec
from etude.chat.transcript import check_observation, observation_text
from etude.config import Config
from etude.errors import ConfigError, UnknownChoiceError
from etude.observe import make_console
from etude.protocols import Observation
from etude.recipes.collect.environment import EnvConfig
from etude.recipes.collect.hub_python import find_hub_environment, hub_pins
from etude.records import Message, Task
from etude.rollout.python_environments import ensure_environment

SHOWN_TASKS = 10


class TryOptions(Config):
    """The options of `etude env show` and `etude env try`."""

    env: EnvConfig = Field(EnvConfig(), description="the environment, as a run names it")


def list_hubs() -> list[dict[str, Any]]:
    """Return each hub: name, an example, number of pinned packages, and its Python if it is installed."""
    hubs = []
    for name in HUBS:
        pins = hub_pins(name)
        environment = find_hub_environment(name)
        is_installed = environment is not None and environment.is_complete
        hubs.append(
            {
                "name": name,
                "example": name_example(name),
                "packages": 0 if pins is None else len(pins.pins),
                "python": str(environment.python) if environment is not None and is_installed else None,
            }
        )
    return hubs


def show(console: Console | None = None) -> None:
    """Print a table of the hubs, and the Pythons of the installed ones on whole lines, from which they can be copied.

    `etude env install` installs the packages of one.
    """
    console = console or make_console()
    hubs = list_hubs()
    names = ("hub", "example of env.hub", "packages", "installed")
    table = Table(*(Column(name, overflow="fold") for name in names))
    for hub in hubs:
        installed = "yes" if hub["python"] else "no" if hub["packages"] else "needs none"
        table.add_row(hub["name"], hub["example"], str(hub["packages"]), installed)
    console.print(table)
    for hub in hubs:
        if hub["python"]:
            console.print(Text(f"{hub['name']}: {hub['python']}"), soft_wrap=True)


def install(name: str) -> Path:
    """Install the packages of a hub if they are missing, and return the path of its Python."""
    pins = hub_pins(name) if name in HUBS else None
    if pins is None:
        able = ", ".join(hub for hub in HUBS if hub_pins(hub) is not None)
        raise UnknownChoiceError(f"There is no hub '{name}' with packages to install; there are {able}.")
    return ensure_environment(pins).python


def draw_tasks(options: TryOptions, first: int, count: int = SHOWN_TASKS) -> list[Mapping[str, Any]]:
    """Return tasks of a hub's environment, from a number on."""
    spec = _named(options, "show")
    with HubPool(spec, 1) as pool:
        return _drawn(pool, first, count)


def try_out(options: TryOptions, answers: Sequence[str], *, number: int = 0, console: Console | None = None) -> None:
    """Print a task of a hub, and play it with these answers: observations, rewards, and the seconds of each step."""
    spec = _named(options, "try")
    console = console or make_console()
    with HubPool(spec, 1) as pool:
        (task,) = _drawn(pool, number, 1)
        console.print(Text(json.dumps(task, ensure_ascii=False), "dim"), soft_wrap=True)
        if spec.hub not in AGENTS:
            asyncio.run(_play(pool.new_env(), Task(number, {**task, "row": number}), answers, console))
    if spec.hub in AGENTS:
        console.print(Text(f"The program of {spec.hub} plays by itself: `etude train … {spec.option}`."))


def _named(options: TryOptions, command: str) -> HubSpec:
    """Return the one environment of a hub that the options name."""
    specs = list(filter(None, (environment.hub_spec() for environment in options.env.environments())))
    if len(specs) != 1:
        several = f"There is one at a time to {command}, and not {' and '.join(spec.option for spec in specs)}. "
        example = f"Name an environment of a hub to {command}: `etude env {command} env.hub={name_example()}`."
        raise ConfigError(f"{several if specs else ''}{example}")
    return specs[0]


def _drawn(pool: HubPool, first: int, count: int) -> list[Mapping[str, Any]]:
    """Return tasks from a number on. Refuse a number after the last one."""
    tasks = pool.tasks(first, first + count)
    if not tasks:
        raise ConfigError(f"{pool.spec.title} has no task {first}. Name a lower one by --task.")
    return tasks


async def _play(env: HubEnv, task: Task, answers: Sequence[str], console: Console) -> None:
    began = time.perf_counter()
    observation = await env.reset(task)
    try:
        _print(console, observation, time.perf_counter() - began)
        for answer in answers:
            console.print(Text(f"> {answer}", "bold"), soft_wrap=True)
            began = time.perf_counter()
            observation = await env.step(Message("assistant", answer))
            _print(console, observation, time.perf_counter() - began)
            if observation.done or observation.truncated:
                break
    finally:
        await env.close()


def _print(console: Console, observation: Observation, seconds: float) -> None:
    """Print an observation, and what came with it."""
    if text := observation_text(check_observation(observation.content)):
        console.print(Text(text), soft_wrap=True)
    shown = [f"{seconds:.3f} s"]
    shown += [] if observation.reward is None else [f"reward {observation.reward}"]
    shown += [name for name in ("done", "truncated") if getattr(observation, name)]
    shown += [] if observation.opponent is None else [f"the turn of player {observation.opponent}"]
    shown += [f"tool {tool['function']['name']}" for tool in observation.tools]
    console.print(Text(", ".join(shown), "dim"), soft_wrap=True)
