"""What a run was started on, told by the bytes: so that a run that goes on finds what it began with.

A path says little: files are edited, and directories moved. What is kept of each file is its size and a hash of its
first and its last part, which costs a few reads however large the weights are.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from etude.errors import RunError
from etude.observe import get_log
from etude.recipes.run import Run

__all__ = ["INPUTS", "check_inputs", "is_module", "keep_inputs", "yardstick"]

INPUTS = "inputs.json"
REWARD = "reward"
"""The print of the files that say how a reward judges. They may be mended under a run, unlike the others."""
PART = 1 << 20
"""Bytes at either end of a file that are hashed."""


def keep_inputs(directory: Path, run: Run) -> None:
    """Write down what a run is started on, once."""
    kept, writing = directory / INPUTS, directory / f".{INPUTS}"
    if not kept.exists():
        writing.write_text(json.dumps(_prints(run), indent=1, sort_keys=True), encoding="utf-8")
        writing.replace(kept)


def check_inputs(directory: Path, run: Run) -> None:
    """Refuse to go on with a run whose files are others now than when it was started, and name them."""
    kept = directory / INPUTS
    if not kept.exists():
        return
    before, found = json.loads(kept.read_text(encoding="utf-8")), _prints(run)
    if before.pop(REWARD, None) != found.pop(REWARD, None):
        get_log("recipes").info("The reward's file changed since the run was started. What was judged stays judged.")
    changed = sorted(name for name in before.keys() | found.keys() if before.get(name) != found.get(name))
    if changed:
        listed = ", ".join(changed[:5]) + (f" and {len(changed) - 5} more" if len(changed) > 5 else "")
        raise RunError(
            f"{directory} holds a run that was started on other files: {listed} changed, came or went since. What it "
            f"would go on to train is another run. Bring the files back, say where they lie now (`model.path`, "
            f"`data.train`, …), or start a new run in another `directory`."
        )


def yardstick(run: Run) -> str:
    """What the scores of a run's evaluations are measured with, in a word: scores with another do not compare."""
    files = [each for name in run.data.val for each in _of_data("data.val", name)]
    asked = run.evaluate
    told = {
        "tasks": [[name, _print_of(path) if isinstance(path, Path) else path] for name, path in files],
        "samples": asked.samples,
        "limit": asked.limit,
        "sampling": asked.sampling.beside(run.sampling).model_dump(mode="json"),
    }
    return f"val-{hashlib.blake2b(json.dumps(told, sort_keys=True).encode(), digest_size=8).hexdigest()}"


def is_module(name: str) -> bool:
    """Whether data is made by Python, as `module:Name` says, and lies in no file."""
    return ":" in name and not Path(name).expanduser().exists()


def _prints(run: Run) -> dict[str, str]:
    prints = {name: _print_of(path) if isinstance(path, Path) else path for name, path in _files(run)}
    judged_by = [_print_of(file) for file in run.reward.files() if file.is_file()]
    return prints | ({REWARD: " ".join(judged_by)} if judged_by else {})


def _files(run: Run) -> Iterator[tuple[str, Path | str]]:
    """Every file that decides what is trained, under a name that does not depend on where it lies; of data that Python
    makes, its name."""
    for role, path in (
        ("model", run.model.path),
        ("tokenizer", run.model.tokenizer),
        ("reference", run.reference.path),
        ("template", run.chat.template),
    ):
        if path is not None:
            yield from _within(role, path)
    for place, name in enumerate(run.data.train):
        yield from _of_data(f"data.train[{place}]", name)


def _of_data(role: str, name: str) -> Iterator[tuple[str, Path | str]]:
    if is_module(name):
        yield role, name
    else:
        yield from _within(role, Path(name).expanduser())


def _within(role: str, path: Path) -> Iterator[tuple[str, Path]]:
    if path.is_dir():
        inside = (file for file in sorted(path.rglob("*")) if file.is_file() and not file.name.startswith("."))
        yield from ((f"{role}/{file.relative_to(path)}", file) for file in inside)
    elif path.is_file():
        yield f"{role}: {path.name}", path


def _print_of(path: Path) -> str:
    size = path.stat().st_size
    hashed = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        hashed.update(file.read(PART))
        file.seek(max(size - PART, 0))
        hashed.update(file.read(PART))
    return f"{size} bytes, {hashed.hexdigest()}"
