"""Scoring the policy on tasks that it is never trained on, with sampling of its own.

Each task is answered `samples` times. For each data source, and over all: the mean reward (`mean@n`), the best of k
(`best@k`: for rewards of 0 and 1 that is pass@k, estimated without bias from all n), and the reward of the answer that
was given most often (`maj@n`). The answers lie in `evaluations/step_….jsonl` beside the run, to be looked at.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from etude.config import Config
from etude.data import Dataset
from etude.observe import Mean, Metrics, Sum
from etude.protocols import Generate
from etude.recipes.sampling import Sampling, derived_seed
from etude.recipes.sources import PromptIds
from etude.records import Outcome, Task
from etude.rewards import Judge

__all__ = ["Answer", "Evaluation", "Evaluator", "best_of", "scores"]


class Evaluation(Config):
    """When and how the policy is scored on `data.val`."""

    every: int = Field(0, ge=0, description="score every n steps, and after the last; 0 scores after the last only")
    first: bool = Field(True, description="score before the first step too")
    samples: int = Field(1, ge=1, description="answers to each task")
    limit: int | None = Field(None, ge=1, description="score on the first n tasks only")
    sampling: Sampling = Field(Sampling(), description="how answers are drawn for scoring")


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer, scored."""

    task: int
    source: str
    prompt: object
    text: str
    reward: float
    parts: Mapping[str, float]
    length: int
    finish: str
    error: str = ""


class Evaluator:
    """Asks, judges and reports. Waits for each answer at most `timeout` seconds; one that fails earns nothing, and is
    counted."""

    def __init__(
        self,
        config: Evaluation,
        *,
        seed: int,
        dataset: Dataset,
        prompt_ids: PromptIds,
        engine: Generate,
        judge: Judge,
        timeout: float,
    ) -> None:
        self._config, self._seed, self._timeout = config, seed, timeout
        self._dataset, self._prompt_ids, self._engine, self._judge = dataset, prompt_ids, engine, judge

    @property
    def tasks(self) -> int:
        """How many tasks it asks."""
        return min(len(self._dataset), self._config.limit or len(self._dataset))

    def due(self, step: int, last: int) -> bool:
        """Whether to score after this step."""
        every = self._config.every
        return self.tasks > 0 and (
            step == last or (step == 0 and self._config.first) or bool(step and every and step % every == 0)
        )

    def with_sampling(self, **changes: Any) -> Evaluator:
        """The same questions, with some of the sampling changed."""
        other = copy(self)
        sampling = self._config.sampling.model_copy(update=changes)
        other._config = self._config.model_copy(update={"sampling": sampling})
        return other

    def answers(self) -> list[Answer]:
        """Every answer to every task, in order. The same weights draw the same answers at any step."""
        return asyncio.run(self._all())

    async def _all(self) -> list[Answer]:
        tasks = [self._dataset.task(row, row) for row in range(self.tasks)]
        asked = [self._one(task, n) for task in tasks for n in range(self._config.samples)]
        return list(await asyncio.gather(*asked))

    async def _one(self, task: Task, n: int) -> Answer:
        prompt = self._prompt_ids(task)
        params = self._config.sampling.params(derived_seed(self._seed, "evaluate", task.ordinal, n))
        text, length, finish = "", 0, "abort"
        try:
            async with asyncio.timeout(self._timeout):
                completion = await self._engine.generate(prompt, params)
                text, length, finish = completion.text, len(completion.ids), completion.finish
                verdict = await self._judge.judge(task, text)
        except TimeoutError:
            error = f"No answer within {self._timeout:g} seconds."
            return Answer(task.ordinal, task.source, task.fields["prompt"], text, 0.0, {}, length, finish, error)
        earned = verdict.reward if verdict.outcome is Outcome.SUCCEEDED else 0.0
        return Answer(
            task.ordinal, task.source, task.fields["prompt"], text, earned, verdict.parts, length, finish, verdict.error
        )


def scores(answers: Sequence[Answer]) -> Metrics:
    """The evaluation in numbers: over all tasks and, where there are several, for each data source."""
    metrics = Metrics()
    by_source: dict[str, list[Answer]] = defaultdict(list)
    for answer in answers:
        by_source[answer.source].append(answer)
    for prefix, chosen in [("eval", answers), *((f"eval/{name}", part) for name, part in by_source.items())]:
        if prefix != "eval" and len(by_source) == 1:
            continue
        groups: dict[int, list[Answer]] = defaultdict(list)
        for answer in chosen:
            groups[answer.task].append(answer)
        n = max((len(group) for group in groups.values()), default=0)
        for group in groups.values():
            earned = [answer.reward for answer in group]
            metrics.add(f"{prefix}/mean@{n}", Mean.over(sum(earned), len(earned)))
            for k in _powers(n):
                metrics.add(f"{prefix}/best@{k}", Mean.of(best_of(earned, k)))
            if n > 1:
                metrics.add(f"{prefix}/maj@{n}", Mean.of(_majority(group)))
        metrics.add(f"{prefix}/length", Mean.over(sum(a.length for a in chosen), len(chosen)))
        metrics.add(f"{prefix}/truncated", Mean.over(sum(a.finish == "length" for a in chosen), len(chosen)))
        metrics.add(f"{prefix}/failed", Sum.of(sum(bool(a.error) for a in chosen)))
    return metrics


def best_of(rewards: Sequence[float], k: int) -> float:
    """The expected best of k answers drawn without replacement from these n: unbiased, and pass@k where rewards are 0
    and 1."""
    ordered, n = sorted(rewards), len(rewards)
    return sum(r * math.comb(i, k - 1) for i, r in enumerate(ordered)) / math.comb(n, k)


def _powers(n: int) -> list[int]:
    """2, 4, 8 … up to n, and n itself."""
    return sorted({2**i for i in range(1, n.bit_length()) if 2**i <= n} | ({n} if n > 1 else set()))


def _majority(group: Sequence[Answer]) -> float:
    """The mean reward of the answer given most often; where several are, of the one given first."""
    counts = Counter(answer.text.strip() for answer in group)
    most = max(counts, key=lambda text: counts[text])
    same = [answer.reward for answer in group if answer.text.strip() == most]
    return sum(same) / len(same)


def write_answers(answers: Sequence[Answer], path: Path) -> None:
    """One JSON object a line: what was asked, what was answered, what it earned."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for a in answers:
            line = {name: getattr(a, name) for name in Answer.__slots__}
            file.write(json.dumps(line, ensure_ascii=False, default=str) + "\n")
