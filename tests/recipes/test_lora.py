"""Runs that train a part of a model, an adapter or the layers that are not frozen, from the command to the files."""

from __future__ import annotations

import json
import shutil
import sys
from itertools import combinations
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from etude.checkpoint.storage import read_tensor_index
from etude.cli import main
from etude.models import load, save
from etude.recipes.run.builders.assemble import build
from etude.recipes.workers.policy_worker import PolicyWorker
from tests.components import require
from tests.recipes.runs import Captured, loaded, refused, refused_run, run_of, same, step_metrics, train, weights
from tests.rollout.engines import logits_of
from tests.rollout.test_server_pool import theirs

LORA = {"lora.rank": 4, "lora.alpha": 16}
FROZEN = {"model.freeze": "[embed_tokens,layers.0]"}
IDS = torch.tensor([[5, 9, 2, 7, 11, 3]])


def logits(module: torch.nn.Module) -> Tensor:
    with torch.no_grad():
        result: Tensor = module(input_ids=IDS).logits
    return result


def stored(directory: Path) -> set[str]:
    """Return the names of the tensors in the newest checkpoint of a run."""
    newest = max((directory / "checkpoints").glob("step-*"))
    return set(read_tensor_index(newest).state_dict_metadata)


@pytest.fixture(scope="module")
def adapted(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps that trained an adapter. Only read it."""
    require("lora")
    return train(world, tmp_path_factory.mktemp("adapted") / "run", steps=2, **LORA, **{"checkpoint.every": 1})


@pytest.fixture(scope="module")
def frozen(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps whose first layers are frozen. Only read it."""
    return train(world, tmp_path_factory.mktemp("frozen") / "run", steps=2, **FROZEN)


def test_only_the_adapter_is_trained_and_saved(world: Path, adapted: Path) -> None:
    base = {name: weight.detach() for name, weight in load(world / "model", dtype=torch.float32).named_weights()}
    result = weights(adapted)
    learned = {name for name in result if ".lora_" in name}
    assert same(base, {name: result[name] for name in base}) and learned == result.keys() - base.keys()
    assert all(bool(result[name].any()) for name in learned if ".lora_B." in name), "every B has left zero"
    kinds = ("weights", "exp_avg", "exp_avg_sq", "step")
    others = {"learner.version", "scaling.scale", "scaling.good_steps"}
    assert stored(adapted) == {f"{kind}.{name}" for kind in kinds for name in learned} | others
    assert all(line["publish_bytes"] == 0 and line["mismatch/k3"] < 1e-9 for line in step_metrics(adapted))


@pytest.mark.parametrize(("options", "name"), [(LORA, "adapted"), (FROZEN, "frozen")], ids=["adapter", "frozen"])
def test_a_resumed_run_ends_with_the_same_bits(
    options: dict[str, object], name: str, world: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    whole: Path = request.getfixturevalue(name)
    half = train(world, tmp_path / "half", steps=1, **options)
    train(world, half, steps=2, **options)
    assert same(weights(whole), weights(half))


@pytest.mark.integration
def test_a_resumed_run_with_merged_weights_ends_with_the_same_bits(world: Path, tmp_path: Path) -> None:
    require("lora")
    merged = LORA | {"lora.publish": "merged"}
    whole = train(world, tmp_path / "whole", steps=2, **merged)
    half = train(world, tmp_path / "half", steps=1, **merged)
    train(world, half, steps=2, **merged)
    assert same(weights(whole), weights(half))


def test_every_option_changes_the_training(world: Path, adapted: Path, tmp_path: Path) -> None:
    flips: list[dict[str, object]] = [{"alpha": 8}, {"rslora": "true"}, {"rank": 2}, {"targets": "[mlp]"}]
    learned = [dict(loaded(adapted, 1).merged_weights())]
    for index, flip in enumerate(flips):
        options = LORA | {f"lora.{name}": value for name, value in flip.items()}
        run = train(world, tmp_path / str(index), steps=1, **options, **{"observe.level": "error"})
        learned.append(dict(loaded(run).merged_weights()))
    assert not any(same(one, other) for one, other in combinations(learned, 2))


def test_the_reference_is_the_adapted_model_without_a_second_copy(world: Path, adapted: Path, tmp_path: Path) -> None:
    held = LORA | {"kl": "reverse", "kl.coefficient": 0.5}
    with build(run_of(world, directory=tmp_path / "looked", **held)) as parts:
        worker = parts.learners.crew._worker  # type: ignore[attr-defined]
        assert isinstance(worker, PolicyWorker) and "ref_logp" in worker._auxiliary.frozen
        assert worker._auxiliary.frozen["ref_logp"].model is worker._learner.model is parts.engine.model
    first, second = step_metrics(train(world, tmp_path / "run", steps=2, **held))
    assert first["kl"] == 0, "the adapter begins as nothing"
    assert abs(second["kl"]) > 1e-5
    apart = train(world, tmp_path / "apart", steps=2, **held | {"reference.path": world / "model"})
    assert [line["kl"] for line in step_metrics(apart)] == pytest.approx([0, second["kl"]], abs=1e-6)
    assert not same(weights(adapted), weights(tmp_path / "run"))


def test_a_merged_engine_samples_from_the_trained_weights(world: Path, tmp_path: Path, adapted: Path) -> None:
    lines = step_metrics(train(world, tmp_path / "run", steps=2, **LORA, **{"lora.publish": "merged"}))
    layer = 4 * (32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 96)
    assert {line["engine/merged_bytes"] for line in lines} == {2 * layer}
    assert all(line["engine/merge_seconds"] > 0 and line["publish_bytes"] == 0 for line in lines)
    assert all(line["mismatch/k3"] < 1e-9 for line in lines)
    assert "engine/merged_bytes" not in step_metrics(adapted)[0]


def test_an_adapted_run_is_exported_merged_or_as_an_adapter(
    world: Path, adapted: Path, tmp_path: Path, capsys: Captured
) -> None:
    from peft import PeftModel

    assert main(["export", str(adapted), str(tmp_path / "whole")]) == 0
    assert "Wrote the model of step 2" in capsys.readouterr().out
    assert main(["export", str(adapted), str(tmp_path / "adapter"), "--adapter"]) == 0
    assert "Wrote the adapter of step 2" in capsys.readouterr().out
    wanted = logits_of(loaded(adapted), IDS[0].numpy())[None]
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    torch.testing.assert_close(logits(whole), wanted, rtol=1e-4, atol=1e-4)
    base = AutoModelForCausalLM.from_pretrained(world / "model")
    assert not torch.allclose(logits(base), wanted, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(
        logits(PeftModel.from_pretrained(base, tmp_path / "adapter")), wanted, rtol=1e-4, atol=1e-4
    )
    data = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert data["base_model_name_or_path"] == str(world / "model") and (data["r"], data["lora_alpha"]) == (
        4,
        16,
    )
    assert "down_proj" in data["target_modules"]
    assert {path.name for path in (tmp_path / "adapter").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }


def test_half_precision_exports_the_master_weights(world: Path, tmp_path: Path) -> None:
    require("lora")
    from safetensors.torch import load_file

    run = train(world, tmp_path / "run", steps=1, **LORA, **{"train.precision": "bf16"})
    assert main(["export", str(run), str(tmp_path / "adapter"), "--adapter"]) == 0
    held = {
        n.removeprefix("base_model.model."): w
        for n, w in load_file(tmp_path / "adapter/adapter_model.safetensors").items()
    }
    computed = dict(loaded(run).trained_weights())
    assert held.keys() == computed.keys() and {weight.dtype for weight in held.values()} == {torch.float32}
    assert all(torch.equal(held[name].bfloat16(), computed[name]) for name in held)


def test_an_adapted_run_is_scored_and_generates(world: Path, adapted: Path, capsys: Captured) -> None:
    capsys.readouterr()
    assert main(["eval", str(adapted), f"data.val=[{world / 'held_out.jsonl'}]", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["step"] == 2
    results = []
    for how in ("adapter", "merged"):
        assert main(["generate", str(adapted), "1+2=", "sampling.temperature=0", f"lora.publish={how}"]) == 0
        results.append(capsys.readouterr().out)
    assert results[0] == results[1]


def test_servers_answer_with_merged_adapters_however_the_run_published_them(
    adapted: Path, tmp_path: Path, capsys: Captured
) -> None:
    given = ["rollout=vllm", "lora.publish=merged", "sampling.max_tokens=4"]
    with theirs(tmp_path) as server:
        assert main(["generate", str(adapted), "1+2=", *given, f"rollout.url={server.url}"]) == 0
    capsys.readouterr()


def test_a_new_run_starts_from_an_adapter(world: Path, adapted: Path, tmp_path: Path, capsys: Captured) -> None:
    adapter = tmp_path / "adapter"
    assert main(["export", str(adapted), str(adapter), "--adapter"]) == 0
    on = {"lora.path": adapter, "kl": "reverse", "kl.coefficient": 0.1}
    run = train(world, tmp_path / "on", steps=1, **on)
    assert not same(weights(run), weights(adapted)) and weights(run).keys() == weights(adapted).keys()
    with build(run_of(world, directory=tmp_path / "still", **on)) as parts:
        worker = parts.learners.crew._worker  # type: ignore[attr-defined]
        assert same({name: weight.detach() for name, weight in worker._learner.model.named_weights()}, weights(adapted))
    capsys.readouterr()
    generate = ["generate", str(world / "model"), "1+2=", "sampling.temperature=0", "sampling.max_tokens=6"]
    for words in (["generate", str(adapted), *generate[2:]], [*generate, f"lora.path={adapter}"]):
        assert main(words) == 0
    text = capsys.readouterr().out.splitlines()
    assert text[0] == text[1]
    moved = adapter.rename(tmp_path / "moved")
    train(world, run, steps=2, **on | {"lora.path": moved})
    first, second = step_metrics(run)
    assert first["kl"] == pytest.approx(0, abs=1e-6) and abs(second["kl"]) > 1e-5, "held to what it began with"
    (moved / "adapter_model.safetensors").write_bytes(b"other")
    assert "was started on other files: adapter" in refused(
        capsys, "train", "--resume", str(run), "steps=3", f"lora.path={moved}"
    )


def test_frozen_parts_do_not_change_and_are_not_saved(world: Path, frozen: Path, tmp_path: Path) -> None:
    run = frozen
    base = dict(load(world / "model", dtype=torch.float32).named_weights())
    result = weights(run)
    still = {name for name in base if "embed_tokens" in name or ".layers.0." in name}
    assert {name for name in base if torch.equal(base[name], result[name])} == still
    assert not any(name.partition(".")[2] in still for name in stored(run))
    assert main(["export", str(run), str(tmp_path / "model")]) == 0
    exported = dict(load(tmp_path / "model", dtype=torch.float32).named_weights())
    assert all(torch.equal(exported[name], result[name]) for name in base)


def test_the_trained_parameters_are_reported_and_the_others_must_not_change(
    world: Path, tmp_path: Path, capsys: Captured
) -> None:
    shutil.copytree(world / "model", tmp_path / "model")
    run = train(world, tmp_path / "run", steps=1, **FROZEN, **{"model.path": tmp_path / "model"})
    assert "parameters, of which 12,416 are trained; train engine: local; tasks: 40." in capsys.readouterr().err
    model = load(tmp_path / "model", dtype=torch.float32)
    with torch.no_grad():
        model.head_weight.add_(1)
    save(model, tmp_path / "model")
    for words in (["export", str(run), str(tmp_path / "out")], ["generate", str(run), "1+1="]):
        message = refused(capsys, *words)
        assert (
            "trained a part of a model, and the rest is read from" in message and "model.safetensors changed" in message
        )
    assert main(["generate", str(run), "1+1=", f"model.path={world / 'model'}"]) == 0


REFUSED = {
    "a target that is nowhere": ({"lora.rank": 2, "lora.targets": "[qproj]"}, "`lora.targets` names `qproj`"),
    "a part that is nowhere": ({"model.freeze": "[embeds]"}, "`model.freeze` names `embeds`"),
    "everything": ({"model.freeze": "['*']"}, "leaves nothing of the model to train"),
    "both": (
        LORA | FROZEN,
        "`model.freeze` chooses among the weights of a model that is trained itself, and with `lora` adapters",
    ),
    "no adapter": ({"lora.targets": "[q_proj]"}, "`lora.targets` does nothing while no adapter is trained"),
    "dropout": (LORA | {"lora.dropout": 0.1}, "dropout"),
    "no such directory": ({"lora.path": "nowhere"}, "holds no adapter: it has no adapter_config.json"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_parts_that_cannot_be_trained_are_refused(name: str, world: Path, tmp_path: Path, capsys: Captured) -> None:
    require("lora")
    options, message = REFUSED[name]
    assert message in refused_run(capsys, world, tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def test_an_adapter_is_not_exported_of_a_run_without_one(whole: Path, tmp_path: Path, capsys: Captured) -> None:
    assert "trained the model itself" in refused(capsys, "export", str(whole), str(tmp_path / "out"), "--adapter")


def test_a_missing_package_is_named_with_its_extra(
    world: Path, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    monkeypatch.delitem(sys.modules, "etude.models.lora", raising=False)
    message = refused_run(capsys, world, tmp_path / "run", **LORA)
    assert "`lora` needs the package peft" in message and "pip install 'etude[lora]'" in message
