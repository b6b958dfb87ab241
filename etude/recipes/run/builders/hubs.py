"""The environments of hubs: the guests that play them, and their tasks, which are drawn once into files of the run.

    env.hub=gymnasium:Blackjack-v1 data.train=env:0:1000 data.val=env:1000:1100
    env.sources.cards.hub=gymnasium:Blackjack-v1 data.train={cards: env:0:1000, maths: gsm8k.parquet}

`env:FROM:TO` are the hub's tasks with these numbers; those of a data source are of its own hub. The run has them in a
file of its directory: `tasks/env-0-1000.jsonl`, or for a data source `tasks/env-cards-0-1000.jsonl`. So a resumed run
has the same tasks, also with another version of the hub's package.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from etude.agents.hubs.pool import HubPool
from etude.config.tree import replace_option
from etude.data.files import split_source, with_source
from etude.errors import ConfigError
from etude.observe import get_logger
from etude.recipes.run.config import Run
from etude.recipes.run.directory import TASKS_FOLDER, new_directory

_ASKED = re.compile(r"env:(\d+):(\d+)")
_DRAWN = re.compile(r"env-(?:.+-)?(\d+)-(\d+)\.jsonl")


def name_task_files(run: Run, directory: Path | None = None) -> Run:
    """Return the same run with the paths of files in place of `env:FROM:TO`. `open_hubs` writes the files.

    directory: holds the files; by default the run's, which gets one if it has none.
    """
    for option in ("data.train", "data.val"):
        names = getattr(run.data, option.partition(".")[2])
        asked = {name: split_source(name) for name in names}
        asked = {name: named for name, named in asked.items() if named[1].split(":")[0] == "env"}
        if not asked:
            continue
        directory = directory or run.directory or new_directory(Path("runs"), run.recipe)
        run = run.model_copy(update={"directory": run.directory or directory})
        files = {}
        for name, (source, tasks) in asked.items():
            numbers = _ASKED.fullmatch(tasks)
            environment = run.env.of_source(source)
            if environment is None or environment.options.hub is None:
                hub = f"env.sources.{source}.hub" if source else "env.hub"
                given = f"{{{source}: {tasks}}}" if source else name
                other = ""
                if not source and (others := [each for each in run.env.sources if run.env.sources[each].hub]):
                    other = f" Those of the data source `{others[0]}`: `{option}={{{others[0]}: {tasks}}}`."
                raise ConfigError(
                    f"`{option}={given}` are tasks of a hub's environment, and `{hub}` names none. Name it, as in "
                    f"`{hub}=gymnasium:Blackjack-v1`, or give files of tasks.{other}"
                )
            if numbers is None or int(numbers[1]) >= int(numbers[2]):
                raise ConfigError(
                    f"`{option}={name}` names no tasks of the hub. Write the first number, and the one after the last: "
                    f"`{option}=env:0:1000`."
                )
            file = directory / TASKS_FOLDER / f"{'-'.join(filter(None, ('env', source, *numbers.groups())))}.jsonl"
            files[name] = with_source(source, str(file))
        run = replace_option(run, option, tuple(files.get(name, name) for name in names))
    return run


@contextmanager
def open_hubs(run: Run) -> Iterator[dict[str, HubPool]]:
    """Start the guests of each hub, write the files of tasks that are missing, and yield the guests, each by the
    section of options that names its hub."""
    pools: dict[str, HubPool] = {}
    with ExitStack() as stack:
        for environment in run.env.environments():
            if (spec := environment.hub_spec()) is not None:
                pool = HubPool(spec, environment.options.workers)
                pools[environment.section] = stack.enter_context(pool)
        for name in dict.fromkeys((*run.data.train, *run.data.val)):
            source, path = split_source(name)
            file = Path(path)
            numbers = _DRAWN.fullmatch(file.name)
            played = run.env.of_source(source)
            if (
                numbers is not None
                and file.parent.name == TASKS_FOLDER
                and not file.exists()
                and played is not None
                and played.section in pools
            ):
                _draw(pools[played.section], file, int(numbers[1]), int(numbers[2]))
        yield pools


def _draw(pool: HubPool, file: Path, first: int, stop: int) -> None:
    """Write tasks of the hub into a file."""
    tasks = pool.tasks(first, stop)
    if not tasks:
        raise ConfigError(f"{pool.spec.title} has no tasks from number {first} on. Begin with a lower one.")
    if len(tasks) < stop - first:
        get_logger("recipes").info(
            "%s has %d tasks from number %d on: all are taken.", pool.spec.title, len(tasks), first
        )
    file.parent.mkdir(exist_ok=True)
    temporary = file.with_name(f".{file.name}")
    temporary.write_text("".join(json.dumps(task, ensure_ascii=False) + "\n" for task in tasks), encoding="utf-8")
    temporary.replace(file)
