"""Optional components: a test that needs one skips where it is absent, unless this machine promised to have it."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from etude.config.env import required_components

# What ETUDE_REQUIRE may name, and the package whose presence shows it.
COMPONENTS: dict[str, str] = {
    "lora": "peft",
    "mlflow": "mlflow",
    "postgres": "pgserver",
    "ray": "ray",
    "ray-jobs": "aiohttp_cors",
    "tensorboard": "tensorboardX",
    "wandb": "wandb",
}


def require(name: str) -> None:
    """Go on where the component is installed; otherwise skip the test, or fail it where ETUDE_REQUIRE names it."""
    package = COMPONENTS[name]
    if find_spec(package) is not None:
        return
    if name in required_components():
        pytest.fail(f"ETUDE_REQUIRE names {name!r}, but the package {package!r} is not installed here.", pytrace=False)
    pytest.skip(f"{name} is not installed (no package {package!r})")
