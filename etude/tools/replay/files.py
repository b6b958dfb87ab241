"""The files of a replay: `step-….json` has the comparison, and `step-….npz` a row for each sampled token of the step.

A row has the token's place (`rollout`, `turn`, `index` within the turn's sampled tokens) and its `id`. At the weights
that the step began with, it has log π (`start_logp`) and the `entropy`, and log π_ref if the run has a reference. For
each algorithm, as `NAME_recorded` and `NAME_changed`, it has

    advantage   the token's advantage
    weight      −∂loss/∂log π, summed over the step's updates: how hard the step pushes log π up
    state       an index of `STATES`
    logp        log π when the last update saw the token
    old_logp    the log-prob that the loss compares with: of π_old, or of the sampler with `correction.policies=two`

The rows of a rollout are adjacent, and the comparison lists the rollouts in the same order, with their numbers of rows.
"""

from __future__ import annotations

import json
import re
import time
import zipfile
import zlib
from collections.abc import Mapping
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from etude.errors import DataError
from etude.integrity import write_json

FOLDER = "replays"
"""The folder of a run for its replays."""
SIDES = ("recorded", "changed")
"""The algorithms of a replay: the run's own, and the other one."""
STATES = ("trained", "clipped", "masked", "level")
"""The states of a token, by their numbers in the files of a replay.

`trained`: it has a part in the policy's loss. `clipped`: the loss clips it, or leaves it out. `masked`: a correction or
a filter leaves it out. `level`: its advantage is 0.
"""
_NAME = re.compile(r"step-(\d+)-\d+-\d+(?:-\d+)?")


def write_replay(into: Path, step: int, result: Mapping[str, Any], tokens: dict[str, Any]) -> dict[str, str]:
    """Write the comparison, and a row for each token beside it; return the names of both files."""
    name = f"step-{step:08d}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = chain([name], (f"{name}-{n}" for n in count(2)))
    into.mkdir(parents=True, exist_ok=True)
    file = next(file for name in names if not (file := into / f"{name}.json").exists())
    np.savez_compressed(file.with_suffix(".npz"), **tokens)
    files = {"file": str(file), "tokens": str(file.with_suffix(".npz"))}
    write_json(file, {**result, **files})
    return files


def find_replays(directory: Path, step: int | None = None) -> dict[str, Path]:
    """Return the replays of a run, or of one of its steps, by name, the newest of a step first."""
    files = (directory / FOLDER).glob("step-*.json")
    found = {
        path.stem: path
        for path in files
        if (name := _NAME.fullmatch(path.stem)) is not None and step in (None, int(name[1]))
    }
    return dict(sorted(found.items(), reverse=True))


def read_replay(path: Path) -> dict[str, Any]:
    """Return the comparison of a replay. One that lacks a part which pages show is damaged."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        changed = {name: (before, after) for name, (before, after) in result["changed"].items()}
        needed = ("rollout", "reward", *(side for side in SIDES if result["sides"][side] is not None))
        rollouts = [
            {"tokens": 0, **rollout, **{name: rollout[name] for name in needed}} for rollout in result["rollouts"]
        ]
        return {**result, "step": result["step"], "changed": changed, "rollouts": rollouts}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(path, error) from error


def read_tokens(path: Path, rollout: int) -> dict[str, NDArray[Any]]:
    """Return the rows of one rollout, column by column; no rows if it is not in the replay.

    The file is read as a stream, so that a step of millions of tokens takes no memory.
    """
    counts = {entry["rollout"]: entry["tokens"] for entry in read_replay(path)["rollouts"]}
    ids = list(counts)
    rows = counts.get(rollout, 0)
    first = sum(counts[id] for id in ids[: ids.index(rollout)]) if rows else 0
    columns = {}
    try:
        with zipfile.ZipFile(path.with_suffix(".npz")) as archive:
            for name in archive.namelist():
                with archive.open(name) as member:
                    columns[name.removesuffix(".npy")] = _read_rows(member, first, rows)
        return columns
    except (OSError, ValueError, zipfile.BadZipFile, zlib.error, NotImplementedError, EOFError) as error:
        raise _damaged(path.with_suffix(".npz"), error) from error


def _read_rows(member: Any, first: int, rows: int) -> NDArray[Any]:
    np.lib.format.read_magic(member)
    _, _, dtype = np.lib.format.read_array_header_1_0(member)
    if dtype.hasobject:
        raise ValueError("a column has objects")
    member.seek(first * dtype.itemsize, 1)
    return np.frombuffer(member.read(rows * dtype.itemsize), dtype)


def _damaged(path: Path, error: Exception) -> DataError:
    return DataError(f"The replay {path} cannot be read: {error}. Remove it, and make it again with `etude replay`.")
