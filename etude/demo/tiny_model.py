"""A tiny model with random weights: it runs any data, reward, environment or agent within seconds, and learns nothing.

Its tokens are bytes, so it reads every text, and its chat template is that of Qwen with tool calls.
"""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from etude.models import create, save, tiny_config

PAD = "<|pad|>"
START = "<|im_start|>"
END = "<|im_end|>"
TEMPLATE = (
    "{%- if tools %}<|im_start|>system\nFunctions:\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    '<tool_call>\n{"name": "…", "arguments": {…}}\n</tool_call> calls one.<|im_end|>\n{% endif -%}'
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{%- for call in m.tool_calls or [] %}\n<tool_call>\n"
    '{{ \'{\' }}"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}{{ \'}\' }}'
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endfor -%}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif -%}"
)
CONTEXT = 8192
"""The most bytes of a conversation."""


def make_tiny_model(directory: Path | str, seed: int = 0) -> Path:
    """Write the model and its tokenizer as a Hugging Face directory, and return it."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    size = _write_tokenizer(directory)
    config = tiny_config(size, layers=1, hidden=32, heads=2, kv_heads=1, context=CONTEXT)
    save(create(config, seed=seed, dtype=torch.float32), directory)
    return directory


def _write_tokenizer(directory: Path) -> int:
    """Write a tokenizer with a token for each byte, and a few special ones; return its size."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = [PAD, START, END]
    tokenizer = tokenizers.Tokenizer(models.BPE({letter: place for place, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in ("<tool_call>", "</tool_call>")])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"pad_token": PAD, "eos_token": END, "tokenizer_class": "PreTrainedTokenizerFast"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return tokenizer.get_vocab_size()
