"""Adapters in a model: trained weights, names, refusals, and the switch that turns adapters off."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from etude.checkpoint import export_adapter
from etude.errors import ConfigError
from etude.models import (
    LoraAdapterConfig,
    Model,
    PackedAttention,
    adapt,
    adapter_config,
    create,
    load,
    save,
    tiny_config,
)
from etude.models.fused_layers import FusedBackbone, FusedLinear
from etude.models.tiny import FAMILIES
from tests.components import require
from tests.families import family_model
from tests.models.packs import FOREST, pack_of
from tests.sweeps import sweep
from tests.vlms import vlm_config

PACK = pack_of(FOREST)
FAMILY_PARAMS = ["qwen3", *(pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES if family != "qwen3")]
"""The families; quick tests run one of them."""


@pytest.fixture(autouse=True)
def _there() -> None:
    require("lora")


def run(model: Model) -> Tensor:
    return model.logits(model.hidden(PACK.ids, PACK.positions, PackedAttention(PACK)))


def adapted(
    family: str = "qwen3", dtype: torch.dtype = torch.float64, *, seed: int = 0, perturbed: bool = True, **options: Any
) -> Model:
    """Return a model with adapters. With `moved` they differ from their initial values, so each has an effect."""
    model = adapt(
        create(tiny_config(50, family=family), seed=1, dtype=dtype),
        LoraAdapterConfig(**{"rank": 4, **options}),
        seed=seed,
    )
    if perturbed:
        perturb(model)
    return model


def perturb(model: Model, seed: int = 2) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, weight in model.trained_weights():
            weight.add_(torch.randn(weight.shape, generator=generator, dtype=torch.float64).to(weight.dtype), alpha=0.1)


def save_adapter(model: Model, directory: Path) -> Path:
    return export_adapter(dict(model.trained_weights()), adapter_config(model, Path("base")), directory)


@pytest.mark.parametrize("family", FAMILY_PARAMS)
def test_a_new_adapter_changes_no_bit(family: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        plain = create(tiny_config(50, family=family), seed=1, dtype=dtype)
        assert torch.equal(run(adapted(family, dtype, perturbed=False)), run(plain))


@pytest.mark.parametrize("family", FAMILY_PARAMS)
def test_all_adapters_get_a_gradient_and_no_other_weight(family: str) -> None:
    model = adapted(family)
    run(model).square().sum().backward()
    with_gradient = {name for name, weight in model.named_weights() if weight.grad is not None}
    assert (
        with_gradient
        == {name for name, _ in model.trained_weights()}
        == {n for n, _ in model.named_weights() if "lora" in n}
    )
    assert all(bool(weight.grad.abs().sum() > 0) for _, weight in model.trained_weights() if weight.grad is not None)


def test_weights_keep_their_published_names() -> None:
    plain = {name for name, _ in create(tiny_config(50), seed=1).named_weights()}
    names = {name for name, _ in adapted().named_weights()}
    assert plain < names
    assert (
        "model.layers.0.mlp.up_proj.lora_A.weight" in names and "model.layers.1.self_attn.q_proj.lora_B.weight" in names
    )


def test_a_new_adapter_depends_on_its_seed_only() -> None:
    torch.manual_seed(7)
    one, random_state = dict(adapted(perturbed=False).trained_weights()), torch.get_rng_state()
    torch.manual_seed(8)
    two, three = (dict(adapted(perturbed=False, seed=seed).trained_weights()) for seed in (0, 1))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert any(not torch.equal(one[name], three[name]) for name in one)
    torch.manual_seed(7)
    assert torch.equal(torch.get_rng_state(), random_state), "torch's global random state is unchanged"


@pytest.mark.parametrize("options, scale", [({}, 32 / 4), ({"alpha": 5}, 5 / 4), ({"rslora": True}, 32 / 2)])
def test_options_set_the_scale_of_an_adapter(options: dict[str, Any], scale: float) -> None:
    model = adapted(targets=("down_proj",), **options)
    names = dict(model.named_weights())
    merged = dict(model.merged_weights())
    target = "model.layers.1.mlp.down_proj"
    product = names[f"{target}.lora_B.weight"] @ names[f"{target}.lora_A.weight"]
    torch.testing.assert_close(merged[f"{target}.weight"], names[f"{target}.weight"] + scale * product)


@pytest.mark.parametrize("family", FAMILY_PARAMS)
def test_merged_weights_are_the_same_model_without_adapters(family: str, tmp_path: Path) -> None:
    model = adapted(family)
    save(model, tmp_path)
    plain = load(tmp_path, dtype=torch.float64)
    assert not plain.has_adapters and [n for n, _ in plain.named_weights()] == [n for n, _ in model.merged_weights()]
    torch.testing.assert_close(run(plain), run(model), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "targets, count",
    [((), 14), (("q_proj", "v_proj"), 4), (("layers.0",), 7), (("mlp",), 6), (("layers.*.self_attn.k_proj",), 2)],
)
def test_targets_are_chosen_by_any_part_of_their_names(targets: tuple[str, ...], count: int) -> None:
    assert len(list(adapted(targets=targets).trained_weights())) == 2 * count


@pytest.mark.parametrize("targets", [("q_proj",), ("v_proj", "down_proj"), ("layers.1.mlp.up_proj",)])
def test_parts_of_a_fused_product_may_have_no_adapter(targets: tuple[str, ...], tmp_path: Path) -> None:
    model = adapted(targets=targets)
    save(model, tmp_path)
    torch.testing.assert_close(run(load(tmp_path, dtype=torch.float64)), run(model), rtol=1e-9, atol=1e-9)


def test_the_first_factors_of_a_fused_product_are_one_storage() -> None:
    model = adapted()
    assert isinstance(model._backbone, FusedBackbone)
    for layer in model._backbone.layers:
        assert isinstance(layer.qkv, FusedLinear) and layer.qkv.low is not None
        assert torch.equal(layer.qkv.low.down, torch.cat([*layer.qkv.low.downs])) and layer.qkv.low.down.shape == (
            12,
            64,
        )
    with torch.no_grad():
        for _, weight in model.trained_weights():
            weight.add_(1)
    assert torch.equal(layer.qkv.low.down, torch.cat([*layer.qkv.low.downs])), (
        "an optimizer step changes the weights of the product"
    )


@pytest.mark.parametrize("targets", [("lm_head",), ("q_prj",), ("embed_tokens",), ("q_proj", "nothing")])
def test_a_target_that_matches_nothing_lists_the_parts(targets: tuple[str, ...]) -> None:
    with pytest.raises(
        ConfigError, match=r"`lora.targets` names `.*`, and this model has no such part. It has model.layers."
    ):
        adapted(targets=targets)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"alpha": 8}, "`lora.alpha` does nothing while no adapter is trained"),
        ({"publish": "merged"}, "`lora.publish` does nothing"),
        ({"path": "there", "rank": 8}, "`lora.rank` was given beside `lora.path`"),
        ({"path": "there", "targets": ("mlp",)}, "`lora.targets` was given beside `lora.path`"),
    ],
)
def test_options_without_an_effect_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LoraAdapterConfig(**options)


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gpt2"])
def test_without_adapters_the_model_is_the_base_model_on_this_thread_only(family: str) -> None:
    model, plain = adapted(family), create(tiny_config(50, family=family), seed=1, dtype=torch.float64)
    with torch.no_grad():
        expected = run(model)
        elsewhere: list[Tensor] = []

        def compute() -> None:
            with torch.no_grad():
                elsewhere.append(run(model))

        with model.without_adapters():
            assert torch.equal(run(model), run(plain))
            other = threading.Thread(target=compute)
            other.start()
            other.join()
        assert torch.equal(elsewhere[0], expected) and torch.equal(run(model), expected)
    with pytest.raises(AssertionError, match="where no gradient is taken"), model.without_adapters():
        pass


def test_a_copy_has_its_own_adapters() -> None:
    model = adapted()
    other = model.copy()
    assert torch.equal(run(other), run(model))
    perturb(other, seed=3)
    assert not torch.allclose(run(other), run(model))
    assert [n for n, _ in other.trained_weights()] == [n for n, _ in model.trained_weights()]


# -- saved adapters ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gpt2"])
def test_a_saved_adapter_is_loaded_exactly(family: str, tmp_path: Path) -> None:
    model = adapted(family, rank=3, rslora=True, alpha=5)
    save_adapter(model, tmp_path / "adapter")
    base = create(tiny_config(50, family=family), seed=1, dtype=torch.float64)
    loaded = adapt(base, LoraAdapterConfig(path=tmp_path / "adapter"), seed=9)
    assert torch.equal(run(loaded), run(model))
    assert [n for n, _ in loaded.trained_weights()] == [n for n, _ in model.trained_weights()]


def test_the_learner_gets_an_adapters_float32_weights(tmp_path: Path) -> None:
    model = adapted(dtype=torch.float32)
    expected = dict(model.trained_weights())
    save_adapter(model, tmp_path / "adapter")
    half = adapt(
        create(tiny_config(50), seed=1, dtype=torch.bfloat16), LoraAdapterConfig(path=tmp_path / "adapter"), seed=0
    )
    exact = half.take_float32_weights()
    assert exact and all(torch.equal(exact[name], expected[name]) for name in exact)
    assert all(torch.equal(weight, expected[name].bfloat16()) for name, weight in half.trained_weights())


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a saved adapter."""
    require("lora")
    return save_adapter(adapted(), tmp_path_factory.mktemp("whole") / "adapter")


