"""Addresses with a port that no machine has are refused where they are given, and not where a socket fails."""

from __future__ import annotations

import pytest

from etude.config.address import check_url, parse_address
from etude.errors import ConfigError
from etude.recipes.collect.agent_config import AgentConfig
from etude.rewards import ModelJudge
from etude.rollout import VllmConfig
from etude.store.http.remote_queue import RemoteRolloutQueue


@pytest.mark.parametrize(("text", "address"), [("127.0.0.1:0", ("127.0.0.1", 0)), ("[::1]:65535", ("::1", 65_535))])
def test_an_address_is_a_host_and_a_port(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text, "--listen ") == address


@pytest.mark.parametrize("text", ["127.0.0.1:65536", "127.0.0.1:-1", "127.0.0.1:", ":8700", "8700", "a b:1", "a:٣"])
def test_any_other_text_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=f"`--listen {text}`"):
        parse_address(text, "--listen ")


def test_every_option_with_a_port_is_checked() -> None:
    with pytest.raises(ValueError, match=r"agent\.listen=127\.0\.0\.1:99999"):
        AgentConfig(listen="127.0.0.1:99999")
    with pytest.raises(ValueError, match=r"rollout\.rendezvous=127\.0\.0\.1:99999"):
        VllmConfig(rendezvous="127.0.0.1:99999", nodes=2, tensor_parallel=2)
    url = "http://127.0.0.1:99999"
    with pytest.raises(ValueError, match=r"`rollout\.url` is 'http://127\.0\.0\.1:99999', and its port"):
        VllmConfig(url=(url,))
    with pytest.raises(ValueError, match="`base_url` is"):
        ModelJudge(base_url=f"{url}/v1", model="small")
    with pytest.raises(ConfigError, match="The address of the store is"):
        RemoteRolloutQueue(url, "etude-key")
    check_url("http://127.0.0.1:65535", "It")
