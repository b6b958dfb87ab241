"""The rules of `etude doctor RUN`: what goes wrong in a run without an error, and the option that helps.

A rule is a function from the run's evidence to findings. The same rules check a run on disk (`etude doctor RUN`) and a
run that trains, under the line of each step. A rule that lacks a metric or an option finds nothing. So do the rules
about single tasks while a run trains: they need all rewards of the journal, and the others only metrics and options.

Findings come by cause: what follows from another finding stands behind it, and its own remedy would not help.

    evidence.py         the metrics and options of a run, and the statistics that rules share
    reward_rules.py     rewards, groups, evaluations
    collapse_rule.py    a reward that collapsed
    task_rules.py       tasks that never earn, or always
    update_rules.py     the policy's updates: entropy, divergences, weights, clip, learning rate
    sampling_rules.py   lengths, engines, staleness, memory
    step_findings.py    the line under a step's line
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from etude.recipes.diagnosis import collapse_rule, reward_rules, sampling_rules, task_rules, update_rules
from etude.recipes.diagnosis.evidence import Evidence, RunFinding

__all__ = ["CONSEQUENCES", "RULES", "Evidence", "RunFinding", "diagnose"]

RULES: dict[str, Callable[[Evidence], Iterator[RunFinding]]] = {
    "reward collapsed": collapse_rule.reward_collapsed,
    "reward fails": reward_rules.reward_fails,
    "reward constant": reward_rules.reward_constant,
    "reward gamed": reward_rules.reward_gamed,
    "entropy gone": update_rules.entropy_gone,
    "sample size low": update_rules.sample_size_low,
    "mismatch grows": update_rules.mismatch_grows,
    "KL grows": update_rules.kl_grows,
    "groups level": reward_rules.groups_level,
    "gradient zero": update_rules.gradient_zero,
    "no effect of updates": update_rules.no_effect,
    "reward flat": reward_rules.reward_flat,
    "tasks never earn": task_rules.tasks_never_earn,
    "tasks always earn": task_rules.tasks_always_earn,
    "clip": update_rules.clip_extreme,
    "answers cut off": sampling_rules.answers_cut_off,
    "lengths at the limit": sampling_rules.lengths_at_limit,
    "engines idle": sampling_rules.engines_idle,
    "staleness at the bound": sampling_rules.staleness_at_bound,
    "memory nearly full": sampling_rules.memory_nearly_full,
}
"""The rules by their name. Of findings that are equally severe, the earlier one comes first."""
CONSEQUENCES: dict[str, frozenset[str]] = {
    "reward collapsed": frozenset(
        {"entropy gone", "groups level", "gradient zero", "reward flat", "answers cut off", "lengths at the limit"}
    ),
    "reward fails": frozenset({"reward constant"}),
    "reward constant": frozenset({"groups level", "gradient zero", "reward flat"}),
    "no effect of updates": frozenset({"reward flat", "clip"}),
}
"""The rules whose findings a finding explains, by its rule; of two causes, the earlier one is named."""


def diagnose(evidence: Evidence) -> list[RunFinding]:
    """Return the findings of all rules: the worst first, and behind them those that follow from another."""
    found = [replace(finding, rule=name) for name, rule in RULES.items() for finding in rule(evidence)]
    present = [cause for cause in CONSEQUENCES if any(finding.rule == cause for finding in found)]
    causes = {rule: cause for cause in reversed(present) for rule in CONSEQUENCES[cause]}
    findings = [
        replace(finding, cause=cause, remedy=f"This follows from “{cause}”: see there.") if cause else finding
        for finding in found
        for cause in [causes.get(finding.rule, "")]
    ]
    return sorted(findings, key=lambda finding: (finding.cause != "", -finding.severity))
