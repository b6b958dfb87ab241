"""The memory that a plan predicts, compared with that of torch's allocator, for runs of several shapes."""

from __future__ import annotations

import json
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch

from bench.plan import CASES, COMMON, ENGINE, SIZES, TRAINED, WITHIN, compared, performed, run_of
from bench.plan_worker import measured
from etude.cli import main
from etude.config.compose import compose
from etude.data.pack import micro_batches
from etude.errors import ConfigError
from etude.models import EngineModel, create, create_empty, tiny_config
from etude.models.prepack import can_prepack
from etude.models.tiny import EXPERTS
from etude.recipes.run.config import Run
from etude.records import SamplingParams
from etude.rollout import TorchEngine, VllmConfig
from etude.rollout.reported_sets import LOGPROBS_ALONE, Recording
from etude.rollout.scheduler import KEPT_STATES
from etude.rollout.server_backend import ServerBackend
from etude.rollout.server_engine import ModelShape
from etude.rollout.vllm import VllmBackend
from etude.tools.plan import worst_images
from etude.tools.plan.dry_run import dry_run, worst_case_batch
from etude.tools.plan.dry_run_common import build_policy
from etude.tools.plan.fake_tensors import use_fake_tensors
from etude.tools.plan.memory_tracker import MemoryTrace, MemoryTracker, PeakMemory
from etude.tools.plan.options import PlanDPO, PlanRun
from etude.tools.plan.planner import plan_memory
from etude.tools.plan.results import GIB, DeviceMemory, MemoryPlan
from etude.tools.plan.servers import add_servers, notes
from etude.train.backend import model_of
from tests.components import require
from tests.recipes.runs import Captured, faster_in_bf16, refused
from tests.vlms import make_vlm

SMALL: dict[str, Any] = {**SIZES, "layers": 1, "hidden": 64, "heads": 4, "kv_heads": 2, "vocab_size": 2048}
QUICK = ("fp32", "dpo")
SLOW = ("qwen3_5", "qwen3_moe")
SLOWER = ("lora", "one micro-batch", "sft", "checkpointing", "weights laid out")
CPU = torch.device("cpu")
MANY = tuple(option for option in COMMON if option != "device=cpu")
FEW = (*(option for option in MANY if not option.startswith("collect.tasks")), "collect.tasks=1")
"""The options of a step of four rollouts, which are one micro-batch."""
OPTIONS = (*FEW, *ENGINE)
PLAIN = ("ranks=1", "train.precision=fp32")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a model with its config only."""
    directory = tmp_path_factory.mktemp("plan") / "model"
    run_of(directory, "fp32", SMALL)
    return directory


@pytest.fixture(scope="module")
def default_memory(model: Path) -> MemoryTrace:
    """The memory of a run with default options."""
    return dry_run(plan_run(model, *PLAIN), CPU).memory


@pytest.fixture(scope="module")
def deeper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a model with two layers."""
    directory = tmp_path_factory.mktemp("plan") / "model"
    run_of(directory, "fp32", {**SMALL, "layers": 2})
    return directory


def plan_run(model: Path, *options: str, step: tuple[str, ...] = FEW) -> PlanRun:
    return compose(PlanRun, [f"model.path={model}", *step, *ENGINE, *options])


@pytest.mark.parametrize(("gpus", "precision"), [("gpus=0", "fp32"), ("gpus=1", "bf16")])
def test_a_plan_chooses_the_precision_that_the_run_would(gpus: str, precision: str, model: Path) -> None:
    with faster_in_bf16(0.08):
        chosen = plan_memory(plan_run(model, "ranks=1", gpus), with_savings=False)
    named = plan_memory(plan_run(model, "ranks=1", gpus, f"train.precision={precision}"), with_savings=False)
    assert chosen.devices[0].phases == named.devices[0].phases
    assert f"The plan is for `train.precision={precision}`: auto chooses it" in chosen.notes[0]
    assert named.notes == ()


# -- predicted and measured --------------------------------------------------------------------------------------------


def test_memory_freed_by_another_thread_is_no_longer_counted() -> None:
    def exchange() -> None:
        for _ in range(8):
            kinds = [torch.zeros(1 << 18)]
            thread = Thread(target=kinds.clear)
            thread.start()
            thread.join()

    assert 1 << 20 <= measured(exchange) < 2 << 20


@pytest.mark.parametrize(
    "name",
    [
        *QUICK,
        *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW),
        *(pytest.param(name, marks=pytest.mark.integration) for name in SLOWER),
        *(pytest.param(name, marks=pytest.mark.soak) for name in CASES if name not in (*QUICK, *SLOW, *SLOWER)),
    ],
)
def test_the_predicted_memory_is_the_measured_one(name: str, tmp_path: Path) -> None:
    if name == "lora":
        require("lora")
    plan = compared(run_of(tmp_path / "model", name, SIZES if name in TRAINED else SMALL), name)
    assert abs(plan.ratio - 1) <= WITHIN, f"{plan.foreseen} bytes were predicted and {plan.measured} measured"


