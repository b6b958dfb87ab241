"""The names under which weights are published: those of the files that the model was read from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from etude.checkpoint import export
from etude.models import load, save
from etude.models.model import stored_buffers
from etude.models.published_names import PublishedNames, expert_name
from etude.models.weight_files import WeightFiles, find_weights
from tests.families import FAMILIES, family_model
from tests.recipes.ranked import RankPolicy, family_policy


def whole_name(name: str) -> str:
    """Return a weight's name in the files of a Qwen3.5 that also sees."""
    return f"model.language_model.{name.removeprefix('model.')}" if name.startswith("model.") else name


def test_weights_have_the_names_of_the_files_of_a_larger_model(tmp_path: Path) -> None:
    model = family_model("qwen3_5_text")
    weights, seeing = dict(model.named_weights()), ("model.visual.patch_embed.weight", torch.ones(2))
    export([*((whole_name(name), weight) for name, weight in weights.items()), seeing], model.config_dict(), tmp_path)
    published = PublishedNames(model.module, find_weights(tmp_path))
    assert [name for name, _ in published.rename(weights.items())] == [whole_name(name) for name in weights]
    assert {name: weight.shape for name, weight in load(tmp_path, dtype=torch.float32).named_weights()} == {
        name: weight.shape for name, weight in weights.items()
    }
    assert WeightFiles(tmp_path, model.module).fit({name: weight.shape for name, weight in weights.items()})


def test_weights_keep_their_names_where_files_have_the_same() -> None:
    model = family_model("qwen3_5_text")
    names = [name for name, _ in model.named_weights()]
    published = PublishedNames(model.module, names)
    assert [published(name) for name in names] == names


def test_a_policy_is_written_by_the_names_that_servers_know(tmp_path: Path) -> None:
    model, rank = family_model("qwen3_5_text"), RankPolicy()
    weights = [(whole_name(name), weight) for name, weight in model.named_weights()]
    export(weights, model.config_dict(), tmp_path / "whole")
    (tmp_path / "whole/tokenizer.json").write_text("{}")
    rank.start("fp32", policy=partial(family_policy, name="qwen3_5_text"))
    for directory, names_of in (("joined", tmp_path / "whole"), ("started", None)):
        rank.worker.write_model(tmp_path / directory, tmp_path / "whole", untied=False, names_of=names_of)
    save(model, tmp_path / "own")
    for directory, same in (("joined", "whole"), ("started", "own")):
        assert find_weights(tmp_path / directory).keys() == find_weights(tmp_path / same).keys()


RENAMED = (
    *("qwen3_moe", "deepseek_v3", "glm4_moe_lite", "qwen3_5_moe_text", "qwen3_next", "olmo_hybrid", "kimi_linear"),
    *("nemotron_h", "granitemoehybrid", "lfm2_moe"),
)
"""Families whose files have other names than transformers' parameters."""
QUICK = ("granitemoehybrid", "deepseek_v3")
CASES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]


@pytest.mark.parametrize("name", CASES)
def test_a_family_is_published_as_transformers_writes_its_files(name: str) -> None:
    """Each expert is a tensor of its own, for example; nothing is left out."""
    model = family_model(name)
    weights = dict(model.with_buffers(model.merged_weights()))
    published = dict(PublishedNames(model.module).publish(weights.items()))
    wanted = revert_weight_conversion(model.module, dict(weights))
    assert published.keys() == wanted.keys()
    assert all(torch.equal(weight, wanted[name]) for name, weight in published.items())
    assert (published.keys() == weights.keys()) == (name not in RENAMED)
    one_by_one = dict(PublishedNames(model.module).publish(by_expert(weights)))
    assert one_by_one.keys() == wanted.keys()
    assert all(torch.equal(weight, wanted[name]) for name, weight in one_by_one.items())


def by_expert(weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights as ranks that divide experts do: each expert alone."""
    for name, weight in weights.items():
        if ".experts." not in name:
            yield name, weight
            continue
        yield from ((expert_name(name, expert), part) for expert, part in enumerate(weight))


@pytest.mark.parametrize("name", CASES)
def test_files_are_read_in_blocks(name: str, tmp_path: Path) -> None:
    """Of parameters that they hold whole, or one expert after the other."""
    model = family_model(name)
    save(model, tmp_path)
    weights = {**dict(model.named_weights()), **stored_buffers(model.module)}
    files = WeightFiles(tmp_path, model.module)
    assert files.fit({name: tuple(weight.shape) for name, weight in weights.items()})
    generator = torch.Generator().manual_seed(0)
    for weight_name, weight in weights.items():
        first = [int(torch.randint(size, (), generator=generator)) for size in weight.shape]
        shape = [
            int(torch.randint(size - start, (), generator=generator)) + 1
            for size, start in zip(weight.shape, first, strict=True)
        ]
        block = weight.detach()[tuple(slice(start, start + size) for start, size in zip(first, shape, strict=True))]
        assert torch.equal(files.read(weight_name, first, shape), block), weight_name
