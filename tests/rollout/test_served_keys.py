"""Servers require a key: started ones a new key, joined ones that of their owner."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from etude.errors import ConfigError, EngineError
from etude.rollout import SglangConfig, VllmConfig
from etude.rollout.launch import launch_specs, start_servers
from etude.rollout.replica import Replica
from etude.rollout.server_backend import LaunchSpec
from etude.rollout.server_client import HttpClient
from etude.rollout.server_engine import ModelShape, ServerEngine
from tests.rollout.test_server_pool import ask, expected, served, weights


def test_a_started_server_has_a_key_that_no_other_user_finds(tmp_path: Path) -> None:
    with served(tmp_path, server_args=("--tells",)) as engine:
        address = engine.servers[0].address
        key = address.key
        assert len(key) == 64 and key not in repr(address)
        assert ask(engine, [[2]], 4)[0].ids.tolist() == expected([2], 4)
        log = tmp_path / "logs" / "vllm-0.log"
        log_text = log.read_text()
        assert "args: key='****" in log_text and key not in log_text and log.stat().st_mode & 0o077 == 0
        everything = [(entry / "cmdline").read_bytes() for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
        assert not any(key.encode() in text for text in everything)

        async def call(key: str) -> object:
            stranger = HttpClient(address.url, key=key)
            try:
                return await stranger.post("/inference/v1/generate", {"token_ids": [1]})
            finally:
                await stranger.close()

        for wrong in ("", "another"):
            with pytest.raises(
                EngineError, match=r"answered 401 .*needs another key.*`rollout\.api_key_env`"
            ) as refused:
                asyncio.run(call(wrong))
            assert "another'" not in str(refused.value) and "Bearer another" not in str(refused.value)
    with pytest.raises(EngineError, match=r"args: key='\*\*\*'"), served(tmp_path, server_args=("--tells", "--dies")):
        pass


def test_a_server_that_reads_its_key_from_a_file_gets_its_path(tmp_path: Path) -> None:
    shape = ModelShape.read(weights(tmp_path / "model", 0))
    config = SglangConfig()
    (launch,) = launch_specs(LaunchSpec(config, tmp_path / "model", Path("python"), "bfloat16", "cuda"), shape)
    dialect = config.create_backend()
    replica = Replica(
        ServerEngine("http://127.0.0.1", dialect, shape), launch, tmp_path / "a.log", max_restarts=0, start_timeout=1
    )
    with replica._with_key_file(launch) as keyed:
        assert keyed.key_file is not None and f"--config {keyed.key_file}" in " ".join(dialect.command(keyed))
        assert "--config" not in dialect.command(keyed, 1), "the other nodes are asked nothing"
        assert keyed.key_file.read_text() == f'api-key: "{launch.key}"\n' and keyed.key_file.stat().st_mode & 0o077 == 0
        assert launch.key not in " ".join(dialect.command(keyed)) and launch.key not in repr(launch)
    assert not keyed.key_file.exists()
    with pytest.raises(ConfigError, match=r"`rollout\.server_args` holds an `--api-key`"):
        VllmConfig(server_args=("--api-key", "mine"))
    with pytest.raises(ConfigError, match="SGLang reads only one such file, which has its key"):
        SglangConfig(server_args=("--config=mine.yaml",))


def test_the_key_of_joined_servers_is_read_from_a_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(tmp_path) as owner:
        place = {"dtype": "float32", "device": "cpu", "logs": tmp_path / "b"}
        url, key = owner.servers[0].url, owner.servers[0].address.key
        with pytest.raises(EngineError, match="answered 401"):
            start_servers(VllmConfig(url=(url,)), tmp_path / "model", None, **place)  # type: ignore[arg-type]
        config = VllmConfig(url=(url,), api_key_env="THEIR_KEY")
        with pytest.raises(ConfigError, match=r"`rollout\.url` is read from THEIR_KEY, which is not set"):
            start_servers(config, tmp_path / "model", None, **place)  # type: ignore[arg-type]
        monkeypatch.setenv("THEIR_KEY", key)
        with start_servers(config, tmp_path / "model", None, **place) as engine:  # type: ignore[arg-type]
            assert ask(engine, [[2]], 4)[0].ids.tolist() == expected([2], 4)
    with pytest.raises(ConfigError, match=r"`rollout\.api_key_env` is for servers that `rollout\.url` names"):
        VllmConfig(api_key_env="THEIR_KEY")
