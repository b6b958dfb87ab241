"""A process that does one piece of each kind of work that has a time limit. Its parent stops it meanwhile.

Two processes load this file, so it imports nothing that loads torch.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable

import numpy as np
import uvloop

import etude
from etude import running_time
from etude.agents.runner import Runner
from etude.chat import RenderedPrompt
from etude.recipes.collect.player import EnginePlayer
from etude.recipes.event_loop import LoopThread
from etude.records import Completion, SamplingParams, Task
from etude.rewards import FunctionReward, Judge, JudgingConfig
from etude.running_time import time_limit
from etude.store import open_store
from etude.store.queue.local_queue import LocalRolloutQueue
from etude.store.queue.rollout_queue import RolloutLimits, RolloutRequest
from tests.agents.rollout_queues import QUICK, ends

LIMIT_S, SLICES = 3.0, 10
"""The limit of each piece of work, and the parts of a tenth of a second that it takes."""
SILENCE_S = 2.0
"""Seconds without a heartbeat that cost a runner its attempts."""
TASK = Task(0, {"prompt": "1+1=", "row": 0})


async def slowly(task: Task, answer: str = "") -> float:
    """Wait, and return a reward."""
    for _ in range(SLICES):
        await asyncio.sleep(0.1)
    return 1.0


def slowly_on_a_thread(task: Task, answer: str) -> float:
    """Wait, and return a reward."""
    for _ in range(SLICES):
        time.sleep(0.1)
    return 1.0


class SlowEngine:
    """An engine that waits before it answers."""

    version = 0

    async def generate(self, *_: object, on_start: Callable[[], None], **options: object) -> Completion:
        """Wait, and answer."""
        on_start()
        await slowly(TASK)
        ids = np.ones(3, np.int32)
        return Completion(ids, np.zeros(3, np.float32), np.zeros(3, np.int32), "stop", "111")


async def played_by_an_agent() -> str:
    """Return the status of a rollout that an agent plays."""
    queue = LocalRolloutQueue(open_store())
    limits = RolloutLimits(timeout_s=LIMIT_S, unresponsive_s=SILENCE_S, max_attempts=1)
    await queue.enqueue([RolloutRequest(TASK, limits=limits)])
    runner = Runner(queue, etude.agent(slowly), timeouts=QUICK)
    running = asyncio.create_task(runner.run())
    (state,) = await ends(queue, 1, 60.0)
    runner.stop()
    await running
    await queue.close()
    return state.status.value


async def answered_by_an_engine(judge: Judge) -> str:
    """Return the outcome of an attempt with an engine."""
    made = {"engine": SlowEngine(), "judge": judge, "timeout": LIMIT_S, "max_concurrency": 1, "episodes": None}
    player = EnginePlayer(render=lambda _: RenderedPrompt(np.ones(3, np.int32)), **made)  # type: ignore[arg-type]
    return (await player.play(TASK, SamplingParams(max_tokens=4), lambda turn: turn)).verdict.outcome.value


async def limited() -> str:
    """Return whether a block is within its limit."""
    try:
        async with time_limit(LIMIT_S):
            await slowly(TASK)
    except TimeoutError:
        return "timed_out"
    return "succeeded"


async def all_of_it(judges: dict[str, Judge]) -> dict[str, str]:
    """Do all work, and return the outcome of each piece."""

    async def judged(judge: Judge) -> str:
        return (await judge.judge(TASK, "2")).outcome.value

    work: dict[str, Awaitable[str]] = {name: judged(judge) for name, judge in judges.items()}
    work["an agent"] = played_by_an_agent()
    work["an engine"] = answered_by_an_engine(judges["a quick reward"])
    work["a block in another event loop"] = asyncio.to_thread(uvloop.run, limited())
    asyncio.get_running_loop().call_later(0.5, lambda: print("started", flush=True))
    return dict(zip(work, await asyncio.gather(*work.values()), strict=True))


def main() -> None:
    """Do the work, and print the outcomes."""
    running_time.TICK_S, running_time.MAX_GAP_S = 0.1, 0.5
    judging = JudgingConfig(timeout=LIMIT_S)
    path = "tests.stopped_work:slowly_on_a_thread"
    with (
        LoopThread() as loop,
        Judge(lambda task, answer: 1.0) as quick,
        Judge(slowly, judging) as in_a_coroutine,
        Judge(slowly_on_a_thread, judging) as on_a_thread,
        Judge(FunctionReward(path=path), judging.model_copy(update={"workers": 1})) as in_a_process,
    ):
        asyncio.run(in_a_process.judge(TASK, "2"))  # its process has started
        judges = {
            "a quick reward": quick,
            "a coroutine": in_a_coroutine,
            "a thread": on_a_thread,
            "a process": in_a_process,
        }
        print(json.dumps(loop.run(all_of_it(judges))), flush=True)


if __name__ == "__main__":
    main()
