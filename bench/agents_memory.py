"""Show that memory stays constant over many rollouts: a run keeps only its open work.

    python -m bench.agents_memory [--rollouts 100000] [--plot FILE] [--json FILE]

One process has all parts of an agent run except the model: the journal in a file, the rollout queue, the server, the
endpoint over an engine that takes no time, and a runner on a thread. Each rollout is enqueued and claimed. It makes one
call to the model over HTTP, records an event, gets a reward and is finished. Every 64 ended rollouts are admitted to a
step. The output has the process's resident memory and the size of the journal file.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

from matplotlib.figure import Figure

import etude
from bench.agents_load import answered, body_of
from bench.agents_server import Null, chat
from bench.common import written
from etude.agents.agent import LLM
from etude.agents.execution.threads import ThreadRunners
from etude.agents.proxy.app import create_router
from etude.agents.proxy.endpoint import ModelEndpoint
from etude.observe import make_console, progress
from etude.records import Task
from etude.store import RolloutsAdmitted, open_store
from etude.store.http.server import serve
from etude.store.queue.keys import Keyring
from etude.store.queue.local_queue import LocalRolloutQueue
from etude.store.queue.rollout_queue import RolloutRequest

OPEN, STEP, SAMPLED = 256, 64, 1000
"""Rollouts that are enqueued at once, in a step, and between two measurements of memory."""
MIB = 2**20


@etude.agent
async def asks(task: Task, llm: LLM) -> float:
    """Call the model once, and record an event."""
    place = urlsplit(llm.base_url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    body = body_of(0)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {place.netloc}\r\nauthorization: Bearer {llm.api_key}\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
    try:
        await answered(reader, writer, head.encode() + body)
    finally:
        writer.close()
    etude.emit.event("asked", {"n": task["n"]})
    return 1.0


@dataclass(frozen=True)
class Sampled:
    """The memory after a number of rollouts."""

    rollouts: int
    seconds: float
    resident: int
    """Bytes."""
    file: int
    """Bytes of the journal."""


async def played(queue: LocalRolloutQueue, count: int, look: Callable[[int], None]) -> None:
    """Play this number of rollouts, and measure the memory regularly."""
    cursor, queued, ended, step = 0, 0, 0, 0
    done: list[int] = []
    while ended < count:
        many = min(OPEN - (queued - ended), count - queued)
        if many > 0:
            await queue.enqueue([RolloutRequest(Task(n, {"n": n})) for n in range(queued, queued + many)])
            queued += many
        cursor, states = await queue.wait(cursor, 60.0)
        assert states and all(state.status == "succeeded" for state in states), "a rollout did not succeed"
        done += [state.id for state in states]
        while len(done) >= STEP:
            queue.journal.append([RolloutsAdmitted(step, tuple(done[:STEP]), end=0, version=0)])
            done, step = done[STEP:], step + 1
        before, ended = ended, ended + len(states)
        if before // SAMPLED < ended // SAMPLED:
            look(ended)


def measured(folder: Path, count: int, look: Callable[[Sampled], None]) -> None:
    """Play this number of rollouts with all parts of a run."""
    keyring, talk = Keyring(), chat(folder / "tokenizer")
    journal = folder / "journal.sqlite"
    queue = LocalRolloutQueue(open_store(journal), keyring)
    endpoint = ModelEndpoint(queue, keyring, talk, Null(talk))
    began = time.perf_counter()
    with ExitStack() as stack:
        stack.callback(queue.journal.close)
        stack.callback(lambda: asyncio.run(queue.close()))
        serving = stack.enter_context(serve(queue, keyring, routers=[create_router(endpoint)], lifespans=[endpoint]))
        asyncio.run(queue.put_resource("endpoint", {"base_url": f"{serving.url}/v1", "model": endpoint.model}))
        stack.enter_context(ThreadRunners(queue, asks, 1, max_concurrency=32))
        asyncio.run(
            played(
                queue,
                count,
                lambda ended: look(Sampled(ended, time.perf_counter() - began, _resident(), journal.stat().st_size)),
            )
        )


def _resident() -> int:
    """Return the bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def drawn(samples: Sequence[Sampled], path: Path) -> None:
    """Draw the picture of the measurements."""
    figure = Figure(figsize=(6.4, 3.2), dpi=100, layout="constrained")
    axes = figure.subplots()
    rollouts = [sample.rollouts for sample in samples]
    axes.plot(rollouts, [sample.resident / MIB for sample in samples], label="memory of the process")
    axes.plot(rollouts, [sample.file / MIB for sample in samples], "--", label="file of the journal")
    axes.set(xlabel="rollouts played", ylabel="MiB", ylim=(0, None), xlim=(0, None))
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def main(argv: Sequence[str] | None = None) -> int:
    """Play the rollouts, print the table, and draw the plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=100_000, help="how many are played")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw it there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything there")
    arguments = parser.parse_args(argv)
    console = make_console()
    samples: list[Sampled] = []
    with tempfile.TemporaryDirectory() as folder, progress("rollouts", arguments.rollouts, console) as bar:

        def look(sampled: Sampled) -> None:
            bar.advance(sampled.rollouts - (samples[-1].rollouts if samples else 0))
            samples.append(sampled)

        measured(Path(folder), arguments.rollouts, look)
    tenth, last = samples[len(samples) // 10], samples[-1]
    console.print(
        f"After {tenth.rollouts:,} rollouts the process had {tenth.resident / MIB:.0f} MiB, after {last.rollouts:,} "
        f"{last.resident / MIB:.0f}; the journal's file {tenth.file / MIB:.0f} and {last.file / MIB:.0f}. "
        f"{last.rollouts / last.seconds:.0f} rollouts a second.",
        soft_wrap=True,
    )
    if arguments.plot:
        drawn(samples, arguments.plot)
    if arguments.json:
        ratios = {"resident": last.resident / tenth.resident, "file": last.file / tenth.file}
        written(arguments.json, [asdict(sample) for sample in samples], ratios)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
