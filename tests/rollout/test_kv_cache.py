"""The kernels on which the cache relies: with the right shapes they compute a row the same in every batch."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear

from etude.errors import ConfigError
from etude.models.gpu_memory import planned_gpu
from etude.rollout.attention_groups import KEY_CHUNK
from etude.rollout.batch_invariance import MIN_KEYS, USUAL_SHAPES, ProductShapes, find_shapes_of_layers
from etude.rollout.config import TorchEngineConfig
from etude.rollout.kv_cache import KVCache, block_bytes, count_blocks, kv_gib
from tests.families import family_model
from tests.rollout.engines import model_of

DTYPES = [torch.float32, torch.bfloat16]


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def shapes_of(dtype: torch.dtype, shape: tuple[int, int], width: int) -> ProductShapes:
    """Return the shapes of an engine. In bfloat16 every size is right, and these are some."""
    return find_shapes_of_layers([shape], [width]) if dtype == torch.float32 else USUAL_SHAPES


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), [(96, 64), (300, 192), (512, 1536), (128, 4864), (9, 64), (64, 3)])
def test_a_linear_layer_computes_each_row_independently(dtype: torch.dtype, outputs: int, inputs: int) -> None:
    shapes = shapes_of(dtype, (outputs, inputs), 16)
    size = shapes.rows.multiple
    weight, rows = random(outputs, inputs, dtype=dtype), random(40 * size, inputs, dtype=dtype, seed=1)
    alone = linear(rows[:size], weight)
    for count in (1,) if shapes.rows.fixed else (1, 2, 3, 5, 8, 40):
        assert torch.equal(linear(rows[: count * size], weight)[:size], alone) or not shapes.batch_invariant
        assert (
            torch.equal(linear(rows[: count * size].flip(0), weight).flip(0)[:size], alone)
            or not shapes.batch_invariant
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [16, 64, 128, 256])
def test_products_over_keys_do_not_depend_on_padding_or_batch(dtype: torch.dtype, width: int) -> None:
    shapes = shapes_of(dtype, (16, 16), width)
    padding, fewest = shapes.attention, shapes.attention.pad_tokens(1, 1)
    keys, values = (random(24, 640, width, dtype=dtype, seed=seed) for seed in (1, 2))
    queries = random(24, 128, width, dtype=dtype, seed=3)
    for seen in (MIN_KEYS, 100, KEY_CHUNK + 1, 300):
        weights = torch.zeros(24, 128, 640, dtype=dtype)
        weights[:, :, :seen] = torch.rand(24, 128, seen, generator=torch.Generator().manual_seed(4)).to(dtype)
        products = []
        for entries, tokens, longer in ((2, 1, 0), (24, 8, 40), (3, 128, 340)):
            rows, length = (
                padding.pad_tokens(min(tokens, padding.chunk_tokens(1)), 1),
                padding.padded_blocks(min(seen + longer, 640), 1),
            )
            scores = padding.scores(queries[:entries, :rows], keys[:entries, :length])
            total = torch.zeros(entries, rows, width, dtype=dtype)
            total = padding.weighted_sums(weights[:entries, :rows, :length], values[:entries, :length], total)
            products.append((scores[:2, :fewest, :seen], total[:2, :fewest]))
        for scores, total in products[1:]:
            same = torch.equal(scores, products[0][0]) and torch.equal(total, products[0][1])
            assert same or not shapes.batch_invariant


def test_the_cache_takes_the_memory_it_reports() -> None:
    model = model_of(layers=3)
    cache = KVCache(model, model.heads, blocks=10, size=8)
    assert cache.memory.numel() * cache.memory.itemsize == 10 * block_bytes(model, 8)
    assert cache.block_bytes * model.num_layers == block_bytes(model, 8)


def test_without_an_option_a_gpu_gives_an_eighth_of_its_memory() -> None:
    config = TorchEngineConfig()
    with planned_gpu(80 * 2**30):
        assert kv_gib(torch.device("cuda"), config) == 10
        assert kv_gib(torch.device("cuda"), config.model_copy(update={"kv_gib": 3.0})) == 3
        assert kv_gib(torch.device("cpu"), config) == 1


def test_an_engine_without_memory_for_its_states_is_refused_with_their_size() -> None:
    model = family_model("qwen3_5_text")
    config = TorchEngineConfig(kv_gib=0.001, max_num_seqs=1000)
    with pytest.raises(ConfigError, match=r"does not hold the states of max_num_seqs=1000 requests: .* MiB each"):
        count_blocks(model, config)
