"""Small tokenizers made by the tests, in the Hugging Face layout, and the published templates to test them with."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.metadata import files
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = (
    "What is 2 + 2? The answer is 4. Let me think about it for a while, and then answer.",
    'The weather in Paris is sunny, 21 °C. {"name": "weather", "arguments": {"city": "Paris"}}\n\n',
    "Grüße aus München! 你好,世界。 Привет, мир. 🎉🎈 user assistant system tool function",
)
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SPECIAL = re.compile(
    r"<\|[^|<>\s'\"]{1,30}\|?>|<[a-z_]{2,20}\|>|<｜[^｜]{1,30}｜>|</?think>|</?tool_call>|</?tool_response>|</s>|"
    r"<end_of_\w+>|<start_of_\w+>|\[/?INST\]|\[gMASK\]|<sop>"
)
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
NOT_SPECIAL = re.compile(r"</?(think|tool_call|tool_response)>")
ENDS = {
    "glm4moe": ("<|user|>", "<|observation|>", "<|endoftext|>"),
    "gptoss": ("<|return|>", "<|call|>"),
    "gemma4": ("<turn|>", "<|tool_response>"),
    "diffusion_gemma": ("<turn|>", "<|tool_response>"),
    "gemma": ("<end_of_turn>", "<eos>"),
    "deepseek": ("<｜end▁of▁sentence｜>",),
    "cohere": ("<|END_OF_TURN_TOKEN|>",),
    "llama3": ("<|eot_id|>", "<|eom_id|>"),
    "phi3": ("<|end|>", "<|endoftext|>"),
    "idefics3": ("<end_of_utterance>",),
    "smolvlm": ("<end_of_utterance>",),
    "llava_next": ("</s>",),
    "muse_glimmer": ("<|eot|>",),
}
"""The end of an answer in each family; the others use that of ChatML."""
CHATML_ENDS = ("<|im_end|>", "<|endoftext|>")


@cache
def published() -> dict[str, str]:
    """Return the published templates in TRL's package. They are read as files; no code of TRL runs."""
    paths = [path for path in files("trl") or [] if path.parent.name == "chat_templates" and path.suffix == ".jinja"]
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(paths)}


def ends_of(name: str) -> tuple[str, ...]:
    """Return the tokens that end an answer in the template of this name."""
    longest = sorted(ENDS, key=len, reverse=True)
    return next((ENDS[family] for family in longest if name.startswith(family)), CHATML_ENDS)


def save(directory: Path, inner: Tokenizer, template: str | None, ends: Sequence[str], **config: Any) -> Path:
    """Write a tokenizer as models are published with it."""
    directory.mkdir(parents=True, exist_ok=True)
    inner.save(str(directory / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": ends[0], **config}
    (directory / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in named.items() if v is not None}))
    if len(ends) > 1:
        ids = [inner.token_to_id(end) for end in ends]
        (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    if template is not None:
        (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    return directory


@cache
def _trained(corpus: tuple[str, ...], size: int) -> str:
    inner = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(WORDS), "isolated")
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(
        corpus, trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    )
    return inner.to_str()


def byte_level(
    template: str | None = None,
    more: Sequence[str] = (),
    rstrip: Sequence[str] = (),
    *,
    corpus: tuple[str, ...] = CORPUS,
    size: int = 500,
) -> Tokenizer:
    """Return a byte-level BPE like Qwen's, with the special tokens that a template names; some swallow the space
    after."""
    inner = Tokenizer.from_str(_trained(corpus, size))
    names = dict.fromkeys(("<s>", "<|im_start|>", "<|im_end|>", *more, *SPECIAL.findall(template or "")))
    inner.add_tokens(
        [
            AddedToken(name, special=not NOT_SPECIAL.fullmatch(name), normalized=False, rstrip=name in rstrip)
            for name in names
        ]
    )
    return inner


def sentencepiece() -> Tokenizer:
    """Return a BPE with byte fallback whose pieces begin with a ▁, like Llama 2's."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *"abcdehilnorstuwé",
        "▁t",
        "▁th",
    ]
    inner = Tokenizer(
        models.BPE(
            vocab={piece: id for id, piece in enumerate(pieces)},
            merges=[("▁", "t"), ("▁t", "h")],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    inner.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in ("<unk>", "<s>", "</s>")])
    return beginning(inner)


def beginning(inner: Tokenizer) -> Tokenizer:
    """Return the same with `<s>` before every text."""
    begins = [("<s>", inner.token_to_id("<s>"))]
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=begins)
    return inner


COMMON = ("qwen3", "qwen2_5", "llama3_1", "glm4moe", "gptoss", "deepseekv3", "gemma4_v5", "idefics3")
"""Published templates that cover the differences: the quick tests use these."""


def common_first(names: Iterable[str]) -> list[Any]:
    """Return names of templates as parameters of a test, which is slow for all but the common ones."""
    return [name if name in COMMON else pytest.param(name, marks=pytest.mark.slow) for name in names]
