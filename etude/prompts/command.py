"""`etude optimize-prompt`: search for a better prompt of an agent, without training."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.text import Text

from etude.agents.source_agents import load_agents
from etude.errors import ConfigError
from etude.observe import make_console
from etude.prompts import load_gepa
from etude.prompts.apo import APO
from etude.prompts.gepa import GEPA
from etude.prompts.search import BEST_FILE, PromptSearch, check_agent
from etude.prompts.writer import SERVED, find_writer
from etude.recipes.run.config import Run
from etude.recipes.run.directory import lock_directory, new_directory
from etude.recipes.served_model import serve_to_agent

SEARCHES: Mapping[str, type[PromptSearch]] = {"apo": APO, "gepa": GEPA}


def optimize_prompt(
    run: Run, kind: str, prompt: Path, out: Path | None, settings: Mapping[str, Any], flags: Mapping[str, str]
) -> dict[str, Any]:
    """Search for a better prompt than that in a file; return the scores and the file of the best prompt.

    out: the directory of the search; None creates one in `runs`. settings: fields of the search. flags: how the command
    names some of them.
    """
    agent = load_agents(run.agent.path, run.agent.sources)
    if agent is None or not run.data.train:
        raise ConfigError(
            "A search needs an agent that reads the prompt, and tasks for it: give `agent.path=my_agent.py:solve` and "
            "`data.train=[tasks.jsonl]`."
        )
    foreign = [f"`{flags[name]}`" for name in settings if name not in SEARCHES[kind].__dataclass_fields__]
    if foreign:
        raise ConfigError(f"`{kind}` has no {' and no '.join(foreign)}: that is for the other search. Leave it out.")
    check_agent(agent)
    find_writer(settings.get("writer", SERVED), run)
    if kind == "gepa":
        load_gepa()
    search = SEARCHES[kind](_read_prompt(prompt), **settings)
    directory = out or new_directory(Path("runs"), "prompt")
    console = make_console(run.observe.console)
    with lock_directory(directory, "--out …"):
        console.print(Text(f"The results are written to {directory}."), soft_wrap=True)
        try:
            with serve_to_agent(run, agent, directory) as served:
                scores = search.search(served, list(run.data.train), list(run.data.val) or None, directory)
        except KeyboardInterrupt:
            again = f"Stopped. The same command with `--out {directory}` continues the search."
            console.print(Text(again), soft_wrap=True)
            raise
    path = directory / BEST_FILE
    console.print(Text(f"the best prompt is in {path}"), soft_wrap=True)
    return {**scores, "prompt": str(path)}


def _read_prompt(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"{path} cannot be read ({why}). Name a text file: `--prompt my_prompt.txt`.") from error
    if not text:
        raise ConfigError(f"{path} is empty. Write the prompt into it with which the search begins.")
    return text
