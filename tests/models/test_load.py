"""Loading models: weights are exact, and each refusal is a sentence that names the cause."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoConfig, AutoModelForCausalLM

from etude.errors import ConfigError, UnknownChoiceError
from etude.models import create, load, read_context_length, save, tiny_config
from tests.families import config_of, family_model


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    save(create(tiny_config(50, tied=False), seed=0), tmp_path)
    return tmp_path


def test_saved_weights_are_loaded_exactly(directory: Path) -> None:
    model, loaded_model = create(tiny_config(50, tied=False), seed=0), load(directory, dtype=torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(directory).state_dict()
    for (name, weight), (same, loaded) in zip(model.named_weights(), loaded_model.named_weights(), strict=True):
        assert name == same and torch.equal(weight, loaded) and torch.equal(weight, theirs[name])


def test_a_seed_gives_the_same_model_in_any_dtype_and_keeps_torchs_random_state() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one, same, other = (create(tiny_config(50), seed=seed) for seed in (1, 1, 2))
    half = create(tiny_config(50), seed=1, dtype=torch.bfloat16)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one.head_weight, same.head_weight) and not torch.equal(one.head_weight, other.head_weight)
    assert torch.equal(half.head_weight, one.head_weight.bfloat16())


def test_a_loaded_model_has_the_requested_dtype_and_keeps_its_rotary_frequencies(directory: Path) -> None:
    model = load(directory, dtype=torch.bfloat16)
    assert {weight.dtype for _, weight in model.named_weights()} == {torch.bfloat16}
    assert {b.dtype for name, b in model.module.named_buffers() if "inv_freq" in name} == {torch.float32}


def test_a_model_to_be_trained_returns_the_float32_weights_that_rounding_changed(directory: Path) -> None:
    whole = dict(load(directory, dtype=torch.float32).named_weights())
    model = load(directory, dtype=torch.bfloat16, keep_float32=True)
    taken = model.take_float32_weights()
    for name, weight in model.named_weights():
        assert torch.equal(weight, whole[name].bfloat16())
        rounded = not torch.equal(weight.float(), whole[name])
        assert rounded == (name in taken) and (not rounded or torch.equal(taken[name], whole[name]))
    assert 0 < len(taken) < len(whole)  # norms begin as ones
    assert not model.take_float32_weights()
    for dtype, exact in ((torch.bfloat16, False), (torch.float32, True), (torch.float64, True)):
        assert not load(directory, dtype=dtype, keep_float32=exact).take_float32_weights()
    save(model, directory)
    assert not load(directory, dtype=torch.bfloat16, keep_float32=True).take_float32_weights()


@pytest.mark.parametrize("name", ["qwen3_5_text", "gpt_oss"])
def test_weights_that_enter_an_exponential_keep_their_values_in_half_precision(name: str, tmp_path: Path) -> None:
    whole = family_model(name)
    save(whole, tmp_path)
    weights = dict(whole.named_weights())
    kept = {name for name in weights if name.endswith(("A_log", "dt_bias", "sinks"))}
    halves = [load(tmp_path, dtype=torch.bfloat16, keep_float32=exact) for exact in (False, True)]
    assert not kept & halves[1].take_float32_weights().keys()
    for half in (*halves, whole.copy(dtype=torch.bfloat16), create(config_of(name), seed=0, dtype=torch.bfloat16)):
        dtypes = {name: weight.dtype for name, weight in half.named_weights()}
        assert dtypes == {name: torch.float32 if name in kept else torch.bfloat16 for name in weights}
    for half in halves:
        assert all(torch.equal(weight, weights[name]) for name, weight in half.named_weights() if name in kept)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {weight.dtype for weight in plain.parameters()} == {torch.bfloat16}, "transformers itself is as before"


@pytest.mark.parametrize(
    ("family", "sentence"),
    [
        ("bloom", "this bloom model has no `max_position_embeddings`"),
        ("blt", "this blt model has no `num_hidden_layers`"),
        ("musicgen", "This musicgen model has several text models"),
    ],
)
def test_a_config_without_the_sizes_of_a_language_model_is_reported(family: str, sentence: str, tmp_path: Path) -> None:
    AutoConfig.for_model(family).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=sentence):
        read_context_length(tmp_path)


def test_a_missing_directory_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"There is no model directory .*nowhere"):
        load(tmp_path / "nowhere", dtype=torch.float32)


def test_a_directory_without_a_config_is_reported(tmp_path: Path) -> None:
    (tmp_path / "weights.txt").write_text("?")
    with pytest.raises(ConfigError, match=r"has no config\.json\. It holds weights\.txt"):
        load(tmp_path, dtype=torch.float32)


@pytest.mark.parametrize("text", ["{", '{"model_type": "no-such-model"}', "{}"])
def test_an_unusable_config_is_reported(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"The config\.json in .* cannot be used"):
        load(tmp_path, dtype=torch.float32)


def test_a_model_with_its_own_code_is_refused_without_useless_advice(directory: Path) -> None:
    file = directory / "config.json"
    custom = {"model_type": "mine", "auto_map": {"AutoConfig": "configuration_mine.Mine"}}
    file.write_text(json.dumps(json.loads(file.read_text()) | custom))
    with pytest.raises(ConfigError, match="runs no code of a model") as caught:
        load(directory, dtype=torch.float32)
    assert "trust_remote_code" not in str(caught.value)


def test_absent_weight_files_are_reported(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load(directory, dtype=torch.float32)


def test_broken_weight_files_are_reported(directory: Path) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load(directory, dtype=torch.float32)


class Planted:
    """An object that creates a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self._mark,)


