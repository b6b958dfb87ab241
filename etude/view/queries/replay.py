"""The replays of a run: the two algorithms side by side, and the signals of each token for the page of a rollout."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from etude.errors import EtudeError, NotFoundError
from etude.tools.replay.files import SIDES, STATES, find_replays, read_replay, read_tokens
from etude.tools.replay.report import compared_numbers, conclusions, headline
from etude.view.replies import Table
from etude.view.run_reader import RunReader

UNKNOWN = len(STATES)
"""The state of a token that is not in the replay."""
ROLLOUT_NUMBERS = ("advantage", "weight", "clipped", "masked")


@dataclass(frozen=True)
class StepReplays:
    """The replays of one step."""

    command: str
    """The command that makes one."""
    names: list[str]
    """The newest first."""
    options: list[str]
    """The options that each changes; empty for the run's own."""


@dataclass(frozen=True)
class ReplayPage:
    """One replay."""

    name: str
    step: int
    headline: str
    conclusions: list[str]
    options: Table
    numbers: Table
    """The numbers of both algorithms."""
    movers: Table
    """The tokens whose weights differ most."""
    rollouts: Table


def step_replays(reader: RunReader, step: int | None) -> StepReplays | None:
    """Return the replays of a step, None without a step. One that cannot be read has its error in place of its
    options."""
    if step is None:
        return None
    found = find_replays(reader.directory, step)
    command = f"etude replay {shlex.quote(str(reader.directory))} --step {step}"
    return StepReplays(command, list(found), [_options_or_error(path) for path in found.values()])


def changed_options(path: Path) -> str:
    """Return the options that a replay changes, as on a command line."""
    return " ".join(f"{name}={after}" for name, (_, after) in read_replay(path)["changed"].items())


def _options_or_error(path: Path) -> str:
    try:
        return changed_options(path)
    except EtudeError as error:
        return str(error)


def group_replay(reader: RunReader, step: int | None, rollouts: list[int]) -> Table:
    """Return the numbers of some rollouts in the newest readable replay of their step; without one, no column."""
    for path in find_replays(reader.directory, step).values() if step is not None else ():
        with suppress(EtudeError):
            table = _rollout_table(read_replay(path), rollouts)
            return Table({"replay": [path.stem] * len(table.columns["rollout"]), **table.columns})
    return Table({})


def read_replay_page(reader: RunReader, name: str) -> ReplayPage:
    """Return the page of a replay."""
    result = read_replay(_find(reader, name))
    sides = [side for side in SIDES if result["sides"][side] is not None]
    numbers = compared_numbers(result)
    movers: list[Mapping[str, Any]] = result.get("difference", {}).get("movers", [])
    places = {name: [mover[name] for mover in movers] for name in ("rollout", "turn", "index")}
    options = list(result["changed"].items())
    return ReplayPage(
        name,
        result["step"],
        headline({**result, "run": reader.name}),
        conclusions(result),
        Table(
            {
                "option": [option for option, _ in options],
                **{side: [values[place] for _, values in options] for place, side in enumerate(SIDES)},
            }
        ),
        Table(
            {
                "name": [label for label, _ in numbers],
                **{side: [values[place] for _, values in numbers] for place, side in enumerate(sides)},
            }
        ),
        Table(
            {
                **places,
                "text": [_token_text(reader, mover["id"]) for mover in movers],
                **{side: [mover[side] for mover in movers] for side in SIDES},
            }
        ),
        _rollout_table(result),
    )


def token_signals(reader: RunReader, name: str, side: str, rollout: int, turn: int, ids: Any) -> dict[str, Any]:
    """Return the columns of a turn's sampled tokens in a replay. A token that is not in it has NaN, and no state.

    `ratio` compares the policy with the log-prob that the loss reads. `kl` estimates KL(π ‖ π_ref) from the token.
    """
    rows = read_tokens(_find(reader, name), rollout)
    if f"weight_{side}" not in rows:
        raise NotFoundError(f"The replay '{name}' has no algorithm '{side}'. It has `recorded`, the run's own.")
    of_turn = rows["turn"] == turn
    rows = {column: values[of_turn] for column, values in rows.items()}
    places = rows["index"]
    known = (places < len(ids)) & (rows["id"] == np.asarray(ids)[np.minimum(places, len(ids) - 1)])
    signals = {
        "advantage": rows.get(f"advantage_{side}"),
        "weight": rows[f"weight_{side}"],
        "ratio": _exp_difference(rows.get(f"logp_{side}"), rows.get(f"old_logp_{side}")),
        "start_logp": rows.get("start_logp"),
        "entropy": rows.get("entropy"),
        "kl": _kl(rows.get("start_logp"), rows.get("ref_logp")),
    }
    columns: dict[str, Any] = {"state": np.full(len(ids), UNKNOWN, np.uint8)}
    columns["state"][places[known]] = rows[f"state_{side}"][known]
    for signal, values in signals.items():
        if values is not None:
            columns[signal] = np.full(len(ids), np.nan, np.float32)
            columns[signal][places[known]] = values[known]
    return columns


def _exp_difference(one: NDArray[Any] | None, other: NDArray[Any] | None) -> NDArray[Any] | None:
    return None if one is None or other is None else np.exp(one - other)


def _kl(logp: NDArray[Any] | None, reference: NDArray[Any] | None) -> NDArray[Any] | None:
    """Return the estimate exp(r) − r − 1 with r = log π_ref − log π, which is never negative."""
    ratio = _exp_difference(reference, logp)
    return None if ratio is None else ratio - np.log(ratio) - 1


def _rollout_table(result: Mapping[str, Any], only: list[int] | None = None) -> Table:
    entries = [entry for entry in result["rollouts"] if only is None or entry["rollout"] in only]
    sides = [side for side in SIDES if result["sides"][side] is not None]
    return Table(
        {
            "rollout": [entry["rollout"] for entry in entries],
            "reward": [entry["reward"] for entry in entries],
            **{
                f"{name}_{side}": [entry[side][name] for entry in entries] for name in ROLLOUT_NUMBERS for side in sides
            },
        }
    )


def _find(reader: RunReader, name: str) -> Path:
    """Return the file of a replay. Its name is looked up, and never made into a path."""
    found = find_replays(reader.directory)
    if name not in found:
        raise NotFoundError(f"The run '{reader.name}' has no replay '{name}'. The page of a step lists its replays.")
    return found[name]


def _token_text(reader: RunReader, id: int) -> str:
    tokenizer = reader.tokenizer
    return f"token {id}" if tokenizer is None else tokenizer.decode([id], keep_special_tokens=True)
