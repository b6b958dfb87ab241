"""The rules of `etude doctor RUN`: what goes wrong in a run without an error, and the option that helps.

A rule is a function from the run's evidence to findings. It reads metrics and options only, so the same rules check a
run on disk (`etude doctor RUN`) and a run that trains, under the line of each step. A rule that lacks a metric or an
option finds nothing.

    evidence.py         the metrics and options of a run, and the statistics that rules share
    reward_rules.py     rewards, groups, evaluations
    update_rules.py     the policy's updates: entropy, divergences, weights, clip, learning rate
    sampling_rules.py   lengths, engines, staleness, memory
    step_findings.py    the line under a step's line
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from etude.recipes.diagnosis import reward_rules, sampling_rules, update_rules
from etude.recipes.diagnosis.evidence import Evidence, RunFinding

__all__ = ["RULES", "Evidence", "RunFinding", "diagnose"]

RULES: dict[str, Callable[[Evidence], Iterator[RunFinding]]] = {
    "reward fails": reward_rules.reward_fails,
    "reward gamed": reward_rules.reward_gamed,
    "entropy gone": update_rules.entropy_gone,
    "sample size low": update_rules.sample_size_low,
    "mismatch grows": update_rules.mismatch_grows,
    "KL grows": update_rules.kl_grows,
    "groups level": reward_rules.groups_level,
    "no effect of updates": update_rules.no_effect,
    "reward flat": reward_rules.reward_flat,
    "clip": update_rules.clip_extreme,
    "answers cut off": sampling_rules.answers_cut_off,
    "lengths at the limit": sampling_rules.lengths_at_limit,
    "engines idle": sampling_rules.engines_idle,
    "staleness at the bound": sampling_rules.staleness_at_bound,
    "memory nearly full": sampling_rules.memory_nearly_full,
}
"""The rules by their name. Of findings that are equally severe, the earlier one comes first."""


def diagnose(evidence: Evidence) -> list[RunFinding]:
    """Return the findings of all rules, the worst first."""
    findings = [replace(finding, rule=name) for name, rule in RULES.items() for finding in rule(evidence)]
    return sorted(findings, key=lambda finding: -finding.severity)
