"""The metrics that the console shows of a step."""

from __future__ import annotations


def headline(samples: int, *, single_update: bool) -> list[str]:
    """Return the metrics on the console line of a step; all others are in metrics.jsonl.

    samples: `evaluate.samples`. single_update: a step makes one update.
    """
    # A single update leaves loss and policy_kl at 0, even if the policy learned.
    learned = ["grad_norm", "zero_variance_share"] if single_update else ["loss", "policy_kl"]
    return ["reward", f"eval/mean@{samples}", *learned, "answer_length", "sampled_tokens_per_second"]


def failure_metrics(samples: int) -> dict[str, str]:
    """Return, for each mean on that line, the metric that counts the answers that it leaves out, or counts as 0."""
    return {"reward": "failed_attempts", f"eval/mean@{samples}": "eval/failed"}
