"""What a plan foresees: compared with what torch's allocator really takes, for runs of several shapes."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.plan import CASES, COMMON, ENGINE, SIZES, WITHIN, compared, run_of
from etude.cli import main
from etude.config.compose import compose
from etude.tools.ledger import Ledger
from etude.tools.outline import Pretend, Written, without_memory
from etude.tools.plan import plan
from etude.tools.plan_options import PlanRun
from etude.tools.planned import GIB
from etude.tools.rehearsal import rehearse
from tests.components import require
from tests.recipes.runs import Captured, refused

SMALL: dict[str, Any] = {**SIZES, "layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "vocabulary": 2048}
QUICK = ("fp32", "lora", "one micro-batch", "checkpointing", "weights laid out", "mesh.tensor", "sft", "dpo")
CPU = torch.device("cpu")
OPTIONS = tuple(option for option in (*COMMON, *ENGINE) if option != "device=cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's config, and nothing else of it."""
    place = tmp_path_factory.mktemp("plan") / "model"
    run_of(place, "fp32", SMALL)
    return place


def asked(model: Path, *options: str) -> PlanRun:
    return compose(PlanRun, [f"model.path={model}", *OPTIONS, *options])


# -- the ledger --------------------------------------------------------------------------------------------------------


def test_a_ledger_knows_what_is_held_and_for_how_long() -> None:
    ledger = Ledger()
    with Written(ledger):
        with ledger.of("kept"):
            kept = torch.zeros(256)
            view = kept.view(16, 16)[3:]
        with ledger.phase("work"), ledger.of("passing"):
            torch.ones(512).sum()
            del kept
        del view
    gc.collect()
    assert ledger.phases == ["work"]
    peak = ledger.peak("work")
    assert peak.kinds["kept"] == 1024, "a view holds it"
    assert 2048 <= peak.kinds["passing"] <= 2048 + 8 and peak.total == sum(peak.kinds.values())
    assert ledger.peak("work", frozenset({"kept"})).total == peak.kinds["passing"]


def test_what_a_tensor_is_for_may_be_said_later() -> None:
    ledger = Ledger()
    with Written(ledger):
        a, b = torch.zeros(256), torch.zeros(128)
        ledger.name([a], "gradients")
        ledger.name([b], None)
    assert ledger.kind(a) == "gradients"
    assert ledger.peak().kinds == {"gradients": 1024} and ledger.peak().total == 1024


def test_outlines_have_shapes_and_lifetimes_and_whole_numbers_stay_numbers() -> None:
    ledger = Ledger()
    with without_memory(ledger):
        weight = torch.zeros(1 << 20, 1 << 16)  # of 256 GiB
        rows = torch.tensor([2, 5]).add(1)
        assert rows.tolist() == [3, 6]
        out = weight[rows] @ weight.T
        assert float(out.sum()) == 1.0 and not torch.equal(out, out)
    assert ledger.peak().total > 256 * GIB


def test_what_pretends_takes_the_paths_of_a_gpu() -> None:
    gpu, seen = torch.device("cuda", 0), list[torch.device]()
    with without_memory(Ledger()) as outline, Pretend(outline, gpu):
        weight = torch.zeros(3, requires_grad=True)
        weight.register_hook(lambda grad: seen.append(grad.device))
        made = torch.ones(3, device=gpu) * weight.to("cuda")
        made.sum().backward()
        assert weight.device == made.device == torch.tensor([1]).to(gpu).device == gpu
        assert weight.grad is not None and seen == [gpu]
    assert weight.device.type == "cpu"


# -- foreseen and measured ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.soak) for n in CASES])
def test_what_is_foreseen_is_what_is_taken(name: str, tmp_path: Path) -> None:
    if name == "lora":
        require("lora")
    found = compared(run_of(tmp_path / "model", name, SMALL), name)
    assert abs(found.ratio - 1) <= WITHIN, f"{found.foreseen} bytes were foreseen and {found.measured} measured"


def test_every_kind_of_memory_has_its_name(model: Path) -> None:
    run = asked(model, "train.precision=bf16", "kl=reverse")
    played = rehearse(run, CPU)
    elements = sum(weight.numel() for weight in played.model.parameters())
    held = played.ledger.peak("updating").kinds
    assert held["weights"] == held["reference"] and 0 <= held["weights"] - 2 * elements < 1000
    assert held["masters"] == 4 * elements and held["optimizer"] - 8 * elements < 1000
    assert held["gradients"] >= 4 * elements * 0.5 and held["activations"] > 0
    assert held["kv"] == pytest.approx(run.rollout.kv_gib * GIB, rel=0.02)


