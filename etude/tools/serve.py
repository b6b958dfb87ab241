"""`etude serve`: a model, or a run's checkpoint, behind the same endpoint as in training. Nothing is trained.

consumes       requests of the OpenAI and Anthropic APIs, with the printed key
produces       replies
waits for      SIGINT or SIGTERM
unblocked by   a signal: the server takes no new requests, gives running ones two seconds, and stops
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from rich.console import Console
from rich.text import Text

from etude.agents.proxy.app import create_router
from etude.agents.proxy.endpoint_config import EndpointConfig
from etude.images import ImageRef
from etude.images.decoding import ImageLimits, inspect_image
from etude.observe import make_console
from etude.recipes.agents.services import build_endpoint, freeze_gc
from etude.recipes.inference import load_for_inference
from etude.recipes.run.config import Run
from etude.records import SamplingParams, Task, Turn
from etude.store import open_store
from etude.store.http.server import serve
from etude.store.http.server_thread import reachable_url
from etude.store.queue.keys import Keyring
from etude.store.queue.local_queue import LocalRolloutQueue
from etude.store.queue.rollout_queue import AttemptId, RolloutLimits, RolloutRequest
from etude.store.queue.stored_images import MAX_IMAGE_BYTES
from etude.tools.store_server import POLL_S, parse_free_address, stop_on_signal

KEY_S = 3650 * 86400.0
"""Seconds until the key expires: longer than any server runs."""


def serve_model(run: Run, source: str, *, best: bool, listen: str) -> None:
    """Serve a model until SIGINT or SIGTERM."""
    address, port = parse_free_address(listen)
    console = make_console(run.observe.console)
    with ExitStack() as stack:
        step, chat, engine, max_tokens = stack.enter_context(load_for_inference(run, best=best))
        keyring = Keyring()
        queue = _UnrecordedQueue(open_store(), keyring)
        stack.callback(lambda: asyncio.run(queue.close()))
        sampling = run.sampling.params()
        config = EndpointConfig(
            parameters="default",
            count_rerendered=False,
            max_images=run.vision.max_images,
            image_hosts=run.agent.image_hosts,
        )
        endpoint = build_endpoint(
            queue,
            keyring,
            chat,
            engine,
            max_tokens,
            train=run.sampling.params(),
            val=sampling,
            seed=run.seed,
            config=config,
            scorer=engine,
        )
        attempt = asyncio.run(_start_attempt(queue))
        stopping = stack.enter_context(stop_on_signal())
        stack.enter_context(freeze_gc())
        serving = stack.enter_context(
            serve(queue, keyring, host=address, port=port, routers=[create_router(endpoint)], lifespans=[endpoint])
        )
        description = str(run.model.path) if step is None else f"Step {step} of {source}"
        _introduce(
            console,
            description,
            reachable_url(serving.url),
            keyring.model_key(attempt, KEY_S),
            endpoint.model,
            sampling,
            has_template=chat.has_template,
        )
        while not stopping.wait(POLL_S):
            pass
        serving.stop()
    console.print(Text("Stopped."))


class _UnrecordedQueue(LocalRolloutQueue):
    """A rollout queue that records no turns and no notes, because nothing is trained on them."""

    turn_count = 0
    """The number of turns so far."""

    async def record_turn(self, attempt: AttemptId, turn: Turn, began: float = 0.0) -> int:  # noqa: ARG002
        """Count a turn."""
        self.turn_count += 1
        return self.turn_count - 1

    async def record_note(self, attempt: AttemptId, name: str, data: Any = None) -> None:
        """Ignore a note."""

    async def put_images(self, contents: Sequence[bytes]) -> list[ImageRef]:
        """Read images, and store none of them: the endpoint keeps the newest in memory."""
        limits = ImageLimits(MAX_IMAGE_BYTES)
        return [await asyncio.to_thread(inspect_image, content, limits) for content in contents]


async def _start_attempt(queue: LocalRolloutQueue) -> AttemptId:
    """Start the one attempt that all requests belong to. It is a validation attempt, so that callers may choose their
    own sampling parameters."""
    limits = RolloutLimits(timeout_s=None, unresponsive_s=KEY_S, max_attempts=1)
    await queue.enqueue([RolloutRequest(Task(0, {}), use="val", limits=limits)])
    (claim,) = await queue.claim("etude serve", 1, 10.0)
    return claim.attempt_id


def _introduce(
    console: Console, description: str, url: str, key: str, model: str, sampling: SamplingParams, *, has_template: bool
) -> None:
    """Print the address of the model, and example commands for clients. A model without a chat template takes text."""
    path, prompt = "completions", '"prompt": "2 + 2 ="'
    if has_template:
        path, prompt = "chat/completions", '"messages": [{"role": "user", "content": "What is 2 + 2?"}]'
    lines = [
        f"{description} is served at {url}, under the name {model}. Ctrl-C ends it. Nothing is trained.",
        f"By default, answers have at most {sampling.max_tokens} tokens, at temperature {sampling.temperature:g}.",
        "",
        f"export OPENAI_BASE_URL={url}/v1 OPENAI_API_KEY={key}",
        f"export ANTHROPIC_BASE_URL={url} ANTHROPIC_API_KEY={key}",
        "",
        f"curl {url}/v1/{path} -H 'Authorization: Bearer {key}' -H 'Content-Type: application/json' \\",
        f'  -d \'{{"model": "{model}", {prompt}}}\'',
    ]
    for line in lines:
        console.print(Text(line), soft_wrap=True)
