"""The shared parts of the demos that train a model: their own model, tasks and fixed options."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from etude.config.compose import compose
from etude.config.env import etude_command
from etude.config.tree import replace_option
from etude.errors import ConfigError
from etude.observe import progress
from etude.recipes.run.config import Run
from etude.recipes.run.directory import create_directory, new_directory
from etude.rollout import ServerConfig


@dataclass(frozen=True)
class DemoSpec:
    """The options of a demo's run."""

    name: str
    """The beginning of the name of a new directory."""
    preset: Path
    reserved: tuple[str, ...]
    """The options that the demo sets itself."""
    what: str
    """These options in words."""
    replacements: str
    """The options of `etude train` for the user's own model and tasks."""


RESERVED_OPTIONS = ("model", "data.train", "data.val", "data.columns", "reward", "chat")
LANGUAGE_DEMO = DemoSpec(
    "demo",
    Path(__file__).with_name("language.yaml"),
    RESERVED_OPTIONS,
    "model, tasks and reward",
    "model.path=… data.train=[…]",
)
VISION_DEMO = DemoSpec(
    "demo-vision",
    Path(__file__).with_name("vision.yaml"),
    RESERVED_OPTIONS,
    "model, tasks and reward",
    "model.path=… data.train=[…]",
)
AGENT_DEMO = DemoSpec(
    "demo-agent",
    Path(__file__).with_name("agent.yaml"),
    (*RESERVED_OPTIONS, "env", "agent.path"),
    "agent, model and tasks",
    "agent.path=my_agent.py:solve model.path=… data.train=[…]",
)
DEMOS = {"language": LANGUAGE_DEMO, "agent": AGENT_DEMO, "vision": VISION_DEMO}

WORLD = "world"
"""The subdirectory of a run with the demo's tasks and model."""
MIN_SERVER_HEAD_DIM = 32
"""The smallest head size for which servers have kernels."""


def compose_demo(demo: DemoSpec, overrides: Sequence[str], file: Path | None) -> Run:
    """Return the run of a demo, with its directory and paths; refuse the options that it sets itself."""
    for option in overrides:
        name = option.partition("=")[0].strip("+ ")
        if any(name == reserved or name.startswith(f"{reserved}.") for reserved in demo.reserved):
            raise ConfigError(
                f"The demonstration brings its own {demo.what}, so `{name}` cannot be set. To train yours: "
                f"`{etude_command()} train grpo {demo.replacements}`."
            )
    run = compose(Run, overrides, file=file, preset=demo.preset)
    directory = run.directory or new_directory(Path("runs"), demo.name)
    world = directory / WORLD
    paths = {
        "model.path": world / "model",
        "data.train": (str(world / "train.jsonl"),),
        "data.val": (str(world / "held_out.jsonl"),),
        "directory": directory,
    }
    for option, path in paths.items():
        run = replace_option(run, option, path)
    return run


def create_world(
    run: Run,
    console: Console,
    counts: Mapping[str, int],
    make_rows: Callable[..., Iterable[Mapping[str, Any]]],
    make_model: Callable[..., object],
    *,
    steps: int,
    head_dim: int,
) -> None:
    """Write the tasks and the model of a demo into the run's directory.

    counts: the numbers of tasks in `train` and `held_out`. make_rows: returns so many tasks, from a seed. steps: the
    steps of the warm-up. head_dim: the head size of the model, unless servers need a larger one.
    """
    assert run.directory is not None, "a demo has a directory"
    create_directory(run.directory)
    world = run.directory / WORLD
    world.mkdir(exist_ok=True)
    for name, count in counts.items():
        rows = make_rows(run.seed, count, held_out=name == "held_out")
        (world / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    size = max(head_dim, MIN_SERVER_HEAD_DIM) if isinstance(run.rollout, ServerConfig) else head_dim
    warm_up(world, "warming up: imitating the teacher", steps, run.seed, make_model, console, head_dim=size)


def warm_up(
    data_directory: Path,
    description: str,
    steps: int,
    seed: int,
    make: Callable[..., object],
    console: Console,
    **shape: int,
) -> None:
    """Create the demo's model, unless an earlier start with the same settings has created it.

    make: creates the model in a directory, from a seed and this shape, and reports each of its steps.
    """
    marker = data_directory / "made.json"
    settings = json.dumps({"seed": seed, "steps": steps, **shape})
    if marker.exists() and marker.read_text(encoding="utf-8") == settings:
        return
    marker.unlink(missing_ok=True)
    with progress(description, steps, console) as bar:
        make(data_directory / "model", seed, bar.advance, **shape)
    marker.write_text(settings, encoding="utf-8")


def print_conclusion(console: Console, directory: Path, seconds: float, commands: Mapping[str, str]) -> None:
    """Print the duration, and commands to try next with what they do. `ETUDE` and `RUN` in a command stand for the
    program and the run's directory."""
    console.print(Text(f"\n{seconds:.0f} seconds in total. The run is in {directory}. Try next:"), soft_wrap=True)
    for command, comment in commands.items():
        line = command.replace("ETUDE", etude_command()).replace("RUN", shlex.quote(str(directory)))
        console.print(Text.assemble(f"  {line}", (f"   # {comment}", "dim")), soft_wrap=True)