def edit_config(**changes: Any) -> Callable[[Path], None]:
    def edit(directory: Path) -> None:
        file = directory / "adapter_config.json"
        config = json.loads(file.read_text()) | changes
        file.write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))

    return edit


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "dora": (edit_config(use_dora=True), "sets `use_dora` to true, which Etude does not run"),
    "bias": (edit_config(bias="all"), "sets `bias`"),
    "begun otherwise": (edit_config(init_lora_weights="pissa"), "sets `init_lora_weights`"),
    "of another time": (edit_config(from_the_future=3), "sets `from_the_future` to 3"),
    "another kind": (edit_config(peft_type="IA3"), "of the kind IA3"),
    "no kind": (edit_config(peft_type=...), "cannot be read as an adapter's config"),
    "another rank": (edit_config(r=7), "should be \\[7, 64\\]"),
    "other layers": (edit_config(target_modules=["q_proj"]), "its weights have .* and this model have not"),
    "no such layers": (edit_config(target_modules=["nowhere"]), "does not fit this model"),
    "the embedding": (edit_config(target_modules=["embed_tokens"]), "adapts `model.embed_tokens.lora_embedding_A"),
    "no config": (
        lambda target: (target / "adapter_config.json").unlink(),
        "it has no adapter_config.json \\(it holds",
    ),
    "no weights": (
        lambda target: (target / "adapter_model.safetensors").unlink(),
        "adapter's weights .* cannot be read",
    ),
    "torn weights": (lambda target: (target / "adapter_model.safetensors").write_bytes(b"no"), "cannot be read"),
}


