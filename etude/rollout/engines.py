"""From the options of server engines to the servers: which Python, which command, which devices."""

from __future__ import annotations

import secrets
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.console import Console

from etude.config.env import key_from
from etude.errors import ConfigError
from etude.rollout.config import ServerConfig
from etude.rollout.dialect import Launch
from etude.rollout.environments import environment, named
from etude.rollout.replica import Replica
from etude.rollout.served import Served
from etude.rollout.server import Server
from etude.rollout.shape import Shape

if TYPE_CHECKING:
    from etude.chat import Tokenizer

__all__ = ["launches", "python_of", "serve"]

Dtype = Literal["float32", "bfloat16", "float16"]
Device = Literal["cpu", "cuda"]
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def serve(
    config: ServerConfig,
    model: Path,
    tokenizer: Tokenizer | None,
    *,
    dtype: Dtype,
    device: Device,
    logs: Path,
    threads: int = 1,
    sleeps: bool = False,
    plugged: Path | None = None,
    adapter_rank: int = 0,
    console: Console | None = None,
) -> Served:
    """The servers that the options ask for, ready. They begin with the weights in the directory `model`, as version 0.

    logs: where each writes what it says. threads: with how many a server on a CPU computes. sleeps: whether they are to
    give their memory up when they are asked to. plugged, adapter_rank: see `Launch`. console: where it is shown that
    they start.
    """
    shape = Shape.read(model)
    dialect = config.dialect()
    asked: list[tuple[str, Launch | None]] = [(url, None) for url in config.url]
    key = key_from(config.key_from, "the servers in `rollout.url`")
    if not config.url:
        python = python_of(config, device, console)
        known = partial(launches, config, python, model, shape, dtype=dtype, device=device, threads=threads)
        started = known(sleeps=sleeps, plugged=plugged, adapter_rank=adapter_rank)
        asked = [("http://127.0.0.1", launch) for launch in started]

    def replicas() -> list[Replica]:
        return [
            Replica(
                Server(
                    url,
                    dialect,
                    shape,
                    tokenizer=tokenizer,
                    ranks=config.tensor_parallel,
                    key=key if launch is None else launch.key,
                ),
                launch,
                logs / f"{dialect.name}-{place}.log",
                restarts=config.restarts,
                patience=config.start_timeout,
            )
            for place, (url, launch) in enumerate(asked)
        ]

    name = f"{len(asked)} {dialect.package} server{'s' if len(asked) > 1 else ''}"
    return Served(replicas, name=name, most=config.max_running, line=config.line, console=console)


def launches(
    config: ServerConfig,
    python: Path,
    model: Path,
    shape: Shape,
    *,
    dtype: Dtype,
    device: Device,
    threads: int = 1,
    sleeps: bool = False,
    plugged: Path | None = None,
    adapter_rank: int = 0,
) -> list[Launch]:
    """How each replica is started."""
    width = config.tensor_parallel // config.nodes
    return [
        Launch(
            model=model.resolve(),
            python=python,
            port=0,
            dtype=dtype,
            device=device,
            devices=config.devices[place * width : (place + 1) * width],
            max_running=config.max_running,
            tensor_parallel=config.tensor_parallel,
            nodes=config.nodes,
            meet=config.meet,
            memory=config.memory,
            kv_gib=config.kv_gib,
            kv_tokens=None if config.kv_gib is None else shape.tokens_in(config.kv_gib, BYTES[dtype]),
            sleeps=sleeps,
            threads=threads,
            arguments=config.arguments,
            plugged=plugged,
            adapter_rank=adapter_rank,
            key=secrets.token_hex(32),
        )
        for place in range(config.replicas)
    ]


def python_of(config: ServerConfig, device: Device, console: Console | None = None) -> Path:
    """The Python that has the server's packages: one's own, or that of an environment, made if it is not there."""
    if config.python is not None:
        found = config.python.expanduser().absolute()
        if not found.is_file():
            raise ConfigError(f"`rollout.python={config.python}` is no file. Name the Python of an environment.")
        return found
    if device not in config.environment_of:
        raise ConfigError(
            f"There is no environment of {config.dialect().package} for a {device}. Name the Python of one of your own "
            f"with `rollout.python=…`, or choose `rollout=vllm`."
        )
    return environment(named(config.environment_of[device]), console=console).python
