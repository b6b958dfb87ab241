"""Real servers for tests: one of each kind is shared by all tests of a process that use it (tests/conftest.py).

The served model has an untied head: a vLLM server on a CPU that was joined by its URL does not update a tied one. Tests
name the group of their server, so that tests of one kind run in one process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from etude.chat import Tokenizer
from etude.models import create, save, tiny_config
from etude.rollout import ServerConfig, ServerPool, SglangConfig, VllmConfig
from etude.rollout.held_adapters import AdapterSpec
from etude.rollout.launch import start_servers
from etude.rollout.vllm_weights import install_plugin
from tests.components import require_environment
from tests.rollout import sglang_on_cpu
from tests.worlds import make_tokenizer

CONTEXT = 128
SIZES: dict[str, Any] = {"layers": 2, "hidden": 64, "heads": 2, "kv_heads": 1, "context": CONTEXT, "tied": False}
OPTIONS: dict[str, Any] = {"kv_gib": 0.05, "max_num_seqs": 32}
AT_START = {"TORCH_COMPILE_DISABLE": "1"}
"""Nothing is compiled for the few tokens of a test."""


def on(kind: str) -> list[pytest.MarkDecorator]:
    """Return the mark of a test that uses a server of this kind. The test may be the one that waits for its start."""
    return [pytest.mark.xdist_group(kind), pytest.mark.timeout(900)]


def make_served_model(directory: Path, seed: int) -> Path:
    """Create a random model whose next token depends strongly on its context, with a tokenizer of characters."""
    model = create(tiny_config(make_tokenizer(directory, byte_level=True), **SIZES), seed=seed, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4)
    save(model, directory)
    (directory / "generation_config.json").write_text('{"eos_token_id": 1}')
    return directory


def options_of(kind: str, directory: Path) -> dict[str, Any]:
    """Return the options of a server of this kind on a CPU."""
    made = require_environment(kind)
    if kind == "vllm":
        return OPTIONS | {"python": made.python}
    return OPTIONS | {"python": sglang_on_cpu.python(made, directory)}


@contextmanager
def started(
    kind: str, model: Path, directory: Path, *, with_plugin: bool = False, adapters: AdapterSpec | None = None
) -> Iterator[ServerPool]:
    """Start a server of this kind. with_plugin: it can receive weights. adapters: it holds such adapters."""
    options = options_of(kind, directory) | ({} if adapters is None else {"adapters": "only"})
    config: ServerConfig = VllmConfig(**options) if kind == "vllm" else SglangConfig(**options)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in AT_START.items():
            patch.setenv(name, value)
        more: dict[str, Any] = {
            "plugin_path": install_plugin(directory) if with_plugin else None,
            "adapters": adapters,
        }
        tokenizer = Tokenizer.load(model)
        engine = start_servers(config, model, tokenizer, dtype="float32", device="cpu", logs=directory / "logs", **more)
    with engine:
        yield engine


def joined(engine: ServerPool, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the options by which a run joins the server. The server's key is in the environment."""
    patch.setenv("THEIR_KEY", engine.servers[0].address.key)
    return {"rollout.url": engine.servers[0].url, "rollout.api_key_env": "THEIR_KEY"}


def bring(engine: ServerPool, model: Path, version: int) -> None:
    """Load the weights of a directory into the server."""
    asyncio.run(engine.load(model, version))