@sweep("name", BROKEN)
def test_an_unsupported_or_broken_adapter_is_refused(name: str, adapter: Path, tmp_path: Path) -> None:
    (damage, message), broken = BROKEN[name], tmp_path / name
    shutil.copytree(adapter, broken)
    damage(broken)
    with pytest.raises(ConfigError, match=message):
        adapt(create(tiny_config(50), seed=1, dtype=torch.float64), LoraAdapterConfig(path=broken), seed=0)


@pytest.mark.parametrize(
    ("name", "adapted", "left_out"),
    [
        ("qwen3_5_text", {"in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj", "q_proj"}, set()),
        ("nemotron_h", {"in_proj", "q_proj"}, {"out_proj"}),
        ("deepseek_v3", {"kv_b_proj", "o_proj"}, {"gate_proj", "up_proj", "down_proj"}),
    ],
)
def test_by_default_adapters_are_of_all_linear_layers_that_peft_can_adapt(
    name: str, adapted: set[str], left_out: set[str]
) -> None:
    model = adapt(family_model(name), LoraAdapterConfig(rank=2), seed=0)
    assert set(model.adapter_modules) >= adapted
    assert not set(model.adapter_modules) & left_out
    pack = pack_of(((-1, 5), (0, 3)), vocabulary=64)
    model.hidden(pack.ids, pack.positions, PackedAttention(pack)).square().sum().backward()
    assert all(weight.grad is not None for _, weight in model.trained_weights())


def test_new_adapters_that_do_not_fit_are_reported_by_their_option() -> None:
    with pytest.raises(ConfigError, match=r"^The new adapters do not fit this model: .*out_proj"):
        adapt(family_model("nemotron_h"), LoraAdapterConfig(rank=2, targets=("out_proj",)), seed=0)
    targets = ("gate_proj", "up_proj", "down_proj")
    with pytest.raises(ConfigError, match=r"A part in `lora.targets` adapts `.*experts"):
        adapt(family_model("deepseek_v3"), LoraAdapterConfig(rank=2, targets=targets), seed=0)


@pytest.mark.parametrize(
    ("targets", "text", "tower"),
    [((), 21, 0), (("q_proj",), 3, 0), (("vision_tower.*.q_proj",), 0, 3), (("layers.0.*.up_proj", "fc1"), 1, 3)],
)
def test_a_target_means_layers_of_the_text_part_if_it_has_some(targets: tuple[str, ...], text: int, tower: int) -> None:
    model = adapt(create(vlm_config("gemma3"), seed=1), LoraAdapterConfig(rank=4, targets=targets), seed=0)
    names = [name for name, _ in model.trained_weights() if ".lora_A." in name]
    assert len(names) == text + tower and sum(".vision_tower." in name for name in names) == tower
