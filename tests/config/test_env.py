"""The process environment, read in one place."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from etude.config import env
from etude.errors import ConfigError


def test_every_function_of_the_module_is_in_use() -> None:
    rooms = (Path(env.__file__).parents[1], Path(__file__).parents[1])
    imports = re.compile(r"^ *from etude\.config\.env import (\([^)]*\)|[^\n]*)", re.MULTILINE)
    texts = [file.read_text(encoding="utf-8") for room in rooms for file in room.rglob("*.py")]
    used = {name for text in texts for names in imports.findall(text) for name in re.findall(r"\w+", names)}
    own = {name for name, value in vars(env).items() if getattr(value, "__module__", "") == env.__name__}
    assert {name for name in own if not name.startswith("_")} <= used


def test_settings_of_the_allocator_in_the_environment_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD"):
        monkeypatch.delenv(name, raising=False)
    chosen = env.is_allocator_configured()
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "0")
    assert env.is_allocator_configured() and not chosen


def test_the_cache_directory_follows_the_xdg_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere/else")
    assert env.cache_directory() == Path("/somewhere/else/etude")
    for useless in ("", "not/absolute"):
        monkeypatch.setenv("XDG_CACHE_HOME", useless)
        assert env.cache_directory() == Path.home() / ".cache" / "etude"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert env.cache_directory() == Path.home() / ".cache" / "etude"


def test_etude_is_called_by_its_name_if_the_shell_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beside = tmp_path / "bin" / "etude"
    beside.parent.mkdir()
    beside.write_text("#!/bin/sh\n")
    beside.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(beside.with_name("python")))
    monkeypatch.setenv("PATH", "/nowhere")
    assert env.etude_command() == str(beside)
    monkeypatch.chdir(tmp_path)
    assert env.etude_command() == "bin/etude"
    monkeypatch.setenv("PATH", str(beside.parent))
    assert env.etude_command() == "etude"
    monkeypatch.setenv("PATH", "/nowhere")
    beside.unlink()
    assert env.etude_command() == "etude"


def test_processes_of_one_machine_use_the_loopback_interface_unless_set_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "/somewhere")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    given = env.build_single_machine_env()
    assert given["PATH"] == "/somewhere" and given["GLOO_SOCKET_IFNAME"].startswith("lo")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    assert env.build_single_machine_env()["GLOO_SOCKET_IFNAME"] == "eth0"


def test_ranks_on_other_nodes_get_variables_of_libraries_and_no_secrets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in env.build_remote_rank_env():
        monkeypatch.delenv(name)
    given = {"HF_HUB_OFFLINE": "1", "NCCL_SOCKET_IFNAME": "eth0", "TORCH_LOGS": "dynamo", "TOKENIZERS_PARALLELISM": "0"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    for name in ("HF_TOKEN", "TORCH_SECRET", "ETUDE_STORE_KEY", "RAY_AUTH_TOKEN", "CUDA_VISIBLE_DEVICES", "PYTHONPATH"):
        monkeypatch.setenv(name, "mine")
    assert env.build_remote_rank_env() == given


GUARDS = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


def test_a_private_ray_has_a_new_token_that_is_removed_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in GUARDS:
        monkeypatch.delenv(name, raising=False)
    seen = set()
    for _ in range(2):
        with env.generate_ray_token() as guarded:
            assert guarded
            seen.add(os.environ["RAY_AUTH_TOKEN"])
            monkeypatch.setenv("RAY_AUTH_MODE", "token")  # as Ray does
        assert not any(name in os.environ for name in GUARDS)
    assert len(seen) == 2 and all(len(token) == 64 for token in seen)


@pytest.mark.parametrize("name", GUARDS)
def test_settings_of_rays_authentication_in_the_environment_are_kept(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in GUARDS:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv(name, "mine")
    with env.generate_ray_token() as guarded:
        assert not guarded and {
            variable: os.environ.get(variable) for variable in GUARDS if variable in os.environ
        } == {name: "mine"}
    assert os.environ[name] == "mine"


def test_a_process_may_have_a_role(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ETUDE_ROLE", raising=False)
    assert env.read_role() is None
    monkeypatch.setenv("ETUDE_ROLE", "runner")
    assert env.read_role() == "runner"
    monkeypatch.setenv("ETUDE_ROLE", "algorithm")
    with pytest.raises(ConfigError, match="ETUDE_ROLE is 'algorithm'; it may be store, runner, train"):
        env.read_role()


def test_a_process_may_play_one_attempt_and_report_its_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    assert env.read_assigned_attempt() is None
    monkeypatch.setenv("ETUDE_STORE_URL", "http://here")
    assert env.read_assigned_attempt() is None
    monkeypatch.setenv("ETUDE_REWARD_KEY", "key")
    with pytest.raises(ConfigError, match="ETUDE_ROLLOUT is ''"):
        env.read_assigned_attempt()
    monkeypatch.setenv("ETUDE_ROLLOUT", "7")
    monkeypatch.setenv("ETUDE_ATTEMPT", "1")
    assert env.read_assigned_attempt() == ("http://here", "key", 7, 1)


def test_a_playing_program_gets_no_key_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/somewhere")
    monkeypatch.setenv("ETUDE_STORE_URL", "http://here")
    monkeypatch.setenv("ETUDE_STORE_KEY", "everything")
    assert env.store_address() == ("http://here", "everything")
    given = env.build_program_env({"ETUDE_ROLLOUT": "3"})
    assert {name: value for name, value in given.items() if name.startswith("ETUDE_")} == {"ETUDE_ROLLOUT": "3"}
    assert given["PATH"] == "/somewhere" and env.build_runner_env()["ETUDE_ROLE"] == "runner"


@pytest.mark.parametrize(("value", "may"), [(None, False), ("", False), ("0", False), ("1", True)])
def test_downloads_are_allowed_by_the_environment(
    value: str | None, may: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ETUDE_DOWNLOAD", raising=False)
    if value is not None:
        monkeypatch.setenv("ETUDE_DOWNLOAD", value)
    assert env.may_download() is may
    monkeypatch.setenv("ETUDE_DOWNLOAD", "yes")
    with pytest.raises(ConfigError, match="ETUDE_DOWNLOAD is 'yes'; it may be 1"):
        env.may_download()


def test_a_key_is_read_from_the_variable_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", " abc \n")
    assert (env.read_api_key(None, "the judge"), env.read_api_key("MY_KEY", "the judge")) == ("", "abc")
    monkeypatch.delenv("MY_KEY")
    with pytest.raises(ConfigError, match="The key for the judge is read from MY_KEY, which is not set"):
        env.read_api_key("MY_KEY", "the judge")


def test_ranks_use_the_interface_of_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "mine")
    env.set_gloo_interface("127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "mine"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    env.set_gloo_interface("192.0.2.1")  # an address for documentation, which no machine has
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    env.set_gloo_interface("127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"].startswith("lo")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")


def test_kernel_caches_are_bounded_unless_the_environment_bounds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "7")
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "7")
    monkeypatch.delenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY")
    env.limit_kernel_caches(64)
    assert (os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"], os.environ["LRU_CACHE_CAPACITY"]) == ("64", "7")


def test_a_server_inherits_no_variables_of_this_python_and_of_etude(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTHONPATH", "VIRTUAL_ENV", "ETUDE_STORE_KEY", "ELSE"):
        monkeypatch.setenv(name, "x")
    given = env.build_server_env({"CUDA_VISIBLE_DEVICES": "1"})
    assert given["ELSE"] == "x" and given["CUDA_VISIBLE_DEVICES"] == "1"
    assert not {"PYTHONPATH", "VIRTUAL_ENV", "ETUDE_STORE_KEY"} & given.keys()


@pytest.mark.parametrize(
    ("shown", "seen"),
    [(None, "1,2"), ("4,5,6,7", "5,6"), ("GPU-a, GPU-b, MIG-c", "GPU-b,MIG-c"), ("0,1,2,-1,3", "1,2")],
)
def test_the_gpus_of_a_server_are_counted_among_those_that_are_shown(
    shown: str | None, seen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if shown is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    assert env.visible_gpus((1, 2)) == seen
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,-1,2")
    with pytest.raises(ConfigError, match=r"GPU 2, and CUDA_VISIBLE_DEVICES=0,1,-1,2 shows this process 2"):
        env.visible_gpus((1, 2))


@pytest.mark.parametrize(
    ("options", "inherited"),
    [
        ("expandable_segments:True", None),
        ("max_split_size_mb:64,expandable_segments:True", "max_split_size_mb:64"),
        ("expandable_segments:True, roundup_power2_divisions:[256:1,>:4]", "roundup_power2_divisions:[256:1,>:4]"),
        ("max_split_size_mb:64", "max_split_size_mb:64"),
    ],
)
def test_a_server_gets_no_expandable_segments(
    options: str, inherited: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in env.ALLOCATOR_VARIABLES:
        monkeypatch.setenv(name, options)
    given = env.build_server_env({})
    assert [given.get(name) for name in env.ALLOCATOR_VARIABLES] == [inherited] * 2


@pytest.mark.parametrize("given", [None, "max_split_size_mb:64"])
@pytest.mark.parametrize("name", env.ALLOCATOR_VARIABLES)
def test_segments_grow_unless_the_allocator_has_options(
    name: str, given: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in env.ALLOCATOR_VARIABLES:
        monkeypatch.setenv(variable, "")
    if given is not None:
        monkeypatch.setenv(name, given)
    env.prefer_expandable_segments()
    expected = "expandable_segments:True" if given is None else given if name == env.ALLOCATOR_VARIABLES[0] else ""
    assert os.environ[env.ALLOCATOR_VARIABLES[0]] == expected