@pytest.mark.slow
@pytest.mark.parametrize(("family", "train"), [("qwen3_vl", "true"), ("smolvlm", "false")])
def test_the_memory_of_images_is_predicted(family: str, train: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few features are kept, so that the tower's activations are not lost among them."""
    monkeypatch.setattr(worst_images, "MAX_FEATURES", 64)
    engine = ("rollout.kv_gib=0.0005", "rollout.max_num_batched_tokens=128", "rollout.max_num_seqs=8")
    step = ("data.max_prompt_length=120", "sampling.max_tokens=8", "collect.tasks=2", "collect.group_size=2")
    more = ("device=cpu", "train.precision=fp32", "train.max_tokens_per_micro_batch=512", f"vision.train={train}")
    run = compose(Run, [f"model.path={make_vlm(family)}", *engine, *step, *more])
    predicted = dry_run(run, CPU).memory
    levels = 3 if family == "qwen3_vl" else 1
    assert predicted.peak("sampling").kinds["features"] == 64 * 32 * 4 * levels
    foreseen = max(predicted.peak(phase).total for phase in predicted.phases)
    assert abs(foreseen / performed(run) - 1) <= WITHIN


def test_every_kind_of_memory_has_a_name(model: Path) -> None:
    run = plan_run(model, "ranks=1", "train.precision=bf16", "kl=reverse", step=MANY)
    dry = dry_run(run, CPU)
    elements = sum(weight.numel() for weight in dry.model.parameters())
    kinds = dry.memory.peak("updating").kinds
    assert kinds["weights"] == kinds["reference"] and 0 <= kinds["weights"] - 2 * elements < 1000
    assert kinds["masters"] == 4 * elements and kinds["optimizer"] - 8 * elements < 1000
    assert kinds["gradients"] >= 4 * elements * 0.5 and kinds["activations"] > 0
    assert run.embedded_engine is not None and run.embedded_engine.kv_gib is not None
    assert kinds["kv"] == pytest.approx(run.embedded_engine.kv_gib * GIB, rel=0.02)


@pytest.mark.slow
def test_the_planned_memory_of_keys_and_states_is_the_engines(tmp_path: Path) -> None:
    kinds = [("linear_attention", "full_attention")[layer % 2] for layer in range(9)]
    config = tiny_config(64, family="qwen3_5", layers=9, layer_types=kinds)  # of which the dry runs build 3 and 5
    config.save_pretrained(tmp_path)
    options = ("train.precision=fp32", "rollout.kv_gib=0.02", "ranks=1", "gpus=0")
    plan = plan_memory(plan_run(tmp_path, *options), with_savings=False)
    model = create(config, seed=0)
    embedded = plan_run(tmp_path, *options).embedded_engine
    assert embedded is not None
    engine = TorchEngine(model, None, embedded)
    with engine:
        engine.generate_all([np.arange(8, dtype=np.int32)], [SamplingParams(max_tokens=2)])
        caches = engine._steps.cache
        assert caches is not None
        keys, states = [cache.memory for cache in caches.kv], caches.state_memory()
    held = sum(memory.nbytes for memory in states)
    indices = plan.devices[0].phases["sampling"].kinds["kv"] - held - sum(memory.nbytes for memory in keys)
    assert 0 <= indices < 1000
    assert held == (32 + KEPT_STATES) * plan.state_bytes and plan.state_bytes == model.state_bytes
    assert plan.kv_tokens == keys[0].shape[2] // 2  # two key heads


def test_a_plan_without_memory_for_states_is_refused_as_the_run_is(tmp_path: Path, capsys: Captured) -> None:
    tiny_config(64, family="qwen3_5", layers=16).save_pretrained(tmp_path)
    command = ("plan", f"model.path={tmp_path}", *FEW, "gpus=1", "train.precision=bf16", "rollout.kv_gib=0.003")
    assert "does not hold the states of max_num_seqs=32 requests" in refused(capsys, *command)


@pytest.mark.slow
@pytest.mark.parametrize(("device", "precision"), [("gpus=0", "fp32"), ("gpus=1", "bf16")])
def test_a_mixture_has_memory_for_all_experts_and_operations_of_the_chosen_ones(
    device: str, precision: str, tmp_path: Path
) -> None:
    config = tiny_config(64, family="qwen3_moe", layers=7)
    config.save_pretrained(tmp_path)
    rates = ("gpu_tflops=100", "gpu_gbs=1000") if device == "gpus=1" else ()
    options = (f"train.precision={precision}", "ranks=1", device, *rates)
    plan = plan_memory(plan_run(tmp_path, *options), with_savings=False)
    model = create(config, seed=0)
    experts = sum(weight.numel() for _, weight in model.named_weights() if weight.ndim == 3)
    assert plan.parameters == sum(weight.numel() for weight in model.parameters())
    assert plan.active_parameters == plan.parameters - experts * 6 // 8, "two of eight experts"
    kinds = plan.devices[0].phases["updating"].kinds
    assert kinds["optimizer"] == pytest.approx(8 * plan.parameters, rel=0.01)
    assert kinds["weights"] == pytest.approx((4 if precision == "fp32" else 2) * plan.parameters, rel=0.01)


@pytest.mark.integration
@pytest.mark.parametrize(
    ("option", "kind", "share"),
    [
        ("train.max_tokens_per_micro_batch=256", "activations", 0.8),
        ("train.activation_checkpointing=selective", "activations", 0.95),
        ("train.activation_checkpointing=full", "activations", 0.8),
        ("lora.rank=4", "optimizer", 0.8),
        ("rollout.kv_gib=0.0015", "kv", 0.8),
    ],
)
def test_options_lower_the_memory_that_they_are_for(
    option: str, kind: str, share: float, model: Path, default_memory: MemoryTrace
) -> None:
    if "lora" in option:
        require("lora")
    changed_memory = dry_run(plan_run(model, *PLAIN, option), CPU).memory
    peaks = [
        max(each.peak(phase).kinds.get(kind, 0) for phase in each.phases) for each in (default_memory, changed_memory)
    ]
    assert peaks[1] < share * peaks[0]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", ["ranks=1", pytest.param("ranks=2", marks=pytest.mark.integration)])
def test_offloaded_activations_are_counted_in_the_processors_memory(deeper: Path, ranks: str) -> None:
    options = ("gpus=2", ranks, "train.precision=bf16")
    kept, offloaded = (
        plan_memory(plan_run(deeper, *options, f"train.activation_checkpointing={kind}"), with_savings=False).devices[0]
        for kind in ("full", "offload")
    )
    before, after = (device.phases["updating"].kinds for device in (kept, offloaded))
    assert after["activations"] < before["activations"] and after.keys() == before.keys()
    assert kept.host_bytes == 0 and offloaded.host_bytes >= before["activations"] - after["activations"]
    assert offloaded.phases["sampling"].total == kept.phases["sampling"].total


def test_the_copy_of_a_save_in_the_background_is_counted(model: Path) -> None:
    run = plan_run(model, "ranks=1", "train.precision=bf16", "checkpoint.async_save=true")
    on_cpu, gpu = (dry_run(run, torch.device(device)) for device in ("cpu", "cuda"))
    expected = 12 * sum(weight.numel() for weight in on_cpu.model.parameters())
    for phase in on_cpu.memory.phases:
        assert 0 <= on_cpu.memory.peak(phase).kinds["copy"] - expected < 1000, "float32 weights and two moments"
        assert 0 <= gpu.memory.peak(phase, only=frozenset({"host"})).total - expected < 1000
        assert "copy" not in gpu.memory.peak(phase).kinds


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["local", "fsdp"])
def test_a_plan_ignores_compilation(engine: str, model: Path) -> None:
    default_memory, compiled = (
        dry_run(plan_run(model, *PLAIN, f"train.engine={engine}", f"train.compile={value}"), CPU).memory
        for value in ("false", "true")
    )
    assert compiled.peak("updating").kinds == default_memory.peak("updating").kinds


