"""GEPA (https://arxiv.org/abs/2507.19457): the package's own evolution of prompts, over rollouts of the agent."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from etude.errors import RunError
from etude.prompts import load_gepa
from etude.prompts.scoring import PromptScore, describe_rollout
from etude.prompts.search import FoundPrompt, PromptSearch, PromptTrial, require_score
from etude.prompts.writer import find_lost
from etude.recipes.collect.rollouts import PlayedRollout

PRINTED = ("Base program full valset score", "Best score on valset")
"""The parts of GEPA's lines that are printed."""


class TaskRow(NamedTuple):
    """A task, as GEPA passes it on."""

    is_held_out: bool
    row: int


@dataclass
class GEPA(PromptSearch):
    """An evolution: reflect on a few rollouts, rewrite, keep each prompt that is best for some held-out task."""

    max_rollouts: int = 200
    """The rollouts after which no new prompt is tried."""
    reflection_minibatch_size: int = 3
    """The tasks for training that the writer sees for each new prompt."""
    gepa_options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of `gepa.optimize`, such as `use_merge`."""

    def __post_init__(self) -> None:
        self.check_counts("max_rollouts", "reflection_minibatch_size")

    @property
    def settings(self) -> Mapping[str, Any]:
        """All but the number of rollouts: a search may go on for more of them."""
        options = {name: repr(value) for name, value in self.gepa_options.items()}
        return {"reflection_minibatch_size": self.reflection_minibatch_size, "gepa_options": options}

    def find(self, trial: PromptTrial) -> FoundPrompt:
        """Search, and return the best prompt. Every random choice is drawn from the seed, so the log's results lead
        to where the search was stopped."""
        gepa = load_gepa()
        adapter = _Adapter(trial, self.prompt)
        result = gepa.optimize(
            seed_candidate={trial.name: self.prompt},
            trainset=[TaskRow(False, row) for row in range(len(trial.train))],
            valset=[TaskRow(True, row) for row in range(len(trial.val))],
            adapter=adapter,
            reflection_lm=adapter.reflect,
            reflection_minibatch_size=min(self.reflection_minibatch_size, len(trial.train)),
            max_metric_calls=self.max_rollouts,
            stop_callbacks=lambda _: adapter.failure is not None,
            logger=adapter,
            seed=self.seed,
            **self.gepa_options,
        )
        if adapter.failure is not None:
            raise adapter.failure
        scores = result.val_aggregate_scores
        trial.tell(f"{len(scores)} prompts kept, {trial.log.rollouts} rollouts: {scores[0]:.3f} → {max(scores):.3f}")
        return FoundPrompt(result.best_candidate[trial.name], max(scores), scores[0])


@dataclass
class _Adapter:
    """The system as GEPA sees it: it scores a prompt, and describes rollouts. Also GEPA's logger."""

    trial: PromptTrial
    first: str
    """The prompt with which the search begins."""
    propose_new_texts: None = None
    calls: int = 0
    failure: Exception | None = None
    """The error of the writer: GEPA itself would go on without it."""

    def evaluate(self, batch: Sequence[TaskRow], candidate: Mapping[str, str], capture_traces: bool = False) -> Any:
        """Play tasks with a prompt. A rollout that fails has the score 0, as GEPA has no other sign for it."""
        result = self._played(batch, candidate[self.trial.name])
        return load_gepa().EvaluationBatch(
            outputs=result["descriptions"],
            scores=result["scores"],
            trajectories=result["descriptions"] if capture_traces else None,
        )

    def make_reflective_dataset(self, _: Any, evaluated: Any, components: Sequence[str]) -> dict[str, Any]:
        """Return what the writer is shown."""
        rows = [{"What happened": each} for each in evaluated.trajectories]
        return dict.fromkeys(components, rows)

    def reflect(self, message: Any) -> str:
        """Ask the writer."""
        self.calls += 1
        try:
            return self.trial.served.loop.run(self.trial.write(f"reflection {self.calls}", str(message)))
        except Exception as error:
            self.failure = self.failure or error
            raise

    def log(self, message: str) -> None:
        """Print GEPA's lines about the best score."""
        if any(words in message for words in PRINTED):
            self.trial.tell(message)

    def _played(self, batch: Sequence[TaskRow], prompt: str) -> dict[str, Any]:
        self.calls += 1
        if lost := find_lost(prompt, self.first):
            why = f"The prompt lacks {', '.join(lost)}, which the agent fills in. Nothing was played."
            return {"scores": [-math.inf] * len(batch), "descriptions": [why] * len(batch)}
        name = f"evaluation {self.calls}"
        result = self.trial.log.find(name)
        if result is None:
            held_out = batch[0].is_held_out
            tasks = self.trial.val if held_out else self.trial.train
            rows = [each.row for each in batch]
            played = self.trial.served.loop.run(self.trial.play(prompt, tasks, rows, "val" if held_out else "train"))
            score = PromptScore.of(played)
            require_score(score, f"the prompt {prompt[:80]!r}")
            tokenizer = self.trial.served.chat.tokenizer
            descriptions = [
                describe_rollout(tasks.task(row, row), rollout, tokenizer)
                for row, rollout in zip(rows, played, strict=True)
            ]
            result = {
                "prompt": prompt,
                "scores": [_reward(each) for each in played],
                "descriptions": descriptions,
                **asdict(score),
            }
            self.trial.log.add(name, result)
        if result["prompt"] != prompt:
            raise RunError("The search took another way than the one that was stopped. Search in a new directory.")
        return result


def _reward(played: PlayedRollout) -> float:
    return played.total if played.succeeded else 0.0