@pytest.mark.parametrize("pickled", [True, False])
def test_a_pickled_model_is_refused_and_not_run(directory: Path, tmp_path: Path, pickled: bool) -> None:
    (directory / "model.safetensors").unlink()
    mark = tmp_path / "ran"
    content = pickle.dumps(Planted(mark)) if pickled else b"garbage"
    (directory / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(ConfigError, match=r"are pickled \(pytorch_model\.bin\).*reads only safetensors"):
        load(directory, dtype=torch.float32)
    assert not mark.exists()


def test_missing_weights_are_named(directory: Path) -> None:
    weights = load_file(directory / "model.safetensors")
    del weights["model.layers.1.self_attn.k_proj.weight"]
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lacks 1 of its weights, model\.layers\.1\.self_attn\.k_proj\.weight"):
        load(directory, dtype=torch.float32)


def test_weights_of_another_shape_are_named(directory: Path) -> None:
    weights = load_file(directory / "model.safetensors")
    weights["model.norm.weight"] = torch.ones(7)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"model\.norm\.weight: \[7\] instead of \[64\]"):
        load(directory, dtype=torch.float32)


def test_a_tokenizer_with_more_tokens_than_the_embedding_is_refused(directory: Path) -> None:
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(50)}, unk_token="w0"))
    words.save(str(directory / "tokenizer.json"))
    assert load(directory, dtype=torch.float32).vocab_size == 50
    words.add_special_tokens(["<extra>"])
    words.save(str(directory / "tokenizer.json"))
    with pytest.raises(ConfigError, match=r"has the token id 50, but the model embeds 50 tokens \(0 to 49\)"):
        load(directory, dtype=torch.float32)


SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 32,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
HEADLESS = ("mamba", "rwkv")
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "mamba": ({"state_size": 4}, "mamba model has no layer that attends"),
    "mamba2": ({"num_heads": 4, "n_groups": 1, "expand": 2, "state_size": 8}, "mamba2 model has no layer that attends"),
    "rwkv": ({"attention_hidden_size": 32}, "Layer 0 "),
    "recurrent_gemma": ({"lru_width": 32, "block_types": ["recurrent", "attention"]}, "Layer 0 "),
    "jamba": ({"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4, **EXPERTS}, "Layer 0 "),
    "bloom": ({}, "bloom model has no layer that attends"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_layers_with_unknown_operations_are_refused_by_name(kind: str) -> None:
    extra_sizes, message = REFUSED[kind]
    sizes = {name: size for name, size in SIZES.items() if "head" not in name or kind not in HEADLESS}
    config = AutoConfig.for_model(kind, **{**sizes, **extra_sizes})
    with pytest.raises(ConfigError, match=message):
        create(config, seed=0)


def test_an_unknown_kind_of_layer_on_disk_is_refused_before_the_weights_are_read(tmp_path: Path) -> None:
    config = AutoConfig.for_model("llama4_text", **{**SIZES, **EXPERTS, "attention_chunk_size": 8})
    config.save_pretrained(tmp_path)  # no weights at all
    with pytest.raises(ConfigError, match=r"Layer 0 of this llama4_text model is `chunked_attention`"):
        load(tmp_path, dtype=torch.float32)


def test_kinds_of_layers_that_a_short_test_cannot_see_are_refused_with_the_reason() -> None:
    config = AutoConfig.for_model("llama4_text", **{**SIZES, **EXPERTS, "attention_chunk_size": 8})
    with pytest.raises(ConfigError, match=r"`chunked_attention`, whose result depends on the place .* in its pass"):
        create(config, seed=0)


@pytest.mark.parametrize(
    ("kind", "sizes", "message"),
    [
        ("vit", {}, r"transformers [\d.]+ cannot create this vit model: Unrecognized configuration class"),
    ],
)
def test_what_transformers_raises_about_a_config_is_a_sentence(kind: str, sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        create(AutoConfig.for_model(kind, **sizes), seed=0)


def test_a_config_that_its_class_cannot_use_is_a_sentence(directory: Path) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"hidden_act": "square_root"}))
    with pytest.raises(ConfigError, match="cannot be loaded: 'square_root'"):
        load(directory, dtype=torch.float32)


def test_positions_that_depend_on_the_batch_are_refused() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
    with pytest.raises(ConfigError, match="`dynamic` rotary positions"):
        create(tiny_config(50, rope_parameters=rope), seed=0)


def test_an_unknown_family_lists_those_that_exist() -> None:
    with pytest.raises(UnknownChoiceError, match="no tiny model of the family 'gpt5'; there are llama"):
        tiny_config(50, family="gpt5")


def test_a_saved_directory_is_like_one_that_transformers_writes(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    assert config["model_type"] == "qwen3" and "_attn_implementation" not in config
