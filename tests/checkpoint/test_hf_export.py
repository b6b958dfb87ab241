"""Exported models as transformers loads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from etude.checkpoint import export
from etude.errors import CheckpointError
from etude.models import Model, create, load, tiny_config

IDS = torch.arange(40).reshape(4, 10) % 37


def logits(directory: Path) -> Tensor:
    """Return the output of an exported model in transformers' own implementation."""
    module = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        return module(IDS).logits


def model_config(model: Model) -> dict[str, Any]:
    return model.module.config.to_dict() | {"architectures": [type(model.module).__name__]}


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """A directory with some of a tokenizer's files, and one other file."""
    directory = tmp_path / "tokenizer"
    directory.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "notes.txt"):
        (directory / name).write_text(f"{name} is here")
    return directory


@pytest.mark.parametrize(
    "family", ["qwen3", *(pytest.param(each, marks=pytest.mark.slow) for each in ("llama", "gpt2"))]
)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shard", [10**9, 20_000])
def test_transformers_loads_an_export_with_the_same_outputs(
    tmp_path: Path, family: str, tied: bool, shard: int
) -> None:
    model = create(tiny_config(61, family=family, hidden=32, tied=tied), seed=4)
    by_us, by_them = tmp_path / "ours", tmp_path / "theirs"
    assert export(model.named_weights(), model_config(model), by_us, max_shard_bytes=shard) == by_us
    assert (by_us / "model.safetensors").exists() == (shard == 10**9)
    model.module.save_pretrained(by_them)
    assert torch.equal(logits(by_us), logits(by_them))
    again = load(by_us, dtype=torch.float32)
    for (name, weight), (other, loaded) in zip(model.named_weights(), again.named_weights(), strict=True):
        assert name == other and torch.equal(weight, loaded)


def test_a_tensor_under_two_names_is_written_once(tmp_path: Path) -> None:
    model = create(tiny_config(61, hidden=32), seed=4)
    names = dict(model.named_weights())
    twice = [*names.items(), ("lm_head.weight", names["model.embed_tokens.weight"])]
    directory = export(twice, model_config(model), tmp_path / "model", max_shard_bytes=20_000)
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == names.keys()
    assert index["metadata"]["total_size"] == sum(weight.nbytes for weight in names.values())
    model.module.save_pretrained(tmp_path / "theirs")
    assert torch.equal(logits(directory), logits(tmp_path / "theirs"))


def test_generated_weights_are_all_written(tmp_path: Path) -> None:
    model = create(tiny_config(50), seed=0)
    made = ((name, weight.detach() + 1) for name, weight in model.named_weights())
    loaded = load(export(made, model_config(model), tmp_path / "model"), dtype=torch.float32)
    wanted = dict(model.named_weights())
    assert all(torch.equal(weight, wanted[name] + 1) for name, weight in loaded.named_weights())


def test_the_config_names_the_dtype_of_the_weights(tmp_path: Path) -> None:
    model = create(tiny_config(61, hidden=32), seed=4)
    weights = ((name, weight.bfloat16()) for name, weight in model.named_weights())
    directory = export(weights, model_config(model), tmp_path / "model")
    assert json.loads((directory / "config.json").read_text())["dtype"] == "bfloat16"
    loaded = AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
    for name, weight in model.named_weights():
        assert torch.equal(loaded.get_parameter(name), weight.bfloat16())


def test_tokenizer_and_generation_config_come_along(tmp_path: Path, tokenizer: Path) -> None:
    model = create(tiny_config(61, hidden=32), seed=4)
    generation = {"eos_token_id": [3, 4], "temperature": 0.7, "do_sample": True}
    (tmp_path / "model").mkdir()  # the directory may exist if it is empty
    directory = export(
        model.named_weights(), model_config(model), tmp_path / "model", tokenizer=tokenizer, generation=generation
    )
    copied = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert {path.name for path in directory.iterdir()} == copied | {
        "config.json",
        "generation_config.json",
        "model.safetensors",
    }
    assert all((directory / name).read_text() == f"{name} is here" for name in copied)
    module = AutoModelForCausalLM.from_pretrained(directory)
    assert module.generation_config.eos_token_id == [3, 4] and module.generation_config.temperature == 0.7


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    model = create(tiny_config(61, hidden=32), seed=4)
    with pytest.raises(CheckpointError, match="exists and is not empty"):
        export(model.named_weights(), model_config(model), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    model = create(tiny_config(61, hidden=32), seed=4)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="has no tokenizer files"):
        export(model.named_weights(), model_config(model), tmp_path / "model", tokenizer=tmp_path / "empty")
    assert not (tmp_path / "model").exists()


def test_a_directory_that_cannot_be_written_is_reported_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    model = create(tiny_config(61, hidden=32), seed=4)
    with pytest.raises(CheckpointError, match=r"could not be exported .* Nothing was left"):
        export(model.named_weights(), model_config(model), tmp_path / "file" / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
