"""The process environment. No other file reads it."""

from __future__ import annotations

import os
import re
import secrets
import shlex
import shutil
import socket
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from typing import Literal, NamedTuple, cast, get_args

from etude.errors import ConfigError

if sys.platform != "win32":
    import fcntl

FORWARDED_PREFIXES = (
    "CUBLAS_",
    "GLOO_",
    "HF_",
    "MKL_",
    "NCCL_",
    "OMP_",
    "PYTORCH_",
    "TOKENIZERS_",
    "TORCH",
    "TRANSFORMERS_",
)
"""Prefixes of the variables that configure how libraries load, compute and communicate."""
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The options of torch's allocator on a GPU, by its new and its old name."""
SECRET_SUFFIXES = ("_KEY", "_PASSWORD", "_SECRET", "_TOKEN")
"""Suffixes of the variables that hold secrets."""

Role = Literal["store", "runner", "train"]
"""The part of a process in a run with several processes: serve the store, run attempts, or train."""


def etude_command() -> str:
    """Return the shell command for `etude`: the name if it is on PATH, else the path next to this Python."""
    installed = Path(sys.executable).with_name("etude")
    on_path = shutil.which("etude")
    if on_path is not None or not installed.exists():
        return "etude"
    current = Path.cwd()
    path = str(installed.relative_to(current)) if installed.is_relative_to(current) else str(installed)
    return shlex.quote(path if os.sep in path else f"./{path}")


def has_display() -> bool:
    """Return whether a browser can open a window here."""
    return sys.platform in ("darwin", "win32") or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def cache_directory() -> Path:
    """Return the directory for cached files: `etude` in `XDG_CACHE_HOME`, by default in `~/.cache`."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "etude"


def may_download() -> bool:
    """Return True if a run may download models and data sets from the Hugging Face hub (`ETUDE_DOWNLOAD=1`)."""
    value = os.environ.get("ETUDE_DOWNLOAD", "")
    if value not in ("", "0", "1"):
        raise ConfigError(f"ETUDE_DOWNLOAD is '{value}'; it may be 1, which allows downloads, or 0, or not be set.")
    return value == "1"


def is_allocator_configured() -> bool:
    """Return True if the environment configures or replaces the memory allocator."""
    return any(name.startswith(("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")) for name in os.environ)


def limit_kernel_caches(kernels: int) -> None:
    """Limit the caches of compiled kernels in oneDNN and torch, unless the environment sets them.

    Both libraries read the limit at their first kernel.
    """
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, str(kernels))


def build_single_machine_env() -> dict[str, str]:
    """Return the environment of processes that communicate on this machine only. Gloo uses the loopback interface,
    unless the environment names another."""
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
    return {"GLOO_SOCKET_IFNAME": loopback, **os.environ}


def build_remote_rank_env() -> dict[str, str]:
    """Return the variables to send to ranks that do not inherit the environment: those that configure libraries.

    Secrets are left out, because a cluster shows these variables to all its users.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(FORWARDED_PREFIXES) and not name.endswith(SECRET_SUFFIXES)
    }


