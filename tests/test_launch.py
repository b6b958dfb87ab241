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
from etude.config.compose import compose
from etude.errors import ConfigError
from etude.launch import _resolve_arguments
from etude.ppo_trainer import RLConfig
from etude.recipes.event_loop import run_outside_event_loop
from etude.recipes.interrupt import Interrupt
from etude.recipes.run.config import Run
from etude.recipes.run.directory import read_options
from tests.learn.looking import looker
from tests.worlds import make_model, make_tasks

STANDS_FOR = {
    **{"reward": "reward", "steps": "steps", "tasks": "collect.tasks", "group_size": "collect.group_size"},
    **{
        "learning_rate": "train.learning_rate",
        "precision": "train.precision",
        "max_prompt_length": "data.max_prompt_length",
    },
    **{"max_tokens": "sampling.max_tokens", "temperature": "sampling.temperature", "seed": "seed"},
}
ARGUMENTS: dict[str, Any] = {
    **{"reward": "exact_match", "steps": 1, "tasks": 2, "group_size": 2, "learning_rate": 1e-3, "precision": "fp32"},
    **{"max_prompt_length": 8, "max_tokens": 3, "temperature": 1.0, "seed": 3},
}
ODD = ["\n\n", "é 🌧", "C:\\x", "\\", "\\\\${x}", "${", "${oc.env:HOME}", "a'b\"c", "[1, 2", "null", "1e-3", "=\t:{}"]
MORE = {"loss.clip_high": 0.3, "observe.console": "off", "threads": 1}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("world")
    make_model(place / "model")
    make_tasks(place / "tasks.jsonl", 4)
    return place


def losses(run: Path) -> dict[str, Any]:
    line = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    return {name: value for name, value in line.items() if not name.startswith("time") and "second" not in name}


def test_a_function_in_place_of_a_rewards_name_is_answered_with_the_option(world: Path) -> None:
    with pytest.raises(ConfigError, match=r'reward="function", options={"reward.path": "my_reward.py:losses"}'):
        etude.train("grpo", model=world / "model", train=[world / "tasks.jsonl"], reward=losses)  # type: ignore[arg-type]


def test_it_is_the_command_line_and_works_in_a_running_loop(world: Path, tmp_path: Path) -> None:
    places: dict[str, Any] = {"model": world / "model", "train": [world / "tasks.jsonl"]}

    async def notebook() -> Path:
        return etude.train("grpo", **places, **ARGUMENTS, options=MORE, directory=tmp_path / "program")

    written = {**{STANDS_FOR[name]: value for name, value in ARGUMENTS.items()}, **MORE}
    words = [f"{name}={value}" for name, value in written.items()]
    words += [f"model.path={world / 'model'}", f"data.train=[{world / 'tasks.jsonl'}]", f"directory={tmp_path / 'cli'}"]
    assert main(["train", "grpo", *words]) == 0
    run = asyncio.run(notebook())
    assert run == tmp_path / "program"
    options = [read_options(directory) | {"directory": None} for directory in (tmp_path / "cli", run)]
    assert options[0] == options[1]
    for name in ("reward", "grad_norm", "answer_length"):
        assert losses(run)[name] == losses(tmp_path / "cli")[name]


def test_every_argument_is_documented_and_typed() -> None:
    described = inspect.getdoc(etude.train) or ""
    for name, parameter in inspect.signature(etude.train).parameters.items():
        assert f"\n    {name}: " in described and parameter.annotation is not parameter.empty, name


def test_it_is_the_function_also_when_the_package_of_that_name_is_loaded() -> None:
    from etude.train import TrainConfig

    assert callable(etude.train)
    assert TrainConfig.__module__ == "etude.train.config"


@pytest.mark.parametrize(
    ("argument", "value", "option"),
    [
        ("steps", 3, "steps"),
        ("loss", "gspo", "loss.name"),
        ("train", [{"prompt": "a", "answer": "b"}], "data.train"),
        ("val", "held_out.jsonl", "data.val"),
        ("directory", "runs/one", "directory"),
    ],
)
def test_an_option_is_given_once(argument: str, value: Any, option: str) -> None:
    with pytest.raises(ConfigError, match=f"`{option}` is in `options`, and is given as `{argument}=…` too"):
        etude.train("grpo", **{argument: value}, options={option: value})


@pytest.mark.parametrize("preset", ["steps=3", "gpro", "grpo loss=gspo", ""])
def test_an_unknown_preset_is_refused(preset: str) -> None:
    with pytest.raises(ConfigError, match=f"There is no preset '{preset}'"):
        etude.train(preset, model="model")


