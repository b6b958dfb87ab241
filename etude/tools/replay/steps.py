"""The steps of a run that can be replayed."""

from __future__ import annotations

from pathlib import Path

from etude.errors import ConfigError
from etude.tools.rollout_reader import open_journal
from etude.tools.step_index import StepIndex


def check_steps(directory: Path, step: int, to: int | None) -> None:
    """Refuse a step to replay, or a last one to train on, that the journal does not have."""
    with open_journal(directory) as store:
        known = [admitted.step for admitted in StepIndex(store).admitted]
    if not known:
        raise ConfigError(f"The run in {directory} has not collected its first step yet. Wait until it has.")
    for wanted, flag in ((step, "--step"), (step if to is None else to, "--to")):
        if wanted not in known:
            raise ConfigError(
                f"{flag} {wanted}: the run in {directory} has recorded the steps {known[0]} to {known[-1]}. Name one "
                "of them."
            )
    if to is not None and to < step:
        raise ConfigError(f"--to {to} is before --step {step}. Name the last step to train on, or leave it out.")
