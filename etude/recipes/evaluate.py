"""Scores the policy on tasks that it is never trained on, with its own sampling options.

Each task is answered `samples` times. For each data source, and over all, the metrics are the mean reward (`mean@n`)
and the best of k (`best@k`). For rewards of 0 and 1 the latter is pass@k, estimated without bias from all n. Where the
reward extracts an answer from the text, there is also the reward of the most frequent answer (`maj@n`). The answers are
in `evaluations/step-….jsonl` of the run.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from etude.chat import PromptReader
from etude.config import Config
from etude.config.only_with import OnlyWith
from etude.data import Dataset
from etude.observe import Mean, Metrics, Sum
from etude.recipes.collect.player import AttemptPlayer
from etude.recipes.collect.sampling import EvaluationSampling, SamplingConfig, derived_seed
from etude.recipes.event_loop import LoopThread
from etude.records import Outcome, SamplingParams, Task
from etude.rewards import Judge
from etude.rollout import ServerConfig

BESIDE = "lets the trainer go on while the policy is scored"
KEEP_ADAPTERS = "`rollout=vllm`, `rollout.adapters=only` and a `lora.rank`"
TASKS_READ_AT_ONCE = 32
"""Tasks whose images are in memory until they are stored."""


class EvaluationConfig(Config):
    """Options of the scoring on `data.val`."""

    every: int = Field(0, ge=0, description="score every n steps, and after the last; 0 scores after the last only")
    when: Annotated[
        Literal["between", "beside"],
        OnlyWith(
            "has_agents",
            lambda has_agents: not has_agents,
            f"{BESIDE}, and an agent's calls are drawn by the newest weights. Leave it out.",
        ),
        OnlyWith(
            "rollout",
            lambda engine: isinstance(engine, ServerConfig),
            f"{BESIDE}, and the embedded engine has one version of the weights, which the next publish replaces. Leave "
            f"it out, or have servers keep an adapter for each version: {KEEP_ADAPTERS}.",
        ),
        OnlyWith(
            "rollout.adapters",
            lambda adapters: adapters == "only",
            f"{BESIDE}, and each publish replaces the weights of all servers. Leave it out, or have them keep an "
            f"adapter for each version: {KEEP_ADAPTERS}.",
        ),
        OnlyWith(
            "max_staleness",
            bool,
            f"{BESIDE}, and with `max_staleness=0` servers keep one adapter, and the trainer waits for the answers of "
            "each step. Leave it out, or set `max_staleness=1` or more.",
        ),
    ] = Field(
        "between",
        description="`between`: the trainer waits for the scores; `beside`: it goes on, with servers that keep an "
        "adapter for each policy version",
    )
    first: bool = Field(True, description="score before the first step too")
    samples: int = Field(1, ge=1, le=1024, description="answers per task; more give steadier scores and take longer")
    limit: int | None = Field(None, ge=1, description="score on the first n tasks only")
    sampling: EvaluationSampling = Field(EvaluationSampling(), description="sampling of the answers that are scored")

    def score_settings(self, training: SamplingConfig) -> Mapping[str, Any]:
        """Return the settings that affect a score, besides the model and the tasks."""
        sampling = self.sampling.fill_from(training).model_dump(mode="json")
        return {"samples": self.samples, "limit": self.limit, "sampling": sampling}


@dataclass(frozen=True, slots=True)
class EvaluatedAnswer:
    """One answer with its score."""

    task: int
    source: str
    prompt: object
    text: str
    reward: float
    parts: Mapping[str, float]
    length: int
    finish: str
    error: str = ""
    failed: bool = False
    """True if it was not sampled or not judged. It counts as 0, which is no score."""
    extracted: str | None = None
    """The answer that the reward extracts from the text, equal for equivalent answers."""
    conversation: Sequence[Mapping[str, str]] = ()
    """All messages after the prompt with their roles, if the answer is the last of several turns."""
    truncated: bool = False
    """True if it was cut off."""
    version: int | None = None
    """The oldest policy version that drew a token of it; None without one."""


class Evaluator:
    """Samples answers, judges them, and reports scores.

    Waits for attempts, which have their own timeouts. One that fails counts as 0, and is counted as failed.
    """

    def __init__(
        self,
        config: EvaluationConfig,
        *,
        sampling: SamplingParams,
        seed: int,
        dataset: Dataset,
        player: AttemptPlayer,
        judge: Judge,
        loop: LoopThread,
        prompts: PromptReader | None = None,
        unrecorded: AttemptPlayer | None = None,
    ) -> None:
        """player: makes the attempts. loop: the event loop of the run, in which its judge lives too. prompts: reads the
        conversations of attempts; None if an attempt is one answer. unrecorded: makes attempts that are not written to
        the run's journal."""
        self._config = config
        self._sampling = sampling
        self._seed = seed
        self._dataset = dataset
        self._loop = loop
        self._judge = judge
        self._player = player
        self._unrecorded = unrecorded or player
        self._prompts = prompts

    @property
    def tasks(self) -> int:
        """The number of tasks that it scores on."""
        return min(len(self._dataset), self._config.limit or len(self._dataset))

    @property
    def samples(self) -> int:
        """The number of answers to each task."""
        return self._config.samples

    def is_due(self, step: int, last: int) -> bool:
        """Return whether to score after this step."""
        every = self._config.every
        return self.tasks > 0 and (
            step == last or (step == 0 and self._config.first) or bool(step and every and step % every == 0)
        )

    def with_sampling(self, **changes: Any) -> Evaluator:
        """Return an evaluator on the same tasks, with some sampling options changed. Its answers are not recorded: each
        time it asks for them again."""
        other = copy(self)
        other._player = self._unrecorded
        other._sampling = replace(self._sampling, **changes)
        return other

    def answer_all(self, on_answer: Callable[[], None] = lambda: None, *, step: int) -> list[EvaluatedAnswer]:
        """Return every answer to every task, in order. The same weights give the same answers at any step.

        on_answer: called after each answer. step: the step that is scored. Where answers are recorded, those of a step
        are sampled once, and read afterwards.
        """
        self._player.start_scoring(step)
        return self._loop.run(self._answer_tasks(on_answer))

    def begin(self, *, step: int) -> Future[list[EvaluatedAnswer]]:
        """Begin to answer, and return the future of every answer. The engine must keep the weights until then."""
        self._player.start_scoring(step)
        return self._loop.submit(self._answer_tasks(lambda: None))

    def wait_for(self, answers: Future[list[EvaluatedAnswer]]) -> list[EvaluatedAnswer]:
        """Return answers that were begun. If the wait is interrupted, they are cancelled."""

        async def wait() -> list[EvaluatedAnswer]:
            return await asyncio.wrap_future(answers)

        return self._loop.run(wait())

    def pop_metrics(self) -> Metrics:
        """Return the metrics of judging, if the judge counts any."""
        return self._judge.pop_metrics()

    async def _answer_tasks(self, on_answer: Callable[[], None]) -> list[EvaluatedAnswer]:
        tasks: list[Task] = []
        for start in range(0, self.tasks, TASKS_READ_AT_ONCE):
            rows = range(start, min(start + TASKS_READ_AT_ONCE, self.tasks))
            tasks += await asyncio.gather(*(self._player.store_images(self._dataset.task(row, row)) for row in rows))
        attempts = [
            asyncio.ensure_future(self._answer_once(task, n)) for task in tasks for n in range(self._config.samples)
        ]
        for attempt in attempts:
            attempt.add_done_callback(lambda ended: None if ended.cancelled() else on_answer())
        try:
            answers = list(await asyncio.gather(*attempts))
            self._player.end_scoring()
            return answers
        finally:
            for attempt in attempts:
                attempt.cancel()
            await asyncio.gather(*attempts, return_exceptions=True)

    async def _answer_once(self, task: Task, n: int) -> EvaluatedAnswer:
        def seed(turn: int) -> int:
            return derived_seed(self._seed, "evaluate", task.ordinal, n, *([turn] if turn else []))

        result = await self._player.play(task, self._sampling, seed)
        verdict, last = result.verdict, result.turns[-1].completion if result.turns else None
        failed = verdict.outcome is not Outcome.SUCCEEDED
        return EvaluatedAnswer(
            task.ordinal,
            task.source,
            self._player.prompt_of(task),
            "" if last is None else last.text,
            0.0 if failed else result.total,
            verdict.parts,
            sum(len(turn.completion.ids) for turn in result.turns),
            result.finish or "abort",
            verdict.error,
            failed,
            verdict.extracted_answer,
            () if self._prompts is None else self._prompts.read_rest(result.turns),
            result.truncated,
            result.oldest,
        )