@pytest.mark.integration
def test_packed_weights_are_counted_if_the_processor_uses_them(model: Path) -> None:
    run = plan_run(model, "ranks=1", "train.precision=bf16", "rollout.prepack=true")
    expected = sum(
        each.weight.nbytes
        for each in EngineModel(model_of(build_policy(run, None)), merge=False, prepack=False).linear_weights()
    )
    gains = can_prepack(torch.zeros(1, dtype=torch.bfloat16))
    assert dry_run(run, CPU).memory.peak("sampling").kinds.get("engine", 0) == (expected if gains else 0)
    gpu = dry_run(run, torch.device("cuda", 0)).memory.peak("sampling").kinds
    assert "engine" not in gpu, "a GPU's kernels use the weights without packing"


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_plan_for_a_gpu_names_the_largest_micro_batch(model: Path) -> None:
    split, whole, unknown = (
        plan_memory(plan_run(model, *PLAIN, "gpus=1", *options), with_savings=False).notes
        for options in (["gpu_gib=1", "train.max_tokens_per_micro_batch=16"], ["gpu_gib=1"], [])
    )
    assert [note for note in split if "`train.max_tokens_per_micro_batch=65536`" in note]
    assert not [note for note in (*whole, *unknown) if "max_tokens_per_micro_batch" in note]


@pytest.mark.slow
def test_a_plan_for_a_gpu_names_the_cache_that_fits(model: Path) -> None:
    def notes_of(*options: str) -> list[str]:
        plan = plan_memory(plan_run(model, *PLAIN, "gpus=1", *options), with_savings=False)
        return [note for note in plan.notes if "keys and values" in note]

    (larger,) = notes_of("gpu_gib=1", "rollout.kv_gib=0.0002", "collect.tasks=16")
    assert larger.startswith("`rollout.kv_gib=") and "1 GiB of the GPU − " in larger
    assert not notes_of("gpu_gib=1", "rollout.kv_gib=0.1"), "requests cannot fill more"
    (nothing,) = notes_of("gpu_gib=0.001", "rollout.kv_gib=0.01")
    assert nothing.startswith("Nothing is left for keys and values: 0.001 GiB of the GPU − ")


