"""Tiny random vision-language models of all families, each in a directory as a hub has it, and pictures for them.

`make_vlm` writes a family's directory once a process and returns it: config, weights, tokenizer, chat template and
image processor. Treat it as read-only. Every tower has three layers, as the text part has: code that takes layers by
their count alone finds the wrong ones. Weights are large enough that each of them matters.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import torch
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedConfig, PreTrainedTokenizerFast
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from etude.models import Model, load

QWEN: Final = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5")
TILED: Final = ("smolvlm", "idefics3")
FAMILIES: Final = (*QWEN, *TILED, "gemma3", "gemma4", "gemma4_large")
"""The model types that `make_vlm` knows; `gemma4_large` is Gemma 4 in the form of its large models."""

QWEN_TEMPLATE = """
{%- macro shown(content) %}
    {%- if content is string %}{{- content }}
    {%- else %}
        {%- for item in content %}
            {%- if item.type == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
            {%- elif 'text' in item %}{{- item.text }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
{%- endmacro %}
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n' }}
    {%- for tool in tools %}{{- tool | tojson }}{%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + shown(message.content) + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + shown(message.content) }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
""".strip()
SMOL_TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for line in message['content'] %}"
    "{% if line['type'] == 'text' %}{{ line['text'] }}{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}"
    "{% endfor %}{% endif %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
GEMMA_TEMPLATE = """
{{- bos_token }}
{%- for message in messages -%}
    {{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\\n' }}
    {%- if message['content'] is string -%}{{ message['content'] | trim }}
    {%- else -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'image' -%}{{ '<start_of_image>' }}
            {%- elif item['type'] == 'text' -%}{{ item['text'] | trim }}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}
""".strip()

GEMMA4_TEMPLATE = """
{{- bos_token }}
{%- for message in messages -%}
    {{ '<|turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\\n' }}
    {%- if message['content'] is string -%}{{ message['content'] | trim }}
    {%- else -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'image' -%}{{ '<|image|>' }}
            {%- elif item['type'] == 'text' -%}{{ item['text'] | trim }}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
    {{ '<turn|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|turn>model\\n' }}{%- endif -%}
""".strip()

CORPUS = (
    "How many red squares are there? There are three circles and two squares.\n\n\nuser\nassistant\nsystem model\n",
    "zoom crop look at the picture again, then count: one two three four five six\n\n",
)
VOCABULARY = 400
QWEN_WORDS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
)
TILED_WORDS = (
    *("<|im_start|>", "<end_of_utterance>", "<fake_token_around_image>", "<image>", "<global-img>", "<video>"),
    *(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)),
)
GEMMA_WORDS = (
    *("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"),
    *("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
)
GEMMA4_WORDS = (
    "<pad>",
    "<eos>",
    "<bos>",
    "<|turn>",
    "<turn|>",
    "<|image>",
    "<image|>",
    "<|image|>",
    "<|video|>",
    "<|audio|>",
)
NO_ENDS: dict[str, Any] = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
TEXT: dict[str, Any] = {
    "num_hidden_layers": 3,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
ENCODER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 4,
}
"""The tower of the families that have a plain encoder."""


def picture(seed: int, width: int, height: int) -> Image.Image:
    """Return a picture of noise. The same seed and size give the same pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def make_vlm(family: str) -> Path:
    """Write the tiny model of a family, if this process has not yet, and return its directory."""
    return _make_vlm(family, os.getpid())


@cache
def _make_vlm(family: str, process: int) -> Path:
    """Write the model of a family for this process: one that is forked does not share its parent's directories."""
    where = Path(_directories(process).name, family)
    write_vlm(family, where)
    return where


@cache
def _directories(process: int) -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix=f"etude-vlms-{process}-")


def write_vlm(family: str, where: Path, *, seed: int = 0) -> None:
    """Write the tiny model of a family into a directory of the caller's own."""
    where.mkdir(parents=True, exist_ok=True)
    tokenizer, template = _tokenizer(family)
    tokenizer.save_pretrained(where)
    (where / "chat_template.jinja").write_text(template, encoding="utf-8")
    _processor(family).save_pretrained(where)
    _write_weights(vlm_config(family), where, seed)


def _write_weights(config: PreTrainedConfig, where: Path, seed: int) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for weight in model.parameters():
                if weight.ndim > 1 and not weight.std():  # Gemma's projector begins as zeros, its positions as ones
                    weight.normal_(0, 0.3)
                elif weight.ndim > 1 and weight.std() < 0.1:
                    weight.mul_(4)
    model.save_pretrained(where)


def vlm_config(family: str, **text: Any) -> PreTrainedConfig:
    """Return the config of a family's tiny model; `text` changes its text part."""
    tokenizer, _ = _tokenizer(family)
    ids: dict[str, int] = tokenizer.get_vocab()
    sizes = {**TEXT, "vocab_size": len(ids) + 3, **text}
    if family in QWEN:
        return _qwen_config(family, sizes, ids)
    if family in TILED:
        config: PreTrainedConfig = AutoConfig.for_model(
            family,
            text_config={"model_type": "llama", **NO_ENDS, "head_dim": 8, **sizes},
            vision_config=ENCODER,
            image_token_id=ids["<image>"],
            scale_factor=2,
            tie_word_embeddings=True,
            pad_token_id=0,
        )
        return config
    if family == "gemma4_large":
        sizes |= {"use_bidirectional_attention": "vision", "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}
    return _gemma_config(sizes, ids) if family == "gemma3" else _gemma4_config(sizes, ids)


def _qwen_config(family: str, text: dict[str, Any], ids: dict[str, int]) -> PreTrainedConfig:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
    vision: dict[str, Any] = {"depth": 3, "num_heads": 2, "patch_size": 4}
    vision |= {"spatial_merge_size": 2, "temporal_patch_size": 2}
    if family == "qwen2_vl":
        vision |= {"embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2}
    else:
        vision |= {"hidden_size": 32, "out_hidden_size": 32, "intermediate_size": 64}
    if family == "qwen2_5_vl":
        vision |= {"window_size": 16, "fullatt_block_indexes": [2]}
    if family == "qwen3_vl":
        rope |= {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
        vision |= {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64}
        text = {"head_dim": 8, **text}
    if family == "qwen3_5":
        rope |= {"mrope_section": [2, 1, 1], "mrope_interleaved": True, "partial_rotary_factor": 1.0}
        vision |= {"num_position_embeddings": 64}
        states = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8}
        states |= {"linear_value_head_dim": 8, "full_attention_interval": 3}
        text = {"head_dim": 8, "tie_word_embeddings": True, **states, **text}
    config: PreTrainedConfig = AutoConfig.for_model(
        family,
        text_config={**NO_ENDS, "rope_parameters": rope, **text},
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
    )
    return config


def _gemma_config(text: dict[str, Any], ids: dict[str, int]) -> PreTrainedConfig:
    own = {
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "pad_token_id": ids["<pad>"],
        "bos_token_id": ids["<bos>"],
        "eos_token_id": ids["<eos>"],
    }
    config: PreTrainedConfig = AutoConfig.for_model(
        "gemma3",
        text_config={**own, **text},
        vision_config={**ENCODER, "vision_use_head": False},
        mm_tokens_per_image=16,
        image_token_id=ids["<image_soft_token>"],
        boi_token_index=ids["<start_of_image>"],
        eoi_token_index=ids["<end_of_image>"],
        tie_word_embeddings=True,
    )
    return config


def _gemma4_config(text: dict[str, Any], ids: dict[str, int]) -> PreTrainedConfig:
    own = {
        "head_dim": 8,
        "global_head_dim": 8,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": text["vocab_size"],
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "num_kv_shared_layers": 1,
        "pad_token_id": ids["<pad>"],
        "bos_token_id": ids["<bos>"],
        "eos_token_id": ids["<eos>"],
    }
    vision = {name: value for name, value in ENCODER.items() if name != "image_size"}
    config: PreTrainedConfig = AutoConfig.for_model(
        "gemma4",
        text_config={**own, **text},
        vision_config={
            **vision,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "pooling_kernel_size": 2,
            "standardize": True,
        },
        image_token_id=ids["<|image|>"],
        video_token_id=ids["<|video|>"],
        audio_token_id=ids["<|audio|>"],
        boi_token_id=ids["<|image>"],
        eoi_token_id=ids["<image|>"],
        tie_word_embeddings=True,
    )
    return config


@cache
def _tokenizer(family: str) -> tuple[PreTrainedTokenizerFast, str]:
    """Return a family's tokenizer and its chat template."""
    template, words = SMOL_TEMPLATE, TILED_WORDS
    named = {"eos_token": "<end_of_utterance>", "pad_token": "<|im_start|>"}
    extra = {
        "image_token": "<image>",
        "fake_image_token": "<fake_token_around_image>",
        "global_image_token": "<global-img>",
        "end_of_utterance_token": "<end_of_utterance>",
        "video_token": "<video>",
    }
    if family in QWEN:
        template, words = QWEN_TEMPLATE, QWEN_WORDS
        named = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
        extra = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
    elif family == "gemma3":
        template, words = GEMMA_TEMPLATE, GEMMA_WORDS
        named = {"eos_token": "<end_of_turn>", "bos_token": "<bos>", "pad_token": "<pad>"}
        extra = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
    elif family.startswith("gemma4"):
        template, words = GEMMA4_TEMPLATE, GEMMA4_WORDS
        named = {"eos_token": "<turn|>", "bos_token": "<bos>", "pad_token": "<pad>"}
        extra = {"image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>"}
        extra |= {"audio_token": "<|audio|>", "boa_token": "<|audio|>", "eoa_token": "<|audio|>"}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_train_tokenizer(words), chat_template=template, extra_special_tokens=extra, **named
    )
    return tokenizer, template


def _train_tokenizer(words: tuple[str, ...]) -> Tokenizer:
    """Return a tokenizer of bytes and frequent strings that knows these special words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in words])
    return tokenizer


def _processor(family: str) -> Any:
    """Return transformers' image processor of a family, for images of a few patches."""
    if family in QWEN:
        return Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, min_pixels=16 * 16, max_pixels=64 * 64)
    if family in TILED:
        tiles = {"smolvlm": SmolVLMImageProcessorPil, "idefics3": Idefics3ImageProcessorPil}[family]
        return tiles(size={"longest_edge": 64}, max_image_size={"longest_edge": 32}, do_image_splitting=True)
    if family.startswith("gemma4"):
        return Gemma4ImageProcessorPil(patch_size=4, pooling_kernel_size=2, max_soft_tokens=70)
    return Gemma3ImageProcessorPil(size={"height": 32, "width": 32}, image_seq_length=16)


def load_vlm(directory: Path, dtype: torch.dtype = torch.float32) -> Model:
    """Load a model with its tower."""
    return load(directory, dtype=dtype, head="seeing")


def write_served_vlm(family: str, where: Path, *, patch: int = 4) -> None:
    """Write a model of Qwen's families that is wide enough for a server's kernels into a directory of the caller's.

    patch: the side of its patches. SGLang takes those of 14 pixels alone for Qwen2.5-VL.
    """
    write_vlm(family, where)
    square = 2 * patch
    processor = Qwen2VLImageProcessorPil(
        patch_size=patch, merge_size=2, min_pixels=4 * square**2, max_pixels=64 * square**2
    )
    processor.save_pretrained(where)
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
    text: dict[str, Any] = {"hidden_size": 128, "rope_parameters": rope}
    if family == "qwen3_vl":
        text |= {"head_dim": 32, "rope_parameters": rope | {"mrope_interleaved": True}}
    config: Any = vlm_config(family, **text)
    config.vision_config.patch_size = patch
    if family == "qwen2_5_vl":
        config.vision_config.window_size = 4 * patch
    config.vision_config.hidden_size = 128 if family == "qwen2_vl" else 64
    if family == "qwen2_vl":
        config.vision_config.embed_dim = 64
    else:
        config.vision_config.out_hidden_size = 128
    _write_weights(config, where, 0)
