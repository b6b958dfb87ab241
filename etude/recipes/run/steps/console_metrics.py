"""The metrics that the console shows of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from etude.recipes.run.config import Run


def headline(run: Run) -> list[str]:
    """Return the metrics on the console line of a step; all others are in metrics.jsonl."""
    # A single update leaves loss and policy_kl at 0, even if the policy learned.
    once = run.mini_batches * run.ppo_epochs == 1
    learned = ["grad_norm", "zero_variance_share"] if once else ["loss", "policy_kl"]
    return ["reward", f"eval/mean@{run.evaluate.samples}", *learned, "answer_length", "sampled_tokens_per_second"]


def failure_metrics(run: Run) -> dict[str, str]:
    """Return, for each mean on that line, the metric that counts the answers that it leaves out, or counts as 0."""
    return {"reward": "failed_attempts", f"eval/mean@{run.evaluate.samples}": "eval/failed"}
