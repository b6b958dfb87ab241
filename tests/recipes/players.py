"""Agents for tests of runs: one that covers all forms of credit, and one that fails in every way."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import openai

import etude
from etude.agents import LLM
from etude.agents.agent import RolloutInfo
from etude.errors import StoreError
from etude.records import Task

TALKS: dict[str, Any] = {
    "agent.path": f"{__name__}:talker",
    "reward": "environment",
    "reward.path": None,
    "collect.tasks": 4,
    "collect.group_size": 4,
    "steps": 1,
    "train.max_grad_norm": 1e9,
}
"""The options of a short run by `talker`."""
PLAYED: list[tuple[int, int]] = []
"""The attempts that were played in this process."""
max_concurrency, most = [0], [0]
"""The number of attempts under way, and their maximum."""
cancel: list[Callable[[int], Awaitable[None]]] = []
"""The function that cancels a rollout from outside."""


def share(text: str) -> float:
    """Return the share of digits."""
    return sum(letter.isdigit() for letter in text) / max(len(text), 1)


async def say(llm: LLM, prompt: str, tag: str = "", state: str = "", **more: Any) -> str:
    """Return the model's continuation of a prompt."""
    headers = {"x-etude-tags": tag, "x-etude-state": state}
    response = await llm.async_client.completions.create(
        model=llm.model, prompt=prompt, extra_headers={k: v for k, v in headers.items() if v}, **more
    )
    return str(response.choices[0].text)


@etude.agent
def repeater(task: Task, llm: LLM) -> float:
    """Continue the prompt twice, and pay for the share of digits."""
    said = ""
    for _ in range(2):
        said += llm.client.completions.create(model=llm.model, prompt=f"{task['prompt']}{said}").choices[0].text
    return share(said)


@etude.agent
async def talker(task: Task, llm: LLM, rollout: RolloutInfo) -> dict[str, float]:
    """Plan, continue from the plan, and start anew with the result: two rows of three turns."""
    PLAYED.append((rollout.id, rollout.attempt))
    max_concurrency[0] += 1
    most[0] = max(most[0], max_concurrency[0])
    try:
        prompt = str(task["prompt"])
        plan = await say(llm, prompt, "planner", "start", top_p=0.2)
        etude.emit.reward(share(plan), turn=0)
        done = await say(llm, f"{prompt}{plan}=", "solver", "middle")
        etude.emit.reward({"form": share(done) / 2}, turn=1)
        last = await say(llm, f"so {done[:3]}", "solver", f"end {len(done)}")
        etude.emit.event("said", {"last": last})
        return {"first": float("1" in last), "odd": len(done) / 8 + share(last) / 4}
    finally:
        max_concurrency[0] -= 1


@etude.agent
async def seeded(task: Task, llm: LLM) -> float:
    """Make one call with a fixed seed."""
    return share(await say(llm, str(task["prompt"]), seed=5))


@etude.agent
async def chooser(task: Task, llm: LLM) -> float:
    """Choose among some words, and be right with one of them."""
    words = ["red", "blue", "black"]
    return float(await say(llm, str(task["prompt"]), extra_body={"guided_choice": words}) == "blue")


@etude.agent
async def forker(task: Task, llm: LLM) -> float:
    """Make one call, then two calls at the same time that do not repeat it."""
    text = await say(llm, str(task["prompt"]))
    both = await asyncio.gather(say(llm, f"a {text}"), say(llm, f"b {text}"))
    return share("".join(both))


@etude.agent
async def loser(task: Task, llm: LLM, rollout: RolloutInfo) -> float | None:
    """Fail in one of several ways, by the rollout's place in its group."""
    how = rollout.id % 8
    if how == 0:
        raise ValueError("I do not know.")
    if how == 1:
        await asyncio.sleep(60)
    if how == 2:
        return 0.5
    text = await say(llm, str(task["prompt"]))
    if how == 3:
        return None
    if how == 4:
        try:
            await say(llm, "1+" * 90)
        except openai.BadRequestError:
            return 0.25
    if how == 5 and rollout.attempt == 0:
        raise StoreError("The store was away.")
    if how == 5 and rollout.attempt == 1:
        raise ValueError("Not yet.")
    if how == 6:
        await cancel[0](rollout.id)
        await asyncio.sleep(60)
    return share(text)


@etude.agent
async def late_failure(task: Task, llm: LLM, rollout: RolloutInfo) -> float:
    """Report a reward, and raise afterwards in every other rollout."""
    text = await say(llm, str(task["prompt"]))
    if rollout.id % 2:
        etude.emit.reward(share(text), turn=0)
        etude.emit.reward(0.75)
        raise ValueError("too late")
    return share(text)


@etude.agent
async def silent(task: Task) -> float:
    """Return a reward without a call of the model."""
    return 1.0


@etude.agent
async def quiet(task: Task, llm: LLM) -> None:
    """Make one call, and return no reward."""
    await say(llm, str(task["prompt"]))


@etude.agent
async def sleeper(task: Task) -> float:
    """Take half a second."""
    await asyncio.sleep(0.5)
    return 1.0