def compute_scores(answers: Sequence[EvaluatedAnswer]) -> Metrics:
    """Return the scores over all tasks and, if there are several, for each data source."""
    metrics = Metrics()
    by_source: dict[str, list[EvaluatedAnswer]] = defaultdict(list)
    for answer in answers:
        by_source[answer.source].append(answer)
    for prefix, chosen in [("eval", answers), *((f"eval/{name}", part) for name, part in by_source.items())]:
        if prefix != "eval" and len(by_source) == 1:
            continue
        groups: dict[int, list[EvaluatedAnswer]] = defaultdict(list)
        for answer in chosen:
            groups[answer.task].append(answer)
        n = max((len(group) for group in groups.values()), default=0)
        votes = any(answer.extracted is not None for answer in chosen)
        for group in groups.values():
            earned = [answer.reward for answer in group]
            metrics.add(f"{prefix}/mean@{n}", Mean.over(sum(earned), len(earned)))
            for k in _powers(n):
                metrics.add(f"{prefix}/best@{k}", Mean.of(best_of(earned, k)))
            if n > 1 and votes:
                metrics.add(f"{prefix}/maj@{n}", Mean.of(_majority(group)))
        metrics.add(f"{prefix}/length", Mean.over(sum(a.length for a in chosen), len(chosen)))
        metrics.add(f"{prefix}/truncated", Mean.over(sum(a.truncated for a in chosen), len(chosen)))
        metrics.add(f"{prefix}/failed", Sum.of(sum(a.failed for a in chosen)))
    return metrics


