"""docs/endpoint.md says what there is."""

from __future__ import annotations

import re
from pathlib import Path

from etude.agents.proxy import EndpointConfig
from etude.agents.proxy.app import router
from etude.agents.proxy.policy import FORCED
from tests.agents.proxy.world import Scripted, chat_of, serving

PAGE = (Path(__file__).parents[3] / "docs" / "endpoint.md").read_text(encoding="utf-8")
FLAT = " ".join(PAGE.split())


def test_options() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `([^`]+)` \| (.+) \|$", PAGE, flags=re.MULTILINE)
    fields = EndpointConfig.model_fields.items()
    assert rows == [(name, str(field.default).replace("True", "true"), field.description) for name, field in fields]


def test_forced_parameters() -> None:
    assert f"own {', '.join(FORCED[:-1])} and {FORCED[-1]} are not followed" in FLAT


def test_routes_and_metrics() -> None:
    with serving(Scripted(chat_of().tokenizer, lambda _: "So."), chat_of()) as world:
        for route in router(world.endpoint).routes:
            methods = sorted(route.methods - {"HEAD"})  # type: ignore[attr-defined]  # which goes wherever GET does
            assert f"{' '.join(methods)} {route.path}`" in PAGE  # type: ignore[attr-defined]
        world.endpoint._meter.took(1.0, 0.5)
        world.endpoint._meter.took_elsewhere(1.0)
        told = set(world.endpoint.metrics())
    source = Path(router.__code__.co_filename).parent
    counted = {name for path in source.glob("*.py") for name in re.findall(r'counts\["(\w+)"\]', path.read_text())}
    told |= {f"endpoint/{name}" for name in counted} | {
        f"endpoint/turns_{how}" for how in ("begun", "continued", "branched")
    }
    rows = re.findall(r"^\| (`endpoint/.*?) \|", PAGE, flags=re.MULTILINE)
    said = {name.replace("_p50", "_p") for row in rows for name in re.findall(r"`(endpoint/\w+)`", row)}
    assert said == {re.sub(r"_p\d\d$", "_p", name) for name in told}
