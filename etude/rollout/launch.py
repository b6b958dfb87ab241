"""From the options of server engines to running servers: Python, command line and devices."""

from __future__ import annotations

import secrets
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.console import Console

from etude.config.env import read_api_key
from etude.errors import ConfigError
from etude.images import read_image_layout
from etude.images.pixel_cache import PixelCache
from etude.images.pixels import PixelReader
from etude.rollout.config import ServerConfig
from etude.rollout.held_adapters import AdapterSpec
from etude.rollout.python_environments import ensure_environment, load_pins
from etude.rollout.replica import Replica
from etude.rollout.reported_sets import LOGPROBS_ALONE, Recording
from etude.rollout.served_images import ImageOptions, ImageSupport
from etude.rollout.server_backend import LaunchSpec, ServerBackend
from etude.rollout.server_engine import ModelShape, ServerEngine
from etude.rollout.server_pool import ServerPool

if TYPE_CHECKING:
    from etude.chat import Tokenizer

Dtype = Literal["float32", "bfloat16", "float16"]
Device = Literal["cpu", "cuda"]
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def start_servers(
    config: ServerConfig,
    model: Path,
    tokenizer: Tokenizer | None,
    *,
    dtype: Dtype,
    device: Device,
    logs: Path,
    threads: int = 1,
    enable_sleep: bool = False,
    plugin_path: Path | None = None,
    adapters: AdapterSpec | None = None,
    recording: Recording = LOGPROBS_ALONE,
    images: ImageOptions | None = None,
    console: Console | None = None,
) -> ServerPool:
    """Start or join the servers that the options name, and return them ready.

    They begin with the weights in the directory `model`, as version 0. logs: the directory of their logs. threads: the
    threads of a server on a CPU. enable_sleep: true if servers must be able to give their memory up, and get all
    weights again before they go on. plugin_path, adapters: see `LaunchSpec`. recording: what they report of each token.
    images: those that they take, of a vision-language model. console: shows the progress of the start.
    """
    shape = ModelShape.read(model)
    backend = config.create_backend(0 if adapters is None else adapters.held, recording)
    backend.discards_weights = enable_sleep and adapters is None and not config.url
    if tokenizer is not None and tokenizer.grammars.is_read_directly():
        backend.grammar_end_ids = backend.find_grammar_end_ids(tokenizer, model)
    _support_images(backend, config, model, dtype, images or ImageOptions())
    joined_key = read_api_key(config.api_key_env, "the servers in `rollout.url`")
    targets: list[tuple[str, LaunchSpec | None, str]] = [(url, None, joined_key) for url in config.url]
    if not config.url:
        python = find_python(config, device, console)
        if enable_sleep and device == "cuda":
            backend.check_sleep(python)
        common = LaunchSpec(
            config,
            model.resolve(),
            python,
            dtype,
            device,
            threads=threads,
            enable_sleep=enable_sleep,
            plugin_path=plugin_path,
            adapters=adapters,
        )
        targets = [("http://127.0.0.1", launch, launch.key) for launch in launch_specs(common, shape)]

    def replicas() -> list[Replica]:
        return [
            Replica(
                ServerEngine(url, backend, shape, tokenizer=tokenizer, ranks=config.tensor_parallel, key=key),
                launch,
                logs / f"{backend.name}-{index}.log",
                max_restarts=config.restarts,
                start_timeout=config.start_timeout,
            )
            for index, (url, launch, key) in enumerate(targets)
        ]

    name = f"{len(targets)} {backend.package} server{'s' if len(targets) > 1 else ''}"
    return ServerPool(
        replicas, name=name, max_num_seqs=config.max_num_seqs, max_waiting=config.max_waiting, console=console
    )


def _support_images(
    backend: ServerBackend, config: ServerConfig, model: Path, dtype: Dtype, options: ImageOptions
) -> None:
    """Let a backend send images, if the model takes some; else it has the sentence that refuses them."""
    try:
        layout = read_image_layout(model, options.max_pixels, tower=options.tower)
    except ConfigError as error:  # another family, which may still be trained on text
        backend.refusal = str(error)
        return
    if layout is None:
        return
    refusal = backend.image_refusal(layout)
    if refusal:
        backend.refusal = refusal
    else:
        pixels = PixelCache(PixelReader.load(model, options.max_pixels))
        backend.images = ImageSupport(pixels, dtype, options, is_joined=bool(config.url))


def launch_specs(common: LaunchSpec, shape: ModelShape) -> list[LaunchSpec]:
    """Return the launch of each replica, with its GPUs and its key."""
    config = common.config
    count = config.tensor_parallel // config.nodes
    kv_tokens = None if config.kv_gib is None else shape.tokens_in(config.kv_gib, DTYPE_BYTES[common.dtype])
    return [
        replace(
            common,
            devices=config.devices[index * count : (index + 1) * count],
            kv_tokens=kv_tokens,
            key=secrets.token_hex(32),
        )
        for index in range(config.replicas)
    ]


def find_python(config: ServerConfig, device: Device, console: Console | None = None) -> Path:
    """Return the Python with the server's packages: `rollout.python`, or that of an environment that is built if
    missing."""
    if config.python is not None:
        python = config.python.expanduser().absolute()
        if not python.is_file():
            raise ConfigError(f"`rollout.python={config.python}` is not a file. Name the Python of an environment.")
        return python
    if device not in config.environment_names:
        raise ConfigError(
            f"There is no {config.create_backend().package} environment for {device}. Name the Python of your own "
            f"environment with `rollout.python=…`, or choose `rollout=vllm`."
        )
    return ensure_environment(load_pins(config.environment_names[device]), console=console).python