@pytest.mark.parametrize(
    ("option", "kind"),
    [
        ("train.micro_tokens=256", "activations"),
        ("train.activation_checkpointing=true", "activations"),
        ("lora.rank=4", "optimizer"),
        ("rollout.kv_gib=0.0015", "kv"),
    ],
)
def test_knobs_move_what_they_are_for(option: str, kind: str, model: Path) -> None:
    if "lora" in option:
        require("lora")
    peaks = []
    for options in ((), (option,)):
        ledger = rehearse(asked(model, "train.precision=fp32", *options), CPU).ledger
        peaks.append(max(ledger.peak(phase).kinds.get(kind, 0) for phase in ledger.phases))
    assert peaks[1] < 0.8 * peaks[0]


# -- the command -------------------------------------------------------------------------------------------------------


def test_a_plan_for_gpus_needs_none(model: Path, capsys: Captured) -> None:
    told = [f"model.path={model}", *OPTIONS, "gpus=1", "gpu_gib=1", "--json"]
    assert main(["plan", "grpo", *told]) == 0
    found = json.loads(capsys.readouterr().out)
    (device,) = found["devices"]
    assert device["name"] == "each GPU" and device["limit"] == GIB and device["fits"] and found["fits"]
    assert {"sampling", "updating"} <= device["phases"].keys()
    saved = {knob["option"]: knob["total"] for knob in found["knobs"]}
    assert saved["train.offload"] < device["total"]
    assert main(["plan", *told[:-2], "gpu_gib=0.001", "--quick"]) == 1
    shown = capsys.readouterr().out
    assert "GiB too much" in shown and "keys and values" in shown


def test_more_ranks_keep_less_each(model: Path) -> None:
    one, two = (plan(asked(model, "train.precision=bf16", f"gpus={gpus}"), knobs=False) for gpus in (1, 2))
    assert (one.ranks, two.ranks, two.devices[0].count) == (1, 2, 2)
    held = [found.devices[0].phases["updating"].kinds for found in (one, two)]
    assert held[1]["optimizer"] == pytest.approx(held[0]["optimizer"] / 2, rel=0.02)
    assert held[1]["weights"] == held[0]["weights"]
    assert not torch.distributed.is_initialized()


def test_each_device_holds_what_is_placed_on_it(model: Path) -> None:
    layout = ("placement.layout=split", "kl=reverse", "placement.reference=cuda:2")
    trains, samples, asks = plan(asked(model, "gpus=3", "ranks=1", *layout), knobs=False).devices
    assert (trains.name, samples.name) == ("each GPU that trains", "each GPU that samples")
    assert asks.name == "cuda:2, with reference" and set(asks.phases) == {"asking"}
    assert set(samples.phases) == {"sampling"} and {"kv", "weights"} <= samples.phases["sampling"].kinds.keys()
    held = trains.phases["updating"].kinds
    assert "optimizer" in held and not {"kv", "reference"} & held.keys()
    assert asks.phases["asking"].kinds["reference"] == held["weights"]


def test_what_cannot_be_planned_is_refused(model: Path, capsys: Captured, tmp_path: Path) -> None:
    assert "`model.path=…`" in refused(capsys, "plan", "grpo")
    path = f"model.path={model}"
    assert "wants 3: one for each of `ranks=3`" in refused(capsys, "plan", path, "ranks=3", "gpus=2")
    split = "placement.layout=split"
    assert "wants 6: one for each of `ranks=3`" in refused(capsys, "plan", path, "ranks=3", "gpus=4", split)
    assert "Leave one out" in refused(capsys, "plan", path, "device=cpu", "gpus=2")
    assert "makes room on a GPU" in refused(capsys, "plan", path, "gpus=0", "train.offload=true")
    assert "do not fit into" in refused(capsys, "plan", path, "gpus=0", "sampling.max_tokens=100000")


def test_a_pace_is_an_estimate_by_rates_that_were_given(model: Path, capsys: Captured) -> None:
    given = ("gpu_tflops=100", "gpu_gbs=1000")
    slow, fast = (plan(asked(model, "gpus=1", *given, f"collect.tasks={tasks}"), knobs=False).pace for tasks in (32, 8))
    assert slow is not None and fast is not None and slow.step > fast.step and slow.operations == 1e14
    assert plan(asked(model, "gpus=1"), knobs=False).pace is None or torch.cuda.is_available()
    assert main(["plan", f"model.path={model}", *OPTIONS, "gpus=1", *given, "--quick"]) == 0
    assert "Estimate: a step takes" in capsys.readouterr().out