def test_a_plan_for_gpus_needs_no_gpu(model: Path, capsys: Captured) -> None:
    options = [f"model.path={model}", *OPTIONS, "gpus=1", "--quick"]
    assert main(["plan", "grpo", *options, "gpu_gib=1", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    (device,) = plan["devices"]
    assert device["name"] == "each GPU" and device["limit"] == GIB and device["fits"] and plan["fits"]
    assert {"sampling", "updating"} <= device["phases"].keys() and not plan["savings"]
    assert main(["plan", *options, "gpu_gib=0.001"]) == 1
    shown = capsys.readouterr().out
    assert "GiB too much" in shown and "KV cache" in shown


def savings_of(capsys: Captured, *options: str) -> tuple[dict[str, int], int]:
    """Return the peak memory of a device with each option that a plan suggests, and without any."""
    assert main(["plan", *options, "gpu_gib=1", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    return {saving["option"]: saving["total"] for saving in plan["savings"]}, plan["devices"][0]["total"]


def test_a_plan_lists_the_savings_of_options(model: Path, capsys: Captured) -> None:
    options = ("data.max_tokens=32", "batch_size=2", "gpus=0", "train.activation_checkpointing=full")
    saved, total = savings_of(capsys, "sft", f"model.path={model}", *options)
    assert saved["data.max_tokens"] < total
    assert not {"train.offload", "ranks"} & saved.keys(), "these options are for GPUs"
    assert "train.activation_checkpointing" not in saved, "this option is already on"


@pytest.mark.integration
def test_a_plan_tries_the_options_of_sampling_and_of_several_ranks(model: Path, capsys: Captured) -> None:
    saved, total = savings_of(capsys, "grpo", f"model.path={model}", *OPTIONS, "gpus=1")
    assert {"sampling.max_tokens", "rollout.kv_gib", "rollout.max_num_seqs"} <= saved.keys()
    assert saved["train.offload"] < total
    saved, total = savings_of(capsys, "dpo", f"model.path={model}", "data.max_tokens=128", "batch_size=4", "gpus=2")
    assert {"data.max_tokens", "ranks", "mesh.tensor", "mesh.context"} <= saved.keys()
    assert all(saved[option] < total for option in ("data.max_tokens", "train.offload", "ranks"))


def test_each_of_two_ranks_has_half_of_the_memory(model: Path, default_memory: MemoryTrace) -> None:
    two = plan_memory(plan_run(model, "train.precision=fp32", "gpus=2"), with_savings=False)
    assert (two.ranks, two.devices[0].count) == (2, 2)
    alone, kinds = default_memory.peak("updating").kinds, two.devices[0].phases["updating"].kinds
    assert kinds["optimizer"] == pytest.approx(alone["optimizer"] / 2, rel=0.02)
    assert kinds["weights"] == pytest.approx(alone["weights"] / 2, rel=0.02)
    assert not torch.distributed.is_initialized()


def test_a_rank_has_its_shards_and_its_engine_has_whole_weights(deeper: Path) -> None:
    options = ("train.precision=bf16", "gpus=2", "ranks=2", "sampling.max_tokens=8", "kl=reverse")
    plan = plan_memory(plan_run(deeper, *options), with_savings=False)
    phases, num_parameters = plan.devices[0].phases, plan.parameters
    assert list(phases) == ["sampling", "annotating", "updating"]
    for phase in phases.values():
        assert phase.kinds["weights"] == pytest.approx(4 * num_parameters / 2, rel=0.01)
        assert phase.kinds["reference"] == pytest.approx(2 * num_parameters / 2, rel=0.01)
        assert phase.kinds["engine"] == pytest.approx(2 * num_parameters, rel=0.01)
        assert phase.kinds["optimizer"] == pytest.approx(8 * num_parameters / 2, rel=0.01)


@pytest.mark.integration
def test_no_rank_has_whole_weights_while_servers_sample(deeper: Path) -> None:
    common = ("train.precision=fp32", "gpus=2", "ranks=2", "rollout.url=http://127.0.0.1:1")
    plan = served(deeper, *common, "rollout=vllm", "mini_batches=2", "sampling.max_tokens=8")
    phases, num_parameters = plan.devices[0].phases, plan.parameters
    assert sum(phases["sampling"].kinds.values()) < 1.05 * 12 * num_parameters / 2, "weights and moments"


@pytest.mark.integration
def test_a_plan_has_the_configured_ranks_or_one_for_each_gpu(model: Path) -> None:
    many, one, on_cpu = (
        plan_memory(plan_run(model, "train.precision=fp32", *options), with_savings=False)
        for options in (["gpus=4", "mesh.tensor=2"], ["gpus=4", "ranks=1"], ["gpus=0"])
    )
    assert (many.ranks, one.ranks, on_cpu.ranks) == (4, 1, 1)
    assert "`ranks=4`" in many.notes[-1] and not one.notes and not on_cpu.notes


@pytest.mark.integration
def test_ranks_that_share_rollouts_have_a_part_of_the_activations(model: Path) -> None:
    common = ("train.precision=bf16", "gpus=2", "ranks=2")
    shapes: tuple[tuple[str, ...], ...] = ((), ("mesh.tensor=2",), ("mesh.context=2",))
    plans = [plan_memory(plan_run(model, *common, *shape, step=MANY), with_savings=False) for shape in shapes]
    separate, *shared = (plan.devices[0].phases["updating"].kinds for plan in plans)
    for split, share in zip(shared, (0.8, 0.65), strict=True):
        assert split["activations"] < share * separate["activations"]
        for kind in ("optimizer", "weights"):
            assert split[kind] == pytest.approx(separate[kind], rel=0.05)
    adapted = plan_memory(plan_run(model, *common, "mesh.tensor=2", "lora.rank=4", step=MANY), with_savings=False)
    assert adapted.devices[0].phases["updating"].kinds["optimizer"] < 0.5 * separate["optimizer"]


@pytest.mark.integration
def test_ranks_that_divide_experts_gather_fewer_of_them(tmp_path: Path) -> None:
    """Also where they split the attention. A layer's activations are computed again."""
    tiny_config(64, family="qwen3_moe", layers=4).save_pretrained(tmp_path)
    common = ("train.precision=bf16", "train.activation_checkpointing=full", "gpus=4", "ranks=4")
    meshes: tuple[tuple[str, ...], ...] = ((), ("mesh.expert=4",), ("mesh.expert=4", "mesh.tensor=2"))
    plans = [plan_memory(plan_run(tmp_path, *common, *mesh), with_savings=False) for mesh in meshes]
    shared, *divided = (plan.devices[0].phases["updating"].kinds for plan in plans)
    for kinds in divided:
        assert kinds["activations"] < 0.6 * shared["activations"]
        assert kinds["optimizer"] == pytest.approx(shared["optimizer"], rel=0.02)


@pytest.mark.slow
def test_the_engine_of_a_plan_keeps_the_experts_of_each_token_that_a_trainer_replays(tmp_path: Path) -> None:
    tiny_config(64, family="qwen3_moe", layers=1).save_pretrained(tmp_path)
    plain, replayed = (
        plan_memory(plan_run(tmp_path, *PLAIN, "gpus=0", "rollout.kv_gib=0.02", *more), with_savings=False)
        for more in ((), ("train.router_replay=r3",))
    )
    kept = [plan.devices[0].phases["sampling"].kinds["kv"] for plan in (plain, replayed)]
    assert kept[1] - kept[0] == pytest.approx(plain.kv_tokens * EXPERTS["num_experts_per_tok"], rel=0.01)


@pytest.mark.slow
def test_a_rank_whose_experts_get_more_tokens_needs_more_memory_up_to_all_tokens(tmp_path: Path) -> None:
    tiny_config(64, family="qwen3_moe", layers=1).save_pretrained(tmp_path)
    options = ("train.precision=bf16", "gpus=4", "ranks=4", "mesh.expert=4")
    even, most = (
        plan_memory(plan_run(tmp_path, *options, f"expert_load={load}"), with_savings=False) for load in (1, 99)
    )
    taken = [plan.devices[0].phases["updating"].kinds["activations"] for plan in (even, most)]
    assert 1.1 * taken[0] < taken[1] < 4 * taken[0], "four ranks send all that they have"
    with pytest.raises(ConfigError, match=r"`expert_load=99` is for a mixture whose experts ranks divide"):
        plan_memory(plan_run(tmp_path, *options[:-1], "expert_load=99"), with_savings=False)


def test_an_update_of_long_answers_is_planned_with_two_micro_batches(model: Path) -> None:
    run = plan_run(model, *PLAIN, "train.max_tokens_per_micro_batch=400", "collect.group_size=8")
    for answer, rollouts in ((300, 2), (150, 4), (40, 8)):
        batch = worst_case_batch(run, (50, answer))
        assert batch.num_rollouts == rollouts and len(micro_batches(batch, 400)) == (1 if answer == 40 else 2)


@pytest.mark.integration
def test_each_device_has_the_parts_that_are_placed_on_it(model: Path) -> None:
    layout = ("placement.layout=split", "kl=reverse", "placement.reference=cuda:2")
    trainers, samples, reference_device = plan_memory(
        plan_run(model, "gpus=3", "ranks=1", *layout), with_savings=False
    ).devices
    assert (trainers.name, samples.name) == ("each GPU that trains", "each GPU that samples")
    assert reference_device.name == "cuda:2, with reference" and set(reference_device.phases) == {"annotating"}
    assert set(samples.phases) == {"sampling"} and {"kv", "weights"} <= samples.phases["sampling"].kinds.keys()
    kinds = trainers.phases["updating"].kinds
    assert "optimizer" in kinds and not {"kv", "reference"} & kinds.keys()
    assert reference_device.phases["annotating"].kinds["reference"] == kinds["weights"]


def test_invalid_plans_are_refused(model: Path, capsys: Captured, tmp_path: Path) -> None:
    assert "`model.path=…`" in refused(capsys, "plan", "grpo")
    path = f"model.path={model}"
    assert "needs 3: one for each of `ranks=3`" in refused(capsys, "plan", path, "ranks=3", "gpus=2")
    split = "placement.layout=split"
    assert "needs 6: one for each of `ranks=3`" in refused(capsys, "plan", path, "ranks=3", "gpus=4", split)
    assert "Leave one out" in refused(capsys, "plan", path, "device=cpu", "gpus=2")
    assert "`ranks=1` is no multiple" in refused(capsys, "plan", path, "gpus=2", "ranks=1", "mesh.tensor=2")
    assert "`ranks=3` is no multiple" in refused(capsys, "plan", path, "gpus=3", "mesh.tensor=2")
    assert "frees memory of a GPU" in refused(capsys, "plan", path, "gpus=0", "train.offload=true")
    offload = "train.activation_checkpointing=offload"
    assert f"`{offload}` frees memory of a GPU" in refused(capsys, "plan", path, "gpus=0", offload)
    assert "do not fit into" in refused(capsys, "plan", path, "gpus=0", "sampling.max_tokens=100000")
    assert "4 query heads over 3" in refused(capsys, "plan", path, "gpus=3", "ranks=3", "mesh.tensor=3")
    assert "4 query heads over 3" in refused(capsys, "plan", path, "gpus=3", "ranks=3", "mesh.context=3")
    assert "There is no teacher" in refused(capsys, "plan", "distill", path)
    assert "trains on one rank" in refused(capsys, "plan", path, "gpus=2", "ranks=2", "train.engine=local")
    assert "`etude sft` takes none" in refused(capsys, "plan", "sft", "grpo", path)
    assert "does not fit into this model's context" in refused(capsys, "plan", "sft", path, "data.max_tokens=100000")


@pytest.mark.integration
def test_the_step_time_is_estimated_from_given_rates(model: Path, capsys: Captured) -> None:
    rates = ("gpu_tflops=100", "gpu_gbs=1000")
    slow, fast = (
        plan_memory(plan_run(model, "gpus=1", *rates, f"collect.tasks={tasks}"), with_savings=False).step_time
        for tasks in (32, 8)
    )
    assert slow is not None and fast is not None and slow.step > fast.step and slow.flops_per_second == 1e14
    assert plan_memory(plan_run(model, "gpus=1"), with_savings=False).step_time is None or torch.cuda.is_available()
    assert main(["plan", f"model.path={model}", *OPTIONS, "gpus=1", *rates, "--quick"]) == 0
    assert "Estimate: a step takes" in capsys.readouterr().out


# -- runs that sample while they train --------------------------------------------------------------------------------

STALE = ("placement.layout=split", "correction.weight=truncate")


@pytest.mark.slow
def test_engine_and_trainer_that_share_a_processor_hold_their_memory_at_once(model: Path) -> None:
    turns, beside = (
        plan_memory(plan_run(model, *PLAIN, *STALE, f"max_staleness={bound}"), with_savings=False).devices[0].phases
        for bound in (0, 2)
    )
    waiting = 3 * 4 * (48 + 96) * 17
    sampling, before, now = turns["sampling"].kinds, turns["updating"], beside["updating"]
    assert now.kinds["engine"] == now.kinds["weights"] and now.kinds["waiting rollouts"] == waiting
    engine = sampling["activations"] + sampling.get("logits", 0)
    assert now.total - before.total == waiting + engine and sum(now.kinds.values()) == now.total
    assert beside["sampling"].total - turns["sampling"].total == waiting


@pytest.mark.integration
def test_gpus_that_train_and_gpus_that_sample_work_at_the_same_time(model: Path) -> None:
    given = ("gpus=2", "ranks=1", "gpu_tflops=100", "gpu_gbs=1000", *STALE, "max_staleness=1")
    plan = plan_memory(plan_run(model, *given), with_savings=False)
    assert [note for note in plan.notes if "Rollouts that wait" in note and "the processor's memory" in note]
    assert not any("waiting rollouts" in peak.kinds for device in plan.devices for peak in device.phases.values())
    pace = plan.step_time
    assert pace is not None and pace.step == max(pace.sampling, pace.annotating + pace.updating)


# -- supervised runs ---------------------------------------------------------------------------------------------------


def test_a_supervised_run_is_planned(model: Path, capsys: Captured) -> None:
    command = ["dpo", f"model.path={model}", "data.max_tokens=128", "batch_size=4", "gpus=2", "gpu_gib=1", "--quick"]
    assert main(["plan", *command, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    (device,) = plan["devices"]
    assert (device["name"], device["count"], list(device["phases"])) == ("each GPU", 2, ["annotating", "updating"])
    assert device["phases"]["updating"]["kinds"]["reference"] and plan["row"] == [1, 127]
    assert main(["plan", *command, "gpu_tflops=1", "gpu_gbs=1"]) == 0
    shown = capsys.readouterr().out
    assert "examples of up to 128 tokens" in shown and "sampling" not in shown and "Estimate" in shown


def test_offloaded_models_are_not_counted_on_the_gpu(model: Path) -> None:
    options = [f"model.path={model}", "data.max_tokens=128", "batch_size=4", "gpus=1", "train.offload=true"]
    (device,) = plan_memory(compose(PlanDPO, options), with_savings=False).devices
    assert device.host_bytes >= device.phases["updating"].kinds["optimizer"]
    asking, updating = (device.phases[phase].kinds for phase in ("annotating", "updating"))
    assert "reference" in asking and not {"optimizer", "masters"} & asking.keys()
    assert "optimizer" in updating and "reference" not in updating


def test_an_offloaded_reference_and_a_teacher_take_turns_on_the_gpu(model: Path) -> None:
    options = ("ranks=1", "advantage=distillation", f"teacher.path={model}", "kl=reverse", "gpus=1")
    kept, turns = (
        plan_memory(plan_run(model, *options, f"train.offload={offload}"), with_savings=False).devices[0]
        for offload in ("false", "true")
    )
    models = {"reference", "teacher"}
    assert models <= kept.phases["annotating"].kinds.keys()
    assert len(models & turns.phases["annotating"].kinds.keys()) == 1


@pytest.mark.slow
def test_each_teacher_is_counted_and_of_offloaded_ones_the_largest(model: Path, deeper: Path) -> None:
    sizes = {}
    for path in (model, deeper):
        with use_fake_tensors(MemoryTracker()):
            weights = create_empty(path, dtype=torch.bfloat16).parameters()
            sizes[path] = sum(weight.nbytes for weight in weights)
    paths = f"teacher.paths={{first: {model}, large: {deeper}, second: {model}}}"
    options = ("ranks=1", "train.precision=bf16", "advantage=distillation", paths)
    kept = dry_run(plan_run(model, *options), CPU).memory.peak("annotating").kinds
    assert kept["teacher"] == pytest.approx(sizes[deeper], abs=1000)
    assert kept["other teachers"] == pytest.approx(sizes[model], abs=1000)

    (device,) = plan_memory(plan_run(model, *options, "gpus=1", "train.offload=true"), with_savings=False).devices
    assert device.phases["annotating"].kinds["teacher"] == pytest.approx(sizes[deeper], abs=1000)
    assert not any("other teachers" in phase.kinds for phase in device.phases.values())
    assert "teacher" not in device.phases["updating"].kinds

    _, beside = plan_memory(plan_run(model, *options, "gpus=2", "placement.teacher=cuda:1"), with_savings=False).devices
    assert {"teacher", "other teachers"} <= beside.phases["annotating"].kinds.keys()


# -- servers -----------------------------------------------------------------------------------------------------------


def served(model: Path, *options: str) -> MemoryPlan:
    return plan_memory(compose(PlanRun, [f"model.path={model}", *FEW, *options]), with_savings=False)


def test_servers_have_weights_and_their_share_of_memory(model: Path) -> None:
    options = ("gpus=4", "gpu_gib=2", "rollout=vllm", "rollout.devices=[2,3]", "rollout.tensor_parallel=2")
    plan = served(model, *options, "rollout.gpu_memory_utilization=0.5")
    trainers, servers = plan.devices
    assert (trainers.name, trainers.count) == ("each GPU that trains", 2)
    assert (servers.name, servers.count) == ("each GPU that serves", 2)
    assert not {"kv", "server"} & trainers.phases["sampling"].kinds.keys()
    kinds = servers.phases["sampling"].kinds
    assert kinds["weights"] == pytest.approx(plan.parameters * 2 / 2, rel=0.01)
    assert kinds["weights"] + kinds["kv"] == GIB
    assert plan.kv_tokens == kinds["kv"] // (ModelShape.read(model).kv_values_per_token * 2 // 2)
    assert "CUDA graphs" in plan.notes[0] and "fewer" in plan.notes[0]


@pytest.mark.integration
def test_the_memory_of_servers_is_added_to_that_of_a_shared_gpu(model: Path) -> None:
    common = ("gpus=1", "gpu_gib=2", "rollout=sglang")
    (alone,) = served(model, *common, "rollout.url=http://127.0.0.1:1").devices
    on_cpu = ("rollout.devices=[0]", "ranks=1")
    (both,) = served(model, *common, *on_cpu, "rollout.kv_gib=0.1").devices
    (turns,) = served(model, *common, "rollout.kv_gib=0.1", "train.offload=true").devices
    assert both.name == "each GPU that trains and serves"
    added = {phase: both.phases[phase].total - alone.phases[phase].total for phase in both.phases}
    assert set(added) == {"sampling", "annotating", "updating"} and len(set(added.values())) == 1
    assert added["sampling"] == pytest.approx(0.1 * GIB + alone.phases["sampling"].kinds["weights"], rel=0.01)
    sampling, updating = (turns.phases[phase].kinds for phase in ("sampling", "updating"))
    assert {"server", "kv"} <= sampling.keys() and "optimizer" not in sampling
    assert "optimizer" in updating and not {"server", "kv"} & updating.keys()
    plan = served(model, *common, *on_cpu, "rollout.kv_gib=0.1")
    assert plan.kv_tokens == ModelShape.read(model).tokens_in(0.1, 2)
    part = served(model, *common, *on_cpu, "rollout.gpu_memory_utilization=0.5").devices[0].phases["sampling"]
    resting = alone.phases["sampling"].total
    assert part.total - resting == pytest.approx(0.5 * (2 * GIB - resting)), "a share of the free memory"


@pytest.mark.integration
def test_replicas_are_counted_on_their_devices(model: Path) -> None:
    replicas = ("gpu_gib=2", "rollout=vllm", "rollout.kv_gib=0.1", "rollout.replicas=2")
    first, second = served(model, "gpus=5", *replicas).devices
    assert (first.name, first.count, second.name, second.count) == (
        *("each GPU that trains", 3),
        *("each GPU that serves", 2),
    )
    assert second.phases["sampling"].kinds["kv"] == pytest.approx(0.1 * GIB, rel=0.01)
    (both,) = served(model, "gpus=1", *replicas, "rollout.devices=[0,0]", "ranks=1").devices
    assert both.phases["sampling"].kinds["kv"] == pytest.approx(0.2 * GIB, rel=0.01)
    wide = ("rollout.tensor_parallel=4", "rollout.nodes=2", "rollout.devices=[1,2]")
    trainers, servers = served(model, "gpus=3", "rollout=vllm", "rollout.kv_gib=0.1", *wide).devices
    assert (trainers.count, servers.name, servers.count) == (1, "each GPU that serves", 4)
    on_cpu = served(model, "gpus=0", "rollout=vllm", "rollout.kv_gib=0.1")
    kinds = on_cpu.devices[0].phases["updating"].kinds
    assert kinds["server"] > kinds["weights"], "the server has a separate head"
    assert kinds["kv"] == pytest.approx(0.1 * GIB, rel=0.01)


class Other(VllmConfig):
    """A server engine without a known memory policy."""

    def create_backend(self, adapters: int = 0, recording: Recording = LOGPROBS_ALONE) -> ServerBackend:
        """Return vLLM's backend under another name."""
        return type("Elsewhere", (VllmBackend,), {"package": "Elsewhere"})()  # type: ignore[no-any-return]


def test_servers_that_cannot_be_planned_are_refused(model: Path, capsys: Captured) -> None:
    command = ("plan", f"model.path={model}", *FEW, "gpus=2", "gpu_gib=1")
    assert "Give `rollout.gpu_memory_utilization=…`" in refused(capsys, *command, "rollout=sglang")
    assert "of its servers up to number 5" in refused(
        capsys, *command, "rollout=vllm", "rollout.devices=[5]", "ranks=2"
    )
    assert "which have their own" in refused(capsys, *command, "rollout=vllm", "placement.layout=split", "ranks=1")
    assert "no server computes in" in refused(capsys, *command, "rollout=vllm", "train.precision=fp64")


def test_a_server_has_the_share_of_its_engine_and_at_least_its_weights(model: Path) -> None:
    gpu, url = torch.device("cuda", 0), "http://127.0.0.1:1"

    def last(*options: str, limit: int | None = GIB) -> tuple[DeviceMemory, tuple[str, ...]]:
        run = compose(PlanRun, [f"model.path={model}", "ranks=1", "train.precision=bf16", *options])
        servers = run.servers
        assert servers is not None
        trainers = DeviceMemory("each GPU", 1, {"sampling": PeakMemory(0, {})}, limit)
        devices, _ = add_servers(servers, {gpu: trainers}, fake_weights, limit, ranks=1, train=run.train)
        return devices[-1], notes(servers, gpu)

    with use_fake_tensors(MemoryTracker()):
        fake_weights = create_empty(model, dtype=torch.bfloat16)
        assert last("rollout=vllm")[0].total == pytest.approx(0.92 * GIB)
        device, messages = last("rollout=vllm", f"rollout.url={url}")
        assert device.name == "each GPU" and device.total == 0
        assert messages == (f"The memory of the servers at {url} is unknown.",)
        with pytest.raises(ConfigError, match=r"Give `gpu_gib=…`"):
            last("rollout=vllm", limit=None)
        with pytest.raises(ConfigError, match="its share of memory is"):
            last("rollout=vllm", "rollout.gpu_memory_utilization=0.0001")
        with pytest.raises(ConfigError, match="The memory policy of Elsewhere is unknown"):
            last(f"rollout={__name__}:Other")
