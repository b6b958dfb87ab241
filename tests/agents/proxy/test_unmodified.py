"""Agents of other frameworks run without changes, and each of their turns continues the one before, to the token.

The model behind the endpoint is a real one in a real engine. It thinks, talks and calls tools at random. Its template
drops earlier thinking, trims text and writes calls in another form.
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
"""The least share of turns that must continue exactly, in conversations whose history is not rewritten."""


@pytest.fixture(scope="module")
def caller() -> Iterator[World]:
    with speaking(CALLS) as world:
        yield world


@pytest.fixture(scope="module")
def coder() -> Iterator[World]:
    with speaking(CODE) as world:
        yield world


def continued(turns: list[Turn]) -> int:
    """Return the number of turns that begin with another turn's prompt and completion, id for id."""
    wholes = [np.concatenate([turn.prompt, turn.completion.ids]) for turn in turns]
    return sum(
        any(
            len(earlier) <= len(turn.prompt) and np.array_equal(turn.prompt[: len(earlier)], earlier)
            for earlier in wholes[:place]
        )
        for place, turn in enumerate(turns)
    )


def counted(world: World) -> dict[str, float]:
    metrics = world.endpoint.metrics()
    names = ("turns", "turns_begun", "turns_continued", "turns_branched", "tokens_rerendered")
    return {name: metrics.get(f"endpoint/{name}", 0.0) for name in names}


def assert_linear(world: World, runs: list[list[Turn]], before: dict[str, float]) -> dict[str, float]:
    """Assert that nearly every turn but the first of each run continues exactly, by the endpoint's count too. Return
    the endpoint's counts."""
    linear = sum(len(turns) - 1 for turns in runs)
    assert linear >= RUNS, "agents that hardly speak show nothing"
    assert sum(map(continued, runs)) >= LINEAR * linear
    counts = {name: count - before[name] for name, count in counted(world).items()}
    assert counts["turns"] == linear + len(runs) and counts["turns_begun"] == len(runs)
    assert counts["turns_continued"] >= LINEAR * linear
    assert counts["tokens_rerendered"] > 5 * linear, "rendered anew, these conversations are other tokens"
    return counts


def played(world: World, play: Callable[[str, str], Awaitable[Any]], runs: int = RUNS) -> list[list[Turn]]:
    """Return the recorded turns of some runs of an agent."""

    async def all_of_them() -> list[list[Turn]]:
        places = asyncio.Semaphore(AT_ONCE)

        async def one() -> list[Turn]:
            async with places:
                claim = world.attempt()
                await play(world.url, claim.model_key)
                return world.turns(claim.attempt_id)

        return await asyncio.gather(*(one() for _ in range(runs)))

    return asyncio.run(all_of_them())


@pytest.mark.parametrize("streamed", [False, True])
def test_langgraph(caller: World, streamed: bool) -> None:
    before = counted(caller)
    runs = played(caller, lambda url, key: asyncio.to_thread(unmodified.langgraph, url, key, streamed=streamed))
    assert_linear(caller, runs, before)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("responses", [False, True])
def test_openai_agents(caller: World, responses: bool, streamed: bool) -> None:
    before = counted(caller)
    options: dict[str, Any] = {"responses": responses, "streamed": streamed}
    runs = played(caller, lambda url, key: unmodified.openai_agents(url, key, **options))
    assert_linear(caller, runs, before)


@pytest.mark.parametrize("streamed", [False, True])
def test_requests(caller: World, streamed: bool) -> None:
    before = counted(caller)
    runs = played(caller, lambda url, key: asyncio.to_thread(unmodified.plain, url, key, streamed=streamed))
    assert_linear(caller, runs, before)


@pytest.mark.parametrize("streamed", [False, True])
def test_smolagents(coder: World, streamed: bool) -> None:
    """The agent repeats the text that was cut off and adds its own: both are context of the same conversation."""
    before = counted(coder)
    options: dict[str, Any] = {"kind": smolagents.CodeAgent, "streamed": streamed}
    runs = played(coder, lambda url, key: asyncio.to_thread(unmodified.smolagent, url, key, **options))
    assert_linear(coder, runs, before)
    decode = coder.endpoint.chat.tokenizer.decode
    assert all("</code>\nCalling tools:" in decode(turns[-1].prompt) for turns in runs if len(turns) > 1)


def test_an_agent_that_rewrites_its_calls_as_text_branches(caller: World) -> None:
    """smolagents' other agent writes its calls into the history as text that no model sampled."""
    before, most = counted(caller), 4

    def play(url: str, key: str) -> Awaitable[None]:
        return asyncio.to_thread(
            unmodified.smolagent, url, key, smolagents.ToolCallingAgent, streamed=False, most=most, tool_choice="auto"
        )

    runs = played(caller, play, 4)
    counts = {name: count - before[name] for name, count in counted(caller).items()}
    assert {len(turns) for turns in runs} == {most + 1}, "as many as it may, and one to conclude"
    assert counts["turns"] == sum(map(len, runs)) and counts["turns_branched"] >= len(runs)
    assert counts["turns_continued"] == sum(map(continued, runs))


def test_the_tokens_that_a_template_would_have_changed_are_counted(caller: World) -> None:
    """The expected count comes from rendering each conversation anew."""
    before, wanted = counted(caller), 0
    for _ in range(4):
        claim = caller.attempt()
        last = unmodified.plain(caller.url, claim.model_key)
        turns = caller.turns(claim.attempt_id)
        ends = [at for at, message in enumerate(last) if at > 2 and message["role"] == "assistant"] + [len(last)]
        for turn, end in zip(turns[1:], ends, strict=False):
            served, rerendered = (
                turn.prompt.tolist(),
                caller.endpoint.chat.prompt_ids(last[:end], [unmodified.LOOK]).tolist(),
            )
            begin = alike(served, rerendered)
            wanted += max(len(served), len(rerendered)) - begin - alike(served[begin:][::-1], rerendered[begin:][::-1])
    assert counted(caller)["tokens_rerendered"] - before["tokens_rerendered"] == wanted > 0


def alike(one: list[int], other: list[int]) -> int:
    """Return the length of the common prefix of two lists."""
    differ = (at for at, pair in enumerate(zip(one, other, strict=False)) if len(set(pair)) > 1)
    return next(differ, min(len(one), len(other)))


@pytest.mark.soak
def test_hundreds_of_runs(caller: World, coder: World) -> None:
    kinds: list[tuple[World, Callable[[str, str], Awaitable[Any]]]] = [
        (caller, lambda url, key: asyncio.to_thread(unmodified.langgraph, url, key, streamed=False)),
        (caller, lambda url, key: unmodified.openai_agents(url, key, responses=True, streamed=True)),
        (caller, lambda url, key: unmodified.openai_agents(url, key, responses=False, streamed=True)),
        (caller, lambda url, key: asyncio.to_thread(unmodified.plain, url, key)),
        (
            coder,
            lambda url, key: asyncio.to_thread(unmodified.smolagent, url, key, smolagents.CodeAgent, streamed=False),
        ),
    ]
    for world, play in kinds:
        before = counted(world)
        assert_linear(world, played(world, play, 60), before)
