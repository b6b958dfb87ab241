"""The printed plan: a table of memory by phase, a verdict, and the saving of each option."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from etude.observe import format_seconds, make_console, progress
from etude.recipes.recipe import Recipe
from etude.tools.plan.planner import plan_memory
from etude.tools.plan.results import GIB, MIB, DeviceMemory, MemoryPlan

KINDS = (
    "weights",
    "engine",
    "server",
    "reference",
    "teacher",
    "other teachers",
    "critic",
    "reward model",
    "masters",
    "gradients",
    "optimizer",
    "copy",
    "kv",
    "features",
    "waiting rollouts",
    "activations",
    "logits",
    "other",
)
"""The kinds of memory, in the order of the table's rows."""
MEANINGS = {
    "engine": "engine's own copy of weights",
    "server": "weights in servers",
    "masters": "float32 weights",
    "copy": "copy being saved",
    "kv": "KV cache, states",
    "features": "features of images",
    "other": "other tensors",
}
"""The row titles of kinds whose names are not clear."""
NOTABLE = 0.01
"""The smallest saving to print, as a share of the total."""


def show(requested: Recipe, *, with_savings: bool = True) -> MemoryPlan:
    """Plan a run, and print the plan."""
    console = make_console()
    with progress("planning a step, dry runs", None, console) as bar:
        plan = plan_memory(requested, with_savings=with_savings, on_progress=bar.advance)
    console.print(_headline(plan), soft_wrap=True)
    for device in plan.devices:
        console.print(_table(device))
        console.print(_verdict(device), soft_wrap=True)
        if device.host_bytes:
            each = " for each of them" if device.count > 1 else ""
            size = f"up to {_gib(device.host_bytes)} GiB of the processor's memory"
            console.print(f"What is offloaded takes {size}{each}.", soft_wrap=True)
    for note in plan.notes:
        console.print(note, soft_wrap=True)
    _show_savings(plan, console)
    _show_step_time(plan, console)
    return plan


def _headline(plan: MemoryPlan) -> str:
    ranks = "" if plan.ranks == 1 else f" on {plan.ranks} ranks"
    active = "" if plan.active_parameters == plan.parameters else f" ({plan.active_parameters:,} for a token)"
    model, (prompt, answer) = f"A model of {plan.parameters:,} parameters{active}{ranks}; ", plan.row
    if not plan.max_concurrency:
        return f"{model}examples of up to {prompt + answer} tokens, with a loss on all of them."
    cache = f"; {plan.kv_tokens:,} tokens of KV cache" if plan.kv_tokens else ""
    if plan.state_bytes:
        cache += f", and {plan.state_bytes / MIB:.3g} MiB of states for each request"
    return (
        f"{model}prompts of up to {prompt} tokens and answers of up to {answer}, {plan.max_concurrency} at once{cache}."
    )


def _table(device: DeviceMemory) -> Table:
    """Return the table of a device: the peak memory of each phase, by kind."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column(f"GiB on {device.name}" + (f" ({device.count} of them)" if device.count > 1 else ""))
    for phase in device.phases:
        table.add_column(phase, justify="right", style="bold" if phase == device.peak_phase else "")
    for kind in KINDS:
        sizes = [peak.kinds.get(kind, 0) for peak in device.phases.values()]
        if any(sizes):
            table.add_row(MEANINGS.get(kind, kind), *(_gib(size) if size else "" for size in sizes))
    if device.base_bytes:
        table.add_row("the program itself", *(_gib(device.base_bytes) for _ in device.phases))
    table.add_section()
    table.add_row("total", *(_gib(peak.total + device.base_bytes) for peak in device.phases.values()))
    return table


def _verdict(device: DeviceMemory) -> Text:
    peak = f"The peak is in {device.peak_phase}: {_gib(device.total)} GiB"
    if device.limit is None:
        return Text(f"{peak}. Give `gpu_gib=…` to check if it fits.")
    share = f"of {_gib(device.limit)} GiB"
    if device.fits:
        return Text(f"{peak} {share}: it fits.", "green")
    missing = device.total - device.limit
    return Text(f"{peak} {share}: {_gib(missing)} GiB too much.", "bold red")


def _show_savings(plan: MemoryPlan, console: Console) -> None:
    """Print the total with each option changed, the largest saving first."""
    total = max(device.total for device in plan.devices)
    notable = [saving for saving in plan.savings if total - saving.total > NOTABLE * total]
    if not notable:
        return
    console.print("\nOptions that lower it, one at a time:")
    width = max(len(f"{saving.option}={saving.value}") for saving in notable)
    for saving in notable:
        saved = f"{_gib(saving.total)} GiB, {_gib(total - saving.total)} less"
        console.print(f"  {f'{saving.option}={saving.value}':<{width}}  {saved}", soft_wrap=True)


def _show_step_time(plan: MemoryPlan, console: Console) -> None:
    step_time = plan.step_time
    if step_time is None:
        console.print("\nThe step time is not estimated: give `gpu_tflops=…` and `gpu_gbs=…` for that.")
        return
    parts = (("sampling", step_time.sampling), ("annotating", step_time.annotating), ("updating", step_time.updating))
    listed = ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in parts if seconds)
    console.print(
        f"\nEstimate: a step takes {format_seconds(step_time.step)} or longer ({listed}), at "
        f"{step_time.flops_per_second / 1e12:.3g} · 10¹² operations and "
        f"{step_time.bytes_per_second / 1e9:.3g} GB per second. A run reaches a part of these rates.",
        soft_wrap=True,
    )


def _gib(size: int) -> str:
    return f"{size / GIB:.3g}" if size < 1000 * GIB else f"{size / GIB:,.0f}"
