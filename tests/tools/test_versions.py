"""Installed packages and devices, and the remedy for a missing package."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from etude.tools import versions


def test_installed_packages_are_listed_with_their_version() -> None:
    installed = versions.list_packages()
    assert installed["torch"] == torch.__version__
    assert all(installed[name] for name in versions.NEEDED)


def test_the_cpu_is_always_listed() -> None:
    assert f"{torch.get_num_threads()} threads" in versions.list_devices()["cpu"]


def test_a_missing_package_is_listed_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(versions.OPTIONAL, "tensorboardX", ("trackers", ("no-such-distribution",)))
    lines = versions.format_lines("1.2.3")
    assert "tensorboardX  not installed: pip install 'etude[trackers]'" in lines
    assert versions.to_dict("1.2.3")["packages"]["tensorboardX"] is None


def test_the_tree_is_json_and_the_lines_agree_with_it() -> None:
    tree = json.loads(json.dumps(versions.to_dict("1.2.3")))
    assert tree["etude"] == "1.2.3" and tree["python"] == ".".join(map(str, sys.version_info[:3]))
    assert f"torch         {torch.__version__}" in versions.format_lines("1.2.3")
