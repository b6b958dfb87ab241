"""Time the start of a runner: seconds from before `import etude` to its first claim.

python -m bench.agents_start URL KEY
"""

import sys
import time

began = time.perf_counter()

import asyncio  # noqa: E402  # as Python had begun, and nothing else

import etude  # noqa: E402
from etude.agents.runner import Runner  # noqa: E402
from etude.records import Task  # noqa: E402
from etude.store.http.remote_queue import RemoteRolloutQueue  # noqa: E402


@etude.agent
async def first(task: Task) -> float:  # noqa: ARG001
    """Print the time of the call."""
    print(time.perf_counter() - began, flush=True)
    runner.stop()
    return 1.0


async def main() -> None:
    """Claim, play, stop."""
    global runner
    queue = RemoteRolloutQueue(*sys.argv[1:3])
    runner = Runner(queue, first, max_concurrency=1)
    await runner.run()
    await queue.close()


if __name__ == "__main__":
    asyncio.run(main())
