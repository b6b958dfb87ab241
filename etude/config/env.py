"""The process environment: the one file that reads it."""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import socket
import struct
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal, NamedTuple, cast, get_args

from etude.errors import ConfigError

if sys.platform != "win32":
    import fcntl

__all__ = [
    "AssignedAttempt",
    "build_program_env",
    "build_remote_rank_env",
    "build_runner_env",
    "build_server_env",
    "build_single_machine_env",
    "cache_directory",
    "etude_command",
    "generate_ray_token",
    "is_allocator_configured",
    "key_from",
    "limit_kernel_caches",
    "may_download",
    "ray_address",
    "read_assigned_attempt",
    "read_role",
    "required_components",
    "set_gloo_interface",
    "silence_ray",
    "store_address",
]

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
"""What the names begin with of variables that say how libraries load, compute and speak to each other."""
SECRET_SUFFIXES = ("_KEY", "_PASSWORD", "_SECRET", "_TOKEN")
"""What the names end with of variables that open something."""

Role = Literal["store", "runner", "train"]
"""What a process is there for, where several share the work: to keep the store, to play rollouts, to train."""


def required_components() -> frozenset[str]:
    """The components that must be present (`ETUDE_REQUIRE`, comma-separated): their tests fail instead of skipping."""
    return frozenset(word.strip() for word in os.environ.get("ETUDE_REQUIRE", "").split(",") if word.strip())


def etude_command() -> str:
    """How `etude` is called here, to be read by a shell: by its name where that finds it, else by its path beside this
    Python."""
    installed = Path(sys.executable).with_name("etude")
    on_path = shutil.which("etude")
    if on_path is not None or not installed.exists():
        return "etude"
    current = Path.cwd()
    path = str(installed.relative_to(current)) if installed.is_relative_to(current) else str(installed)
    return shlex.quote(path if os.sep in path else f"./{path}")


def cache_directory() -> Path:
    """Where what can be made again is kept between runs: `etude` in `XDG_CACHE_HOME`, by default `~/.cache`."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "etude"


def may_download() -> bool:
    """Return whether a run may download models and data sets from the Hugging Face hub (`ETUDE_DOWNLOAD`)."""
    value = os.environ.get("ETUDE_DOWNLOAD", "")
    if value not in ("", "0", "1"):
        raise ConfigError(f"ETUDE_DOWNLOAD is '{value}'; it may be 1, which allows downloads, or 0, or not be set.")
    return value == "1"


def is_allocator_configured() -> bool:
    """Whether the environment says how freed memory is kept, or who allocates it."""
    return any(name.startswith(("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")) for name in os.environ)


def limit_kernel_caches(kernels: int) -> None:
    """Have oneDNN, and torch in front of it, keep so many of the kernels that they compile, unless the environment says
    how many. Both read it at their first kernel."""
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, str(kernels))


def build_single_machine_env() -> dict[str, str]:
    """The environment for processes that speak to each other and to no other machine: through the loopback interface,
    unless it says otherwise itself."""
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
    return {"GLOO_SOCKET_IFNAME": loopback, **os.environ}


def build_remote_rank_env() -> dict[str, str]:
    """What of the environment goes along to ranks that do not inherit it: how libraries load, compute, and speak to
    each other. What opens something stays: a cluster shows what goes along to whoever may look at it."""
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(FORWARDED_PREFIXES) and not name.endswith(SECRET_SUFFIXES)
    }


def set_gloo_interface(address: str) -> None:
    """Have the ranks of this process speak through the interface that has this address, unless the environment names
    one. Where nothing tells which that is, the library that they speak by chooses one by the machine's name."""
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
    """The Ray that this process is to join (`RAY_ADDRESS`), if there is one."""
    return os.environ.get("RAY_ADDRESS") or None


@contextmanager
def generate_ray_token() -> Iterator[bool]:
    """Have a Ray that is started meanwhile answer nobody but its own, by a token that nobody else knows; whether it
    does. Where the environment says how Ray is guarded (`RAY_AUTH_MODE`, `RAY_AUTH_TOKEN`, `RAY_AUTH_TOKEN_PATH`),
    it is as it says.

    Ray's processes inherit the token, those of its actors too. Afterwards it is gone from here: whatever this process
    starts later has no business with it.
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
    """Have Ray report nothing about its use to anybody, and say nothing of answers that nobody waits for. It reads this
    when it is imported."""
    for name, value in (("RAY_USAGE_STATS_ENABLED", "0"), ("RAY_IGNORE_UNHANDLED_ERRORS", "1")):
        os.environ.setdefault(name, value)


class AssignedAttempt(NamedTuple):
    """The attempt that this whole process plays, and where what it says of it is written down."""

    url: str
    reward_key: str
    rollout: int
    attempt: int


def read_assigned_attempt() -> AssignedAttempt | None:
    """The attempt that the environment names (`ETUDE_STORE_URL`, `ETUDE_REWARD_KEY`, `ETUDE_ROLLOUT`, `ETUDE_ATTEMPT`),
    if it names one and may write of it."""
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
    """Where the store is that this process is to join, and the key to it (`ETUDE_STORE_URL`, `ETUDE_STORE_KEY`); empty
    where the environment does not say."""
    return os.environ.get("ETUDE_STORE_URL", ""), os.environ.get("ETUDE_STORE_KEY", "")


def key_from(variable: str | None, service: str) -> str:
    """The key that a variable holds, for somebody else's service; empty where none is named."""
    if variable is None:
        return ""
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ConfigError(
            f"The key for {service} is to be read from {variable}, which is not set. Set it, and start again."
        )
    return key


def read_role() -> Role | None:
    """What this process is there for (`ETUDE_ROLE`); None is everything at once."""
    role = os.environ.get("ETUDE_ROLE", "")
    if role and role not in get_args(Role):
        raise ConfigError(f"ETUDE_ROLE is '{role}'; it may be {', '.join(get_args(Role))}, or not be set.")
    return cast(Role, role) if role else None


def build_program_env(added: Mapping[str, str]) -> dict[str, str]:
    """The environment of a program that plays an attempt: this one's with `added`, and with nothing that would open the
    store."""
    return {name: value for name, value in os.environ.items() if not name.startswith("ETUDE_")} | dict(added)


def build_runner_env() -> dict[str, str]:
    """The environment of a process that plays rollouts beside this one."""
    return build_program_env({"ETUDE_ROLE": "runner"})


def build_server_env(added: Mapping[str, str]) -> dict[str, str]:
    """The environment of a server that has a Python of its own: this one's, without what belongs to this Python and to
    Etude, and with `added`."""
    removed = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    inherited = {
        name: value for name, value in os.environ.items() if name not in removed and not name.startswith("ETUDE_")
    }
    return inherited | dict(added)
