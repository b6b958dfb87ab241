"""Every option of publishing to servers, and the plug-in as a server's Python finds it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from etude.errors import ConfigError, UnknownChoiceError
from etude.sync import Carrier, SyncConfig, carrier, fleet
from etude.sync.disk import DiskCarrier
from etude.sync.group import GroupCarrier
from etude.sync.plugin import PACKAGE, laid_out
from etude.sync.shm import ShmCarrier
from tests.servers import Served


@pytest.mark.parametrize(
    ("name", "kind"), [("shm", ShmCarrier), ("disk", DiskCarrier), ("gloo", GroupCarrier), ("nccl", GroupCarrier)]
)
def test_each_carrier_is_chosen_by_its_name(name: str, kind: type[Carrier], tmp_path: Path) -> None:
    assert isinstance(carrier(SyncConfig.model_validate({"carrier": name}), tmp_path), kind)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_its_memory_cannot_be_shared(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"torch sees none here.*`carrier=shm`"):
        carrier(SyncConfig(carrier="ipc"), tmp_path)


def test_there_must_be_servers_that_can_be_spoken_to(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no engine to publish to"):
        fleet([], SyncConfig(), tmp_path)
    stranger = Served("vllm", "http://127.0.0.1:9", None, tmp_path)
    stranger.dialect.name = "tgi"
    with pytest.raises(UnknownChoiceError, match="'tgi', and carriers speak vllm and sglang"):
        fleet([stranger], SyncConfig(), tmp_path)


def test_the_plug_in_is_found_where_it_was_laid_out(tmp_path: Path) -> None:
    made = laid_out(tmp_path)
    assert laid_out(tmp_path) == made and list(tmp_path.iterdir()) == [made]
    asked = "from importlib.metadata import entry_points; print(*entry_points(group='vllm.general_plugins'))"
    found = subprocess.run(
        [sys.executable, "-c", asked], env={"PYTHONPATH": str(made)}, capture_output=True, text=True, check=True
    )
    assert f"{PACKAGE}:register" in found.stdout
