"""Runs for the tests of the viewer, written as a run writes them, and requests to the viewer's app."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx2
import numpy as np

from etude.integrity import write_text
from etude.observe import JsonlSink, RunInfo
from etude.records import Completion, Outcome, Turn
from etude.store import (
    AttemptEnded,
    AttemptRewarded,
    AttemptStarted,
    Event,
    RolloutQueued,
    RolloutsAdmitted,
    TaskDropped,
    TaskIssued,
    TurnRecorded,
    open_store,
)
from etude.tools.replay.files import FOLDER, write_replay
from etude.view.catalog import RunCatalog
from etude.view.server import create_app

KEY = "a-key-of-the-tests"
CHANGES = {"loss.name": ["ppo", "gspo"], "loss.clip_high": [0.2, 0.3]}
PHASES = {"collect": 1.0, "annotate": 0.25, "update": 0.5, "publish": 0.125}


def turn(tokens: int, version: int, text: str = "42", prompt: int = 4) -> Turn:
    """Return a turn of this many tokens, sampled by one policy version."""
    ids = np.arange(tokens, dtype=np.int32)
    logp = np.full(tokens, -0.5, np.float32)
    return Turn(np.arange(prompt, dtype=np.int32), Completion(ids, logp, np.full(tokens, version), "stop", text), 0)


def rollout_events(
    rollout: int, reward: float | None, answer: Turn, parts: Mapping[str, float] | None = None
) -> list[Event]:
    """Return the events of one attempt, with a reward or with a failure."""
    begun: list[Event] = [AttemptStarted(rollout, 0, at=100.0 + rollout), TurnRecorded(rollout, 0, answer)]
    if reward is None:
        return [*begun, AttemptEnded(rollout, 0, Outcome.FAILED, "the tool broke")]
    return [*begun, AttemptRewarded(rollout, 0, reward, parts or {}), AttemptEnded(rollout, 0, Outcome.SUCCEEDED)]


def write_journal(
    directory: Path,
    steps: int,
    groups: int = 4,
    size: int = 2,
    tokens: int = 3,
    lag: int = 0,
    texts: Sequence[str] = (),
) -> None:
    """Write a journal of these steps. Of each step one more group has equal rewards and is dropped."""
    directory.mkdir(parents=True, exist_ok=True)
    with closing(open_store(directory / "journal.sqlite")) as store:
        task = rollout = 0
        for step in range(1, steps + 1):
            events: list[Event] = []
            trained: list[int] = []
            for place in range(groups + 1):
                prompt = {"prompt": f"What is {task} + 1?", "ground_truth": str(task + 1)}
                events.append(TaskIssued(task, 10 * task, "sums", prompt))
                events += [RolloutQueued(rollout + sample, task, sample) for sample in range(size)]
                for sample in range(size):
                    text = texts[rollout % len(texts)] if texts else f"answer {rollout}"
                    answer = turn(tokens + sample, max(0, step - 1 - lag), text)
                    earned = 1.0 if place == groups else float(sample % 2)
                    events += rollout_events(rollout, earned, answer, {"right": earned})
                    if place < groups:
                        trained.append(rollout)
                    rollout += 1
                task += 1
            events += [TaskDropped(task - 1, step, "all rewards are equal")]
            store.append([*events, RolloutsAdmitted(step, tuple(trained), task, step - 1)])


def write_metrics(directory: Path, steps: int, first: int = 1, **values: float) -> None:
    """Write the metrics of these steps; the last one is evaluated."""
    sink = JsonlSink()
    sink.open(RunInfo("run", directory))
    total = 2.0
    for step in range(first, steps + 1):
        times = {"time/step": total} | {f"time/{name}": seconds for name, seconds in PHASES.items()}
        scores = {"eval/mean@1": 0.5} if step == steps else {}
        sink.log(step, {"reward": step / steps, "loss": 0.1, **values, **scores, **times})
    sink.close()


def write_collapse(directory: Path) -> None:
    """Write the metrics of a run whose policy is lost in the update of step 3."""
    sink = JsonlSink()
    sink.open(RunInfo("run", directory))
    for step in range(1, 11):
        lost = step > 3
        values = {"reward": 0.0 if lost else 0.5, "truncated": 0.95 if lost else 0.0, "learning_rate": 0.1}
        sink.log(step, values | {"zero_variance_share": float(lost), "grad_norm": 0.9})
    sink.close()


def write_run(directory: Path, steps: int = 3, options: str = "", **journal: Any) -> Path:
    """Write a run with options, metrics and a journal; return its directory."""
    write_journal(directory, steps, **journal)
    write_metrics(directory, steps)
    model = directory / "model"
    write_text(directory / "run.yaml", options or f"recipe: train\nsteps: {steps}\nmodel:\n  path: {model}\n")
    return directory


def replay_side(**metrics: float) -> dict[str, Any]:
    """Return the numbers of an algorithm in a replay."""
    numbers = ("updates", "gradient_norm", "change_norm", "tokens", "trained", "clipped", "masked", "level")
    return {**dict.fromkeys(numbers, 1), "dropped_rollouts": 0, "weight": 0.5, "metrics": metrics}


def write_step_replay(run: Path, changed: bool = False) -> str:
    """Write a replay of step 1, whose rollouts have three and four tokens in turns; return its name.

    The tokens of rollout 5 are of a second turn.
    """
    sides = ("recorded", "changed") if changed else ("recorded",)
    counts = [3 + rollout % 2 for rollout in range(8)]
    total = sum(counts)
    entries = [
        {"rollout": rollout, "group": rollout // 2, "reward": float(rollout % 2), "tokens": count}
        | {
            name: {"advantage": place - 0.5, "weight": 0.25, "clipped": 1, "masked": 0}
            for place, name in enumerate(sides)
        }
        for rollout, count in enumerate(counts)
    ]
    same = {"cosine": 0.5, "norm_ratio": 2.0, "identical": False}
    movers = [{"rollout": 1, "turn": 0, "index": 2, "id": 2, "recorded": 0.5, "changed": -0.5}]
    difference = {"gradient": same, "change": same, "token_weights": {"cosine": 0.1, "turned": 3}, "movers": movers}
    result = {
        "run": str(run),
        "step": 1,
        "changed": CHANGES if changed else {},
        "measured": {},
        "exact": None,
        "sides": {"recorded": replay_side(loss=0.1), "changed": replay_side(loss=0.2) if changed else None},
        "rollouts": entries,
        **({"difference": difference} if changed else {}),
    }
    index = np.concatenate([np.arange(count) for count in counts])
    place = np.arange(total, dtype=np.float32)
    columns: dict[str, Any] = {
        "rollout": np.repeat(np.arange(8), counts),
        "turn": np.repeat(np.arange(8) == 5, counts).astype(np.int32),
        "index": index,
        "id": index.astype(np.int32),
        "start_logp": np.full(total, -1.0, np.float32),
        "ref_logp": np.full(total, -1.5, np.float32),
        "entropy": place,
    }
    for number, name in enumerate(sides):
        columns |= {f"advantage_{name}": place + 100 * number, f"weight_{name}": -place.astype(np.float64)}
        columns |= {f"state_{name}": np.full(total, number, np.uint8)}
        columns |= {
            f"logp_{name}": np.full(total, -1.0, np.float32),
            f"old_logp_{name}": np.full(total, -2.0, np.float32),
        }
    return Path(write_replay(run / FOLDER, 1, result, columns)["file"]).stem


class Viewer:
    """The viewer's app over a directory or a database, with requests in memory."""

    def __init__(self, root: Path | str) -> None:
        self.catalog = RunCatalog(root)
        self.app = create_app(self.catalog, KEY)

    def ask(
        self, path: str, *, key: str = KEY, method: str = "GET", headers: Mapping[str, str] | None = None
    ) -> httpx2.Response:
        """Send a request; `path` is behind the key."""

        async def send() -> httpx2.Response:
            transport = httpx2.ASGITransport(app=self.app, raise_app_exceptions=False)
            async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1:8720") as client:
                return await client.request(method, f"/{key}/{path}" if key else f"/{path}", headers=headers)

        return asyncio.run(send())

    def get(self, name: str, **parameters: Any) -> Any:
        """Return the record of a query."""
        reply = self.ask(f"api/{name}?{httpx2.QueryParams(parameters)}")
        assert reply.status_code == 200, reply.text
        return json.loads(reply.content)