def best_of(rewards: Sequence[float], k: int) -> float:
    """Return the expected best of k answers drawn without replacement from these n: unbiased, and pass@k for rewards of
    0 and 1."""
    ordered, n = sorted(rewards), len(rewards)
    return sum(r * math.comb(i, k - 1) for i, r in enumerate(ordered)) / math.comb(n, k)


def _powers(n: int) -> list[int]:
    """Return 2, 4, 8 … up to n, and n itself."""
    return sorted({2**i for i in range(1, n.bit_length()) if 2**i <= n} | ({n} if n > 1 else set()))


def _majority(group: Sequence[EvaluatedAnswer]) -> float:
    """Return the mean reward of the most frequent answer, and of the earliest one in a tie. Answers from which the
    reward extracts nothing have no vote. A group without votes has 0."""
    counts = Counter(answer.extracted for answer in group if answer.extracted is not None)
    if not counts:
        return 0.0
    most = max(counts, key=lambda extracted: counts[extracted])
    same = [answer.reward for answer in group if answer.extracted == most]
    return sum(same) / len(same)


def write_answers(answers: Sequence[EvaluatedAnswer], path: Path) -> None:
    """Write one JSON object per line: the prompt, the answer, its reward."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for a in answers:
            record = {name: getattr(a, name) for name in EvaluatedAnswer.__slots__}
            file.write(json.dumps(record, ensure_ascii=False, default=str) + "\n")
