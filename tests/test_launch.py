"""`etude.train` is the command line with arguments, and works where an event loop is running."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import etude
from etude.cli import main
from etude.errors import ConfigError
from etude.recipes.apart import apart
from etude.recipes.folder import read_options
from etude.recipes.interrupt import Interrupt
from tests.worlds import make_model, make_tasks

STANDS_FOR = {
    **{"reward": "reward", "steps": "steps", "tasks": "collect.tasks", "group_size": "collect.group_size"},
    **{"learning_rate": "train.learning_rate", "precision": "train.precision", "max_prompt": "data.max_prompt"},
    **{"max_tokens": "sampling.max_tokens", "temperature": "sampling.temperature", "seed": "seed"},
}
ARGUMENTS: dict[str, Any] = {
    **{"reward": "exact", "steps": 1, "tasks": 2, "group_size": 2, "learning_rate": 1e-3, "precision": "fp32"},
    **{"max_prompt": 8, "max_tokens": 3, "temperature": 1.0, "seed": 3},
}
MORE = {"loss.clip_high": 0.3, "observe.console": "off", "threads": 1}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("world")
    make_model(place / "model")
    make_tasks(place / "tasks.jsonl", 4)
    return place


def told(run: Path) -> dict[str, Any]:
    line = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    return {name: value for name, value in line.items() if not name.startswith("time") and "second" not in name}


def test_it_is_the_command_line_and_works_in_a_running_loop(world: Path, tmp_path: Path) -> None:
    places = {"model": world / "model", "train": [world / "tasks.jsonl"]}

    async def notebook() -> Path:
        return etude.train("grpo", **places, **ARGUMENTS, options=MORE, directory=tmp_path / "program")

    written = {**{STANDS_FOR[name]: value for name, value in ARGUMENTS.items()}, **MORE}
    words = [f"{name}={value}" for name, value in written.items()]
    words += [f"model.path={world / 'model'}", f"data.train=[{world / 'tasks.jsonl'}]", f"directory={tmp_path / 'cli'}"]
    assert main(["train", "grpo", *words]) == 0
    run = asyncio.run(notebook())
    assert run == tmp_path / "program"
    options = [read_options(each) | {"directory": None} for each in (tmp_path / "cli", run)]
    assert options[0] == options[1]
    for name in ("reward", "grad_norm", "answer_length"):
        assert told(run)[name] == told(tmp_path / "cli")[name]


def test_every_argument_is_documented_and_typed() -> None:
    described = inspect.getdoc(etude.train) or ""
    for name, parameter in inspect.signature(etude.train).parameters.items():
        assert f"\n    {name}: " in described and parameter.annotation is not parameter.empty, name


def test_it_is_the_function_also_when_the_package_of_that_name_is_loaded() -> None:
    from etude.train import Train

    assert callable(etude.train) and Train.__module__ == "etude.train.config"


def test_an_option_is_given_once() -> None:
    with pytest.raises(ConfigError, match="`steps` is given by an argument and in `options`"):
        etude.train("grpo", steps=3, options={"steps": 4})


def interrupted(work: Any) -> Any:
    """Run work under a running loop, and press Ctrl-C in it."""

    async def notebook() -> Any:
        return apart(work)

    return asyncio.run(notebook())


def test_the_first_ctrl_c_in_a_notebook_lets_the_step_end() -> None:
    said: list[str] = []

    def work() -> bool:
        with Interrupt(said.append) as interrupt:
            os.kill(os.getpid(), signal.SIGINT)
            until = time.monotonic() + 10
            while not interrupt.asked and time.monotonic() < until:
                time.sleep(0.01)
            return interrupt.asked

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert apart_in_a_loop(work) is True
    finally:
        signal.signal(signal.SIGINT, before)
    assert "Stopping after this step" in said[0]


def apart_in_a_loop(work: Any) -> Any:
    """`apart` called from a callback of a loop, as a notebook's cell is, without asyncio's own handling of Ctrl-C."""
    loop, found = asyncio.new_event_loop(), []
    try:
        loop.call_soon(lambda: (found.append(apart(work)), loop.stop()))
        loop.run_forever()
    finally:
        loop.close()
    return found[0]


def test_work_in_a_running_loop_is_done_elsewhere_and_raises_here() -> None:
    def work() -> None:
        assert threading.current_thread() is not threading.main_thread()
        raise ConfigError("It cannot be.")

    with pytest.raises(ConfigError, match="It cannot be"):
        interrupted(work)
    assert apart(threading.current_thread) is threading.main_thread()
