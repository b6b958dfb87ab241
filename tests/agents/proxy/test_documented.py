"""The pages on the endpoint and on metrics list the options, fields, routes and metrics that exist."""

from __future__ import annotations

import re
from pathlib import Path

from etude.agents.proxy import EndpointConfig, anthropic
from etude.agents.proxy import response_items as items
from etude.agents.proxy.anthropic import MESSAGES
from etude.agents.proxy.app import create_router
from etude.agents.proxy.chat_completions import CHAT_COMPLETIONS
from etude.agents.proxy.completions import COMPLETIONS
from etude.agents.proxy.responses import RESPONSES
from etude.agents.proxy.sampling_rules import FORCED
from tests.agents.proxy.world import Scripted, chat_of, serving

PAGE = (Path(__file__).parents[3] / "docs" / "reference/endpoint.md").read_text(encoding="utf-8")
METRICS = (Path(__file__).parents[3] / "docs" / "reference/metrics.md").read_text(encoding="utf-8")
FLAT = " ".join(PAGE.split())


def test_options() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `([^`]+)` \| (.+) \|$", PAGE, flags=re.MULTILINE)
    fields = EndpointConfig.model_fields.items()
    assert rows == [
        (name, str(field.default).replace("True", "true").replace("False", "false"), field.description)
        for name, field in fields
    ]


def test_forced_parameters() -> None:
    assert f"own {', '.join(FORCED[:-1])} and {FORCED[-1]} are not followed" in FLAT


def test_fields() -> None:
    """The page's table equals the dialects' field tables."""
    tables = (CHAT_COMPLETIONS, COMPLETIONS, RESPONSES, MESSAGES)
    names = sorted({name for table in tables for name in table})
    words = {"obeyed": "followed", "sampling": "the run's", "accepted": "no effect", "ignored": "ignored"}
    rows = []
    for name in names:
        treatments = [words.get(table[name].treatment, "refused") if name in table else "" for table in tables]
        rows.append(f"| `{name}` | " + " | ".join(treatments) + " |")
    assert "\n".join(rows) in PAGE
    dropped = [f"`{kind}`" for kind in (*items.DROPPED, *anthropic.DROPPED)]
    assert all(kind in FLAT for kind in dropped)


def test_routes_and_metrics() -> None:
    with serving(Scripted(chat_of().tokenizer, lambda _: "So."), chat_of()) as world:
        for route in create_router(world.endpoint).routes:
            if route.name == "unknown":  # type: ignore[attr-defined]
                continue
            methods = sorted(route.methods - {"HEAD"})  # HEAD goes with every GET
            assert f"{' '.join(methods)} {route.path}`" in PAGE  # type: ignore[attr-defined]
        for name in ("latency", "overhead", "external_latency"):
            world.endpoint._metrics.record(name, 1.0)  # type: ignore[arg-type]  # one of the names
        metrics = set(world.endpoint.metrics())
    source = Path(create_router.__code__.co_filename).parent
    counted = {name for path in source.glob("*.py") for name in re.findall(r'counts\["(\w+)"\]', path.read_text())}
    metrics |= {f"endpoint/{name}" for name in counted} | {
        f"endpoint/turns_{how}" for how in ("begun", "continued", "branched")
    }
    rows = re.findall(r"^\| (`endpoint/.*?) \|", METRICS, flags=re.MULTILINE)
    documented = {name.replace("_p50", "_p") for row in rows for name in re.findall(r"`(endpoint/\w+)`", row)}
    assert documented == {re.sub(r"_p\d\d$", "_p", name) for name in metrics}
