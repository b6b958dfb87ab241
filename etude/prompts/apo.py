"""Automatic prompt optimization (APO, https://arxiv.org/abs/2305.03495) as a beam search over prompts.

In each round the writer criticizes each prompt of the beam on a few tasks, and rewrites it by its criticism. All
prompts are scored on a drawn batch of held-out tasks, and the best ones are the next beam.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from etude.errors import EtudeError, RunError
from etude.observe import progress
from etude.prompts.scoring import PromptScore
from etude.prompts.search import FoundPrompt, PromptSearch, PromptTrial, require_score
from etude.prompts.writer import UnusablePromptError, read_prompt

TRIES = 3
"""The calls for one new prompt, before a branch ends without it."""
CRITICIZE = """\
A program calls a language model with the prompt below. Here is what happened on {count} tasks.

<prompt>
{prompt}
</prompt>

{description}

Say in at most ten sentences what in the prompt causes low rewards or failures, and what a better prompt would say. Do \
not solve the tasks, and do not repeat their answers."""
REWRITE = """\
A program calls a language model with this prompt:

<prompt>
{prompt}
</prompt>

A reviewer says about it:

{critique}

Write a better prompt. It must work for every task of this kind. Keep each placeholder in braces as it is. Answer with \
the whole new prompt between <prompt> and </prompt>, and nothing else."""


@dataclass
class APO(PromptSearch):
    """A beam search: criticize, rewrite, score, keep the best."""

    beam_rounds: int = 3
    beam_width: int = 4
    """The prompts that a round keeps."""
    branch_factor: int = 4
    """The new prompts for each prompt of the beam. A beam that is not full yet counts its prompts repeatedly."""
    gradient_batch_size: int = 4
    """The tasks for training that the writer sees for each new prompt."""
    val_batch_size: int = 16
    """The held-out tasks that a round scores its prompts on. Its best prompt is then scored on all of them."""

    def __post_init__(self) -> None:
        self.check_counts("beam_rounds", "beam_width", "branch_factor", "gradient_batch_size", "val_batch_size")

    @property
    def settings(self) -> Mapping[str, Any]:
        """All but the number of rounds: a search may go on for more of them."""
        names = ("beam_width", "branch_factor", "gradient_batch_size", "val_batch_size")
        return {name: getattr(self, name) for name in names}

    def find(self, trial: PromptTrial) -> FoundPrompt:
        """Search, and return the best prompt."""
        return trial.served.loop.run(self._find(trial))

    async def _find(self, trial: PromptTrial) -> FoundPrompt:
        everything = range(len(trial.val))
        with progress(f"scoring the first prompt on {len(everything)} tasks", None, trial.console):
            first = await trial.score(self.prompt, everything)
        best = require_score(first, "the first prompt")
        text = self.prompt
        trial.tell(f"first prompt: {best:.3f} on {len(everything)} tasks")
        beam = [self.prompt]
        for number in range(1, self.beam_rounds + 1):
            draw = random.Random(f"{self.seed}:{number}")
            children = await self._write_children(trial, number, beam, draw)
            rows = draw.sample(everything, min(self.val_batch_size, len(everything)))
            beam = await self._keep_best(trial, number, [*beam, *children], sorted(rows))
            whole = await trial.score(beam[0], everything)
            written = f"{len(children)} new prompts, the best has {_show(whole)}"
            trial.tell(f"round {number} of {self.beam_rounds}: {written}")
            if whole.value is not None and whole.value > best:
                best = whole.value
                text = beam[0]
        return FoundPrompt(text, best, first.value)

    async def _keep_best(
        self, trial: PromptTrial, number: int, prompts: Sequence[str], rows: Sequence[int]
    ) -> list[str]:
        """Score prompts on rows of the held-out tasks, and return the best ones, the earlier one of equals first."""
        with progress(f"round {number}: scoring {len(prompts)} prompts", len(prompts), trial.console) as bar:

            async def score(prompt: str) -> PromptScore:
                found = await trial.score(prompt, rows)
                bar.advance()
                return found

            scores = await asyncio.gather(*map(score, prompts))
        pairs = zip(scores, prompts, strict=True)
        ranked = [(found.value, prompt) for found, prompt in pairs if found.value is not None]
        if not ranked:
            require_score(scores[-1], f"each prompt of round {number}")
        ranked.sort(key=lambda pair: -pair[0])
        return [prompt for _, prompt in ranked[: self.beam_width]]

    async def _write_children(
        self, trial: PromptTrial, number: int, beam: Sequence[str], draw: random.Random
    ) -> list[str]:
        """Return the new prompts of a round, each once."""
        parents = [beam[place % len(beam)] for place in range(self.beam_width)]
        size = min(self.gradient_batch_size, len(trial.train))
        branches = [
            (f"round {number}, prompt {place}, branch {branch}", parent, draw.sample(range(len(trial.train)), size))
            for place, parent in enumerate(parents)
            for branch in range(self.branch_factor)
        ]
        refused: list[str] = []
        with progress(f"round {number}: writing {len(branches)} prompts", len(branches), trial.console) as bar:

            async def write(name: str, parent: str, rows: Sequence[int]) -> str | None:
                child = await self._write_child(trial, name, parent, rows, refused)
                bar.advance()
                return child

            written = await asyncio.gather(*(write(*branch) for branch in branches))
        children = list(dict.fromkeys(child for child in written if child is not None and child not in beam))
        if not children:
            why = refused[-1] if refused else "All of them are prompts of the beam."
            raise RunError(
                f"The writer gave no new prompt in {len(branches)} branches of round {number}. {why} Choose another "
                "writer: a model of `agent.external`, or a larger served model."
            )
        if refused:
            trial.tell(f"round {number}: {len(refused)} answers of the writer were no prompts. {refused[-1]}")
        return children

    async def _write_child(
        self, trial: PromptTrial, name: str, parent: str, rows: Sequence[int], refused: list[str]
    ) -> str | None:
        """Return a new prompt; None, and sentences in `refused`, if the writer gives none."""
        description = await trial.describe(f"{name}: rollouts", parent, rows)
        critique = ""
        for attempt in range(TRIES):
            call = f"{name}, call {attempt}"
            try:
                asked = CRITICIZE.format(count=len(rows), prompt=parent, description=description)
                critique = critique or await trial.write(f"{call}: critique", asked)
                answer = await trial.write(f"{call}: prompt", REWRITE.format(prompt=parent, critique=critique))
                return read_prompt(answer, parent)
            except (UnusablePromptError, EtudeError) as error:
                refused.append(str(error))
        return None


def _show(score: PromptScore) -> str:
    if score.value is None:
        return f"no score: {score.failed} of {score.rollouts} rollouts failed"
    return f"{score.value:.3f} on all tasks"
