"""Agents of other people's making play as they are, and every turn of theirs continues the one before, to the token.

The model behind the endpoint is a real one in a real engine, which thinks, talks, and calls tools by chance; its
template drops earlier thinking, trims text and writes calls in its own way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import numpy as np
import pytest
import smolagents

from etude.records import Turn
from tests.agents.proxy import unmodified
from tests.agents.proxy.tables import CALLS, CODE, speaking
from tests.agents.proxy.world import World

RUNS, AT_ONCE = 12, 4
LINEAR = 0.99
"""The share of turns of a conversation that nobody rewrote, that have to continue exactly."""


@pytest.fixture(scope="module")
def caller() -> Iterator[World]:
    with speaking(CALLS) as world:
        yield world


@pytest.fixture(scope="module")
def coder() -> Iterator[World]:
    with speaking(CODE) as world:
        yield world


def continued(turns: list[Turn]) -> int:
    """How many turns begin with all that another showed and sampled, id for id."""
    wholes = [np.concatenate([turn.prompt, turn.completion.ids]) for turn in turns]
    return sum(
        any(len(each) <= len(turn.prompt) and np.array_equal(turn.prompt[: len(each)], each) for each in wholes[:place])
        for place, turn in enumerate(turns)
    )


def counted(world: World) -> dict[str, float]:
    told = world.endpoint.metrics()
    names = ("turns", "turns_begun", "turns_continued", "turns_branched", "tokens_rerendered")
    return {name: told.get(f"endpoint/{name}", 0.0) for name in names}


def assert_linear(world: World, runs: list[list[Turn]], before: dict[str, float]) -> dict[str, float]:
    """Nearly every turn but each run's first continues exactly, and the endpoint says so too; what it counted."""
    linear = sum(len(turns) - 1 for turns in runs)
    assert linear >= RUNS, "agents that hardly speak show nothing"
    assert sum(map(continued, runs)) >= LINEAR * linear
    told = {name: count - before[name] for name, count in counted(world).items()}
    assert told["turns"] == linear + len(runs) and told["turns_begun"] == len(runs)
    assert told["turns_continued"] >= LINEAR * linear
    assert told["tokens_rerendered"] > 5 * linear, "rendered anew, these conversations are other tokens"
    return told


def played(world: World, play: Callable[[str, str], Awaitable[None]]) -> list[list[Turn]]:
    """What is recorded of some runs of an agent."""
    claims = [world.attempt() for _ in range(RUNS)]

    async def all_of_them() -> None:
        places = asyncio.Semaphore(AT_ONCE)

        async def one(key: str) -> None:
            async with places:
                await play(world.url, key)

        await asyncio.gather(*(one(claim.model_key) for claim in claims))

    asyncio.run(all_of_them())
    return [world.turns(claim.key) for claim in claims]


@pytest.mark.parametrize("streamed", [False, True])
def test_langgraph(caller: World, streamed: bool) -> None:
    before = counted(caller)
    runs = played(caller, lambda url, key: asyncio.to_thread(unmodified.langgraph, url, key, streamed=streamed))
    assert_linear(caller, runs, before)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("responses", [False, True])
def test_openai_agents(caller: World, responses: bool, streamed: bool) -> None:
    before = counted(caller)
    given: dict[str, Any] = {"responses": responses, "streamed": streamed}
    runs = played(caller, lambda url, key: unmodified.openai_agents(url, key, **given))
    assert_linear(caller, runs, before)


@pytest.mark.parametrize("streamed", [False, True])
def test_requests(caller: World, streamed: bool) -> None:
    before = counted(caller)
    runs = played(caller, lambda url, key: asyncio.to_thread(unmodified.plain, url, key, streamed=streamed))
    assert_linear(caller, runs, before)


@pytest.mark.parametrize("streamed", [False, True])
def test_smolagents(coder: World, streamed: bool) -> None:
    """It writes what it cut off back, and words of its own after it: they are context of the same conversation."""
    before = counted(coder)
    given: dict[str, Any] = {"kind": smolagents.CodeAgent, "streamed": streamed}
    runs = played(coder, lambda url, key: asyncio.to_thread(unmodified.smolagent, url, key, **given))
    assert_linear(coder, runs, before)
    decode = coder.endpoint.chat.tokenizer.decode
    assert all("</code>\nCalling tools:" in decode(turns[-1].prompt) for turns in runs if len(turns) > 1)