def set_gloo_interface(address: str) -> None:
    """Make Gloo use the network interface with this address, unless the environment names one.

    If no interface has the address, Gloo chooses one by the host name.
    """
    name = _find_interface(address)
    if name is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def _find_interface(address: str) -> str | None:
    if address.startswith("127."):
        return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    if sys.platform != "linux":
        return None
    request = 0x8915  # SIOCGIFADDR
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                reply = fcntl.ioctl(probe.fileno(), request, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(reply[20:24]) == address:
                    return name
    return None


def ray_address() -> str | None:
    """Return the address of the Ray cluster to join (`RAY_ADDRESS`); None for none."""
    return os.environ.get("RAY_ADDRESS") or None


@contextmanager
def generate_ray_token() -> Iterator[bool]:
    """Protect a Ray cluster that is started inside the block with a random token; yield True if it was set.

    If the environment configures Ray's authentication (`RAY_AUTH_MODE`, `RAY_AUTH_TOKEN`, `RAY_AUTH_TOKEN_PATH`), that
    stays, and the block gets False. Ray's processes and actors inherit the token. It is removed afterwards, so that
    later child processes do not get it.
    """
    names = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
    if any(name in os.environ for name in names):
        yield False
        return
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    try:
        yield True
    finally:
        for name in names:  # the mode is set by Ray
            os.environ.pop(name, None)


def silence_ray() -> None:
    """Switch off Ray's usage statistics, and its messages about errors of results that are not awaited. Ray reads this
    when it is imported."""
    for name, value in (("RAY_USAGE_STATS_ENABLED", "0"), ("RAY_IGNORE_UNHANDLED_ERRORS", "1")):
        os.environ.setdefault(name, value)


class AssignedAttempt(NamedTuple):
    """The attempt that this process runs, and the store that records its emissions."""

    url: str
    reward_key: str
    rollout: int
    attempt: int


def read_assigned_attempt() -> AssignedAttempt | None:
    """Return the attempt that the environment names, if it also has the key to write to it.

    It reads `ETUDE_STORE_URL`, `ETUDE_REWARD_KEY`, `ETUDE_ROLLOUT` and `ETUDE_ATTEMPT`.
    """
    url, key = os.environ.get("ETUDE_STORE_URL", ""), os.environ.get("ETUDE_REWARD_KEY", "")
    if not (url and key):
        return None
    numbers = []
    for name in ("ETUDE_ROLLOUT", "ETUDE_ATTEMPT"):
        text = os.environ.get(name, "")
        if not text.isdecimal():
            raise ConfigError(f"With `ETUDE_REWARD_KEY` the environment names an attempt, and {name} is '{text}'.")
        numbers.append(int(text))
    return AssignedAttempt(url, key, *numbers)


def store_address() -> tuple[str, str]:
    """Return the URL and the key of the store to connect to (`ETUDE_STORE_URL`, `ETUDE_STORE_KEY`); empty if unset."""
    return os.environ.get("ETUDE_STORE_URL", ""), os.environ.get("ETUDE_STORE_KEY", "")


def read_api_key(variable: str | None, service: str) -> str:
    """Return the API key of an external service from a variable; empty without a variable."""
    if variable is None:
        return ""
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ConfigError(f"The key for {service} is read from {variable}, which is not set. Set it, and start again.")
    return key


def read_role() -> Role | None:
    """Return the part of this process in a run (`ETUDE_ROLE`); None does everything in one process."""
    role = os.environ.get("ETUDE_ROLE", "")
    if role and role not in get_args(Role):
        raise ConfigError(f"ETUDE_ROLE is '{role}'; it may be {', '.join(get_args(Role))}, or not be set.")
    return cast(Role, role) if role else None


def build_program_env(added: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a program that runs an attempt: this one's plus `added`, without the store's keys."""
    return {name: value for name, value in os.environ.items() if not name.startswith("ETUDE_")} | dict(added)


def build_runner_env() -> dict[str, str]:
    """Return the environment of a runner process that this process starts."""
    return build_program_env({"ETUDE_ROLE": "runner"})


def prefer_expandable_segments() -> None:
    """Have torch's allocator on a GPU take its memory in segments that grow, unless the environment sets its options.

    A large block, such as a KV cache after an update, then fits where many small ones were.
    """
    if not any(os.environ.get(name) for name in ALLOCATOR_VARIABLES):
        os.environ[ALLOCATOR_VARIABLES[0]] = "expandable_segments:True"


def visible_gpus(numbers: Sequence[int]) -> str:
    """Return the CUDA_VISIBLE_DEVICES by which a child process sees these GPUs, counted among those seen here.

    A cluster gives a job its GPUs by that variable, as numbers or as names (`GPU-…`, `MIG-…`).
    """
    own = os.environ.get("CUDA_VISIBLE_DEVICES")
    if own is None:
        return ",".join(map(str, numbers))
    listed = [name.strip() for name in own.split(",")]
    names = list(takewhile(lambda name: name not in ("", "-1"), listed))  # CUDA reads no further
    absent = next((number for number in numbers if number >= len(names)), None)
    if absent is not None:
        raise ConfigError(
            f"A server would use GPU {absent}, and CUDA_VISIBLE_DEVICES={own} shows this process {len(names)}, counted "
            f"from 0. Name others with `rollout.devices`, or make more visible."
        )
    return ",".join(names[number] for number in numbers)


def build_server_env(added: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a server with its own Python: this one's plus `added`, without the variables of this
    Python and of Etude.

    Nor does it get `expandable_segments`: a server that gives its memory up and takes it back does not work with them.
    """
    removed = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    inherited = {
        name: value for name, value in os.environ.items() if name not in removed and not name.startswith("ETUDE_")
    }
    for name in ALLOCATOR_VARIABLES:
        options = re.sub(r"\s*expandable_segments:[^,]*,?", "", inherited.pop(name, "")).strip(", ")
        if options:
            inherited[name] = options
    return inherited | dict(added)
