"""Many agents at once, of five kinds, some of which drop their connection: no call fails, and no turn is lost."""

from __future__ import annotations

import asyncio
import json
import random
import resource
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest

from etude.records import Outcome
from etude.store import open_store
from etude.store.queue.rollout_queue import AttemptId, AttemptReport
from tests.agents.proxy.test_forms import CALL, NAMED, TOOLS, USER, check_person, random_model
from tests.agents.proxy.world import World

AGENTS = 128
DROPS = 0.1
"""The share of calls whose client leaves before it has read the answer."""
TURNS = 3
CLAUDE_TOOL = {"name": "look", "description": "It does.", "input_schema": CALL}
Say = Callable[..., Awaitable[dict[str, Any] | None]]


@dataclass
class Seen:
    """The answers and the failures of all agents together."""

    answers: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    dropped: int = 0
    lost: list[str] = field(default_factory=list)


@dataclass
class Caller:
    """The calls of one attempt."""

    client: httpx2.AsyncClient
    root: str
    key: str
    seen: Seen
    chance: random.Random
    whole: int = 0
    """Answers that were read to their end."""
    begun: int = 0

    async def say(self, path: str, **body: Any) -> dict[str, Any] | None:
        """Send a call; return the answer, or None if the client left before its end."""
        self.begun += 1
        drops = self.chance.random() < DROPS
        headers = {"authorization": f"Bearer {self.key}"}
        body = {"model": "policy", "max_tokens": 120, **body}
        lines: list[str] = []
        async with self.client.stream("POST", self.root + path, json=body, headers=headers) as response:
            self.seen.statuses[response.status_code] += 1
            if drops:
                self.seen.dropped += 1
                return None
            async for line in response.aiter_lines():
                lines.append(line)
        if response.status_code != 200:
            return None
        self.whole += 1
        self.seen.answers[path] += 1
        return {"stream": lines} if body.get("stream") else json.loads("\n".join(lines))


async def chat(caller: Caller) -> None:
    """Call tools by chat completions, turn after turn."""
    messages: list[Any] = [USER]
    for _ in range(TURNS):
        body = {"messages": messages, "tools": TOOLS, "tool_choice": "required"}
        answer = await caller.say("/v1/chat/completions", **body)
        if answer is None or not (calls := answer["choices"][0]["message"].get("tool_calls")):
            return
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "12 degrees"} for call in calls]
        messages = [*messages, answer["choices"][0]["message"], *results]


async def streamed_chat(caller: Caller) -> None:
    """Read answers as they come."""
    for _ in range(TURNS):
        answer = await caller.say("/v1/chat/completions", messages=[USER], stream=True)
        if answer is not None and "data: [DONE]" not in answer["stream"]:
            caller.seen.lost.append(f"a stream ended with {answer['stream'][-3:]}")


async def responses(caller: Caller) -> None:
    """Go on by the Responses interface."""
    items: list[Any] = [{"role": "user", "content": "?"}]
    for _ in range(TURNS):
        answer = await caller.say("/v1/responses", input=items, max_tokens=None, max_output_tokens=60)
        if answer is None:
            return
        items = [*items, *answer["output"], {"role": "user", "content": "and?"}]


async def messages_of(caller: Caller) -> None:
    """Go on by the Messages interface, in streams."""
    for _ in range(TURNS):
        choice = {"type": "tool", "name": "look"}
        messages = [USER]
        body = {"messages": messages, "tools": [CLAUDE_TOOL], "tool_choice": choice, "stream": True}
        answer = await caller.say("/v1/messages", **body)
        if answer is not None and not any("message_stop" in line for line in answer["stream"]):
            caller.seen.lost.append(f"a stream ended with {answer['stream'][-3:]}")


async def structured(caller: Caller) -> None:
    """Ask for JSON by a schema."""
    for _ in range(TURNS):
        form = {"type": "json_schema", "json_schema": NAMED}
        answer = await caller.say("/v1/chat/completions", messages=[USER], response_format=form)
        if answer is not None and answer["choices"][0]["finish_reason"] == "stop":
            check_person(answer["choices"][0]["message"]["content"])


KINDS = (chat, streamed_chat, responses, messages_of, structured)


async def play(world: World, seconds: float) -> Seen:
    """Let all agents play attempts for this time; compare what each has read with what is recorded."""
    seen = Seen()
    end = time.monotonic() + seconds
    limits = httpx2.Limits(max_connections=2 * AGENTS)

    async def agent(number: int, client: httpx2.AsyncClient) -> None:
        attempts = 0
        while time.monotonic() < end:
            claim = await asyncio.to_thread(world.attempt)
            chance = random.Random(f"{number} {attempts}")
            caller = Caller(client, world.root, claim.model_key, seen, chance)
            await KINDS[number % len(KINDS)](caller)
            await asyncio.to_thread(check, world, claim.attempt_id, caller)
            attempts += 1

    async with httpx2.AsyncClient(timeout=120, limits=limits) as client, asyncio.TaskGroup() as group:
        for number in range(AGENTS):
            group.create_task(agent(number, client))
    return seen


def check(world: World, attempt: AttemptId, caller: Caller) -> None:
    """End an attempt. Every answer that was read is a turn; a call that was left may be one."""
    world.do(world.queue.finish(attempt, AttemptReport(Outcome.SUCCEEDED)))
    turns = len(world.turns(attempt))
    if not caller.whole <= turns <= caller.begun:
        caller.seen.lost.append(f"{turns} turns of {caller.whole} answers and {caller.begun} calls")


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


@pytest.mark.soak
def test_many_agents_of_five_kinds_lose_nothing_and_memory_stays(tmp_path: Path) -> None:
    with (
        closing(open_store(tmp_path / "journal.db")) as journal,
        random_model("hermes", tmp_path / "model", journal=journal) as world,
    ):
        asyncio.run(play(world, 60))
        before = resident_bytes()
        seen = asyncio.run(play(world, 540))
        after = resident_bytes()
    print(dict(seen.answers), dict(seen.statuses), f"{seen.dropped} left, {before >> 20} → {after >> 20} MiB")
    assert not seen.lost, seen.lost[:5]
    assert set(seen.statuses) == {200} and len(seen.answers) == 3 and seen.dropped
    assert after < 1.1 * before + (32 << 20)
