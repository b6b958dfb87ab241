"""Agent Lightning's side of `bench.agents`, in its own process: it plays the number of rollouts of each input line.

    python -m bench.agents_agl STRATEGY

It runs in Agent Lightning's own Python environment, without Etude, so it imports nothing of it. It is used as in its
documentation: an algorithm enqueues rollouts and waits for them. The store is in memory, with one runner (`shm`; more
are refused by default) or two (`cs`). It has its cheapest tracer that needs no other service. Its runners poll every 50
ms instead of every five seconds.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from importlib.metadata import version
from typing import Any

import agentlightning as agl  # type: ignore[import-not-found]
from agentlightning.types import EnqueueRolloutRequest  # type: ignore[import-not-found]

RUNNERS = {"shm": 1, "cs": 2}


class Trivial(agl.LitAgent):  # type: ignore[misc]
    """An agent that returns one."""

    def rollout(self, task: Any, resources: Any, rollout: Any) -> float:  # noqa: ARG002
        """Play an attempt."""
        return 1.0


class Timed(agl.Algorithm):  # type: ignore[misc]
    """Plays the number of rollouts of each input line, and prints the time."""

    def __init__(self, output: int) -> None:
        super().__init__()
        self.output = output

    async def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:  # noqa: ARG002
        """Run until the input ends."""
        store = self.get_store()
        await store.update_resources("nothing", {})
        await self.played(20)
        self.say({"agentlightning": version("agentlightning"), "litellm": version("litellm")})
        while line := await asyncio.to_thread(sys.stdin.readline):
            began = time.perf_counter()
            await self.played(int(line))
            self.say({"seconds": time.perf_counter() - began})

    async def played(self, count: int) -> None:
        """Enqueue this number of rollouts, and wait until all have succeeded."""
        store = self.get_store()
        queued = await store.enqueue_many_rollouts([EnqueueRolloutRequest(input={"n": n}) for n in range(count)])
        ended = await store.wait_for_rollouts(rollout_ids=[rollout.rollout_id for rollout in queued], timeout=300)
        assert [rollout.status for rollout in ended] == ["succeeded"] * count, "a rollout did not succeed"

    def say(self, message: dict[str, Any]) -> None:
        """Write one line to the real standard output, apart from the output of libraries."""
        os.write(self.output, json.dumps(message).encode() + b"\n")


def main(strategy: str) -> None:
    """Play."""
    output = os.dup(1)
    os.dup2(2, 1)
    tracer = agl.OtelTracer()
    runner = agl.LitAgentRunner(tracer, poll_interval=0.05, interval_jitter=0.01)
    how = {"type": strategy, "n_runners": RUNNERS[strategy]}
    agl.Trainer(algorithm=Timed(output), n_runners=RUNNERS[strategy], strategy=how, tracer=tracer, runner=runner).fit(
        Trivial(), [0]
    )


if __name__ == "__main__":
    main(sys.argv[1])