def test_the_directory_may_stand_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(f"directory: {tmp_path / 'kept'}\n")
    run, _ = launched(config="mine.yaml", train=[{"prompt": "a", "answer": "b"}])
    assert (run.directory, run.data.train) == (tmp_path / "kept", (str(tmp_path / "kept" / "tasks" / "train.jsonl"),))
    assert launched(config="mine.yaml", directory="other")[0].directory == Path("other")
    assert list(tmp_path.iterdir()) == [tmp_path / "mine.yaml"]


def launched(**given: Any) -> tuple[Run, dict[str, str]]:
    """Return the run that `etude.train` composes of these arguments."""
    return _resolve_arguments(dict.fromkeys(inspect.signature(etude.train).parameters) | given)


def test_values_reach_the_run_as_they_are() -> None:
    """This holds for each way to start a run from a program: `etude.train`, `etude.Trainer`, `RLConfig`."""
    texts, place = {f"said{number}": text for number, text in enumerate(ODD)}, Path("/tmp").joinpath(*ODD)
    free = {**texts, "thinks": False, "share": 0.5, "count": 2, "place": Path("/tmp/josé")}
    options = {"sampling.stop": ["a", *ODD], "chat.template_kwargs": free, "sampling.temperature": 0.25, "kl": None}
    run, _ = launched(preset="grpo", options=options, directory=place)
    assert run.directory == place
    runs = [run, RLConfig(options={"sampling.stop": ("a", *ODD), "sampling.temperature": 0.25}).compose_run()]

    class Looks(etude.Algorithm):
        def run(self, train: Any, val: Any) -> dict[str, float]:
            assert self.context is not None
            runs.append(compose(Run, values=self.context.merge_options(options)))
            return {}

    etude.Trainer(Looks()).fit(looker, [])
    for composed in runs:
        assert (composed.sampling.stop, composed.sampling.temperature) == (("a", *ODD), 0.25)
    for composed in (runs[0], runs[2]):
        assert composed.kl is None and composed.chat.template_kwargs == {**free, "place": "/tmp/josé"}
    assert runs[2].agent.path == "tests.learn.looking:looker"


def interrupted(work: Any) -> Any:
    """Run work under a running loop, and press Ctrl-C in it."""

    async def notebook() -> Any:
        return run_outside_event_loop(work)

    return asyncio.run(notebook())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("runs", ["asyncio", "a bare loop"])
def test_the_first_ctrl_c_in_a_running_loop_lets_the_step_end(runs: str, number: signal.Signals) -> None:
    messages: list[str] = []

    def work() -> bool:
        with Interrupt(messages.append) as interrupt:
            os.kill(os.getpid(), number)
            until = time.monotonic() + 10
            while not interrupt.stop_requested and time.monotonic() < until:
                time.sleep(0.01)
            return interrupt.stop_requested

    kinds = (signal.SIGINT, signal.SIGTERM)
    before = {kind: signal.signal(kind, signal.default_int_handler) for kind in kinds}
    try:
        assert (interrupted if runs == "asyncio" else apart_in_a_loop)(work) is True
        assert all(signal.getsignal(kind) is signal.default_int_handler for kind in kinds)
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)
    assert "Stopping after this step" in messages[0]


def test_the_second_ctrl_c_in_a_running_loop_stops_at_once() -> None:
    def work() -> None:
        with Interrupt(lambda _: None) as interrupt:
            until = time.monotonic() + 10
            while time.monotonic() < until:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.01)
            raise AssertionError(f"It goes on, though Ctrl-C was pressed: {interrupt.stop_requested}")

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            interrupted(work)
    finally:
        signal.signal(signal.SIGINT, before)


def test_ctrl_c_before_the_work_began_begins_none(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[int] = []
    start = threading.Thread.start

    def pressed(thread: threading.Thread) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        start(thread)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(threading.Thread, "start", pressed)
    try:
        with pytest.raises(KeyboardInterrupt):
            interrupted(lambda: done.append(1))  # type: ignore[func-returns-value]
    finally:
        signal.signal(signal.SIGINT, before)
    assert not done


def apart_in_a_loop(work: Any) -> Any:
    """Call `apart` from a callback of a loop, as a notebook's cell does, without asyncio's own handling of Ctrl-C."""
    loop = asyncio.new_event_loop()
    results = list[Any]()

    def cell() -> None:
        results.append(run_outside_event_loop(work))
        loop.stop()

    try:
        loop.call_soon(cell)
        loop.run_forever()
    finally:
        loop.close()
    return results[0]


def test_work_in_a_running_loop_is_done_elsewhere_and_raises_here() -> None:
    def work() -> None:
        assert threading.current_thread() is not threading.main_thread()
        raise ConfigError("It cannot be.")

    with pytest.raises(ConfigError, match="It cannot be"):
        interrupted(work)
    assert run_outside_event_loop(threading.current_thread) is threading.main_thread()
