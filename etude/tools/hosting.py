"""`etude serve`: a model, or a run's checkpoint, behind the endpoint that agents are trained at. Nothing is trained.

consumes       calls in OpenAI's and Anthropic's dialects, with the key that is printed
produces       answers
waits for      SIGINT or SIGTERM
unblocked by   one of these: no new calls are taken, those under way have two seconds to end, and the server stops
"""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from typing import Any

from rich.console import Console
from rich.text import Text

from etude.agents.proxy.app import router
from etude.agents.proxy.endpoint import EndpointConfig
from etude.observe import make_console
from etude.recipes.agency import endpoint_of, swept
from etude.recipes.ask import loaded
from etude.recipes.run import Run
from etude.records import SamplingParams, Task, Turn
from etude.store import open_store
from etude.store.desk import Key, Limits, Wanted
from etude.store.keys import Keyring
from etude.store.local_desk import LocalDesk
from etude.store.server import serve
from etude.store.serving import reached_at
from etude.tools.keeping import LOOK_S, heard_at, told_to_stop

__all__ = ["host"]

KEY_S = 3650 * 86400.0
"""Seconds that the key is good: longer than any server runs."""


def host(run: Run, source: str, *, best: bool, listen: str) -> None:
    """Serve a model until SIGINT or SIGTERM."""
    address, port = heard_at(listen)
    console = make_console(run.observe.console)
    with ExitStack() as stack:
        step, chat, engine, longest = stack.enter_context(loaded(run, best=best))
        keyring = Keyring()
        desk = _Unrecorded(open_store(), keyring)
        stack.callback(lambda: asyncio.run(desk.close()))
        drawn = run.sampling.params(0)
        config = EndpointConfig(parameters="default", compare=False)
        endpoint = endpoint_of(run, desk, keyring, chat, engine, longest, val=drawn, config=config)
        attempt = asyncio.run(_begun(desk))
        stopping = stack.enter_context(told_to_stop())
        stack.enter_context(swept())
        serving = stack.enter_context(
            serve(desk, keyring, host=address, port=port, routers=[router(endpoint)], beside=[endpoint])
        )
        what = str(run.model.path) if step is None else f"Step {step} of {source}"
        _introduce(console, what, reached_at(serving.url), keyring.model_key(attempt, KEY_S), endpoint.model, drawn)
        while not stopping.wait(LOOK_S):
            pass
        serving.stop()
    console.print(Text("Stopped."))


class _Unrecorded(LocalDesk):
    """A desk that keeps no turns and no notes: nothing is learned from them."""

    turned = 0
    """How many turns there were."""

    async def turn(self, key: Key, turn: Turn) -> int:  # noqa: ARG002
        """Count a turn."""
        self.turned += 1
        return self.turned - 1

    async def note(self, key: Key, name: str, data: Any) -> None:
        """Keep nothing of a note."""


async def _begun(desk: LocalDesk) -> Key:
    """The one attempt as which all calls are made. It is for validation: what is not learned from may be sampled with
    the caller's own parameters."""
    limits = Limits(timeout_s=None, unresponsive_s=KEY_S, max_attempts=1)
    await desk.enqueue([Wanted(Task(0, {}), use="val", limits=limits)])
    (claim,) = await desk.claim("etude serve", 1, 10.0)
    return claim.key


def _introduce(console: Console, what: str, url: str, key: str, model: str, drawn: SamplingParams) -> None:
    """Say where the model is, and how clients reach it."""
    lines = [
        f"{what} is served at {url}, under the name {model}. Ctrl-C ends it. Nothing is trained.",
        f"Where a call does not say otherwise, answers have at most {drawn.max_tokens} tokens, at temperature "
        f"{drawn.temperature:g}.",
        "",
        f"export OPENAI_BASE_URL={url}/v1 OPENAI_API_KEY={key}",
        f"export ANTHROPIC_BASE_URL={url} ANTHROPIC_API_KEY={key}",
        "",
        f"curl {url}/v1/chat/completions -H 'Authorization: Bearer {key}' -H 'Content-Type: application/json' \\",
        f'  -d \'{{"model": "{model}", "messages": [{{"role": "user", "content": "What is 2 + 2?"}}]}}\'',
    ]
    for line in lines:
        console.print(Text(line), soft_wrap=True)
