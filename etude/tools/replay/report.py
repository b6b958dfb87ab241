"""The tables of `etude replay`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from etude.observe import format_number
from etude.tools.replay.files import SIDES

ROWS = (
    ("gradient norm, first update", "gradient_norm"),
    ("change of the weights, norm", "change_norm"),
    ("optimizer steps", "updates"),
    ("tokens in the policy's loss", "trained"),
    ("clipped tokens", "clipped"),
    ("masked tokens", "masked"),
    ("tokens with advantage 0", "level"),
    ("rollouts with every token masked", "dropped_rollouts"),
    ("sum of |token weight|", "weight"),
)


def show(result: Mapping[str, Any], decode: Callable[[int], str], console: Console) -> None:
    """Print a replay: both algorithms side by side, and the tokens whose weights differ most."""
    names = [name for name in SIDES if result["sides"][name] is not None]
    console.print(Text(headline(result)), soft_wrap=True)
    for name, (before, after) in result["changed"].items():
        shown = " → ".join("none" if value is None else str(value) for value in (before, after))
        console.print(Text(f"  {name}: {shown}"), soft_wrap=True)
    table = Table("", *names, box=None, pad_edge=False, header_style="dim")
    for label, values in compared_numbers(result):
        table.add_row(label, *map(_number, values))
    console.print(table)
    for sentence in conclusions(result):
        console.print(Text(sentence), soft_wrap=True)
    if movers := result.get("difference", {}).get("movers"):
        table = Table("rollout", "turn", "token", "text", *SIDES, box=None, header_style="dim")
        for mover in movers:
            place = (str(mover[name]) for name in ("rollout", "turn", "index"))
            table.add_row(*place, Text(repr(decode(mover["id"]))), *(_number(mover[name]) for name in SIDES))
        console.print(Text("\nThe tokens whose weights differ most:"))
        console.print(table)


def headline(result: Mapping[str, Any]) -> str:
    """Return a sentence about the step and its options."""
    side = result["sides"]["recorded"]
    rollouts = len(result["rollouts"])
    what = "with its own options" if not result["changed"] else "with other options"
    return f"Step {result['step']} of {result['run']} {what}: {rollouts} rollouts, {side['tokens']} sampled tokens."


def compared_numbers(result: Mapping[str, Any]) -> list[tuple[str, list[float | None]]]:
    """Return the numbers of each algorithm with their labels; last the metrics, with two algorithms those that
    differ."""
    sides = {name: side for name, side in result["sides"].items() if side is not None}
    rows = [(label, [side[key] for side in sides.values()]) for label, key in ROWS]
    repeated = {"optimizer_steps"} | ({"grad_norm"} if all(side["updates"] == 1 for side in sides.values()) else set())
    names = dict.fromkeys(name for side in sides.values() for name in side["metrics"] if name not in repeated)
    metrics = [(name, [side["metrics"].get(name) for side in sides.values()]) for name in names]
    return rows + [(name, values) for name, values in metrics if len(values) == 1 or values[0] != values[1]]


def conclusions(result: Mapping[str, Any]) -> list[str]:
    """Return sentences about the exactness of a replay, and about the difference of both algorithms."""
    sentences = [_exactness(result)]
    if (difference := result.get("difference")) is None:
        return sentences
    for name, label in (("gradient", "Gradient of the first update"), ("change", "Change of the weights")):
        part = difference[name]
        same = "; equal bit for bit" if part["identical"] else ""
        ratio = f"norm {_number(part['norm_ratio'])} times the run's"
        sentences.append(f"{label}: cosine {_number(part['cosine'])}, {ratio}{same}.")
    weights = difference["token_weights"]
    turned = f"{weights['turned']} tokens are pushed in the other direction"
    sentences.append(f"Token weights: cosine {_number(weights['cosine'])}; {turned}.")
    if not difference["movers"]:
        sentences.append(
            "Both losses agree in this step: the weights of all tokens are equal, up to rounding. In one update on "
            "rollouts of the same policy, all ratios are 1."
        )
    return sentences


def _exactness(result: Mapping[str, Any]) -> str:
    known = result["measured"]
    if result["exact"] is None:
        return "The run's own metrics of this step are missing, so the replay is not compared with them."
    if result["exact"]:
        return "The replay with the run's options gives the loss and the gradient norm that the run measured, exactly."
    values = ", ".join(f"{name} {run:.9g} and {replayed:.9g}" for name, (run, replayed) in known.items())
    return (
        f"The run measured otherwise than this replay of it ({values}): by rounding, if the run had other threads, "
        "another device, several ranks or another size of micro-batches."
    )


def _number(value: float | None) -> str:
    return "–" if value is None else str(value) if isinstance(value, int) else format_number(value)
