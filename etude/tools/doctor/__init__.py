"""`etude doctor`: check this machine and this environment for problems of a run, and name the remedies.

Each check is a function that yields findings with a grade and a remedy, within a time limit. Checks of torch and of
drivers run in a separate process at the same time: if it hangs or does not load, that is a finding too. An exception in
a check is also a finding.

    packages.py       Python and its packages
    machine.py        cores, memory, disk, and system limits
    accelerator.py    torch, precisions, threads, devices
    probe.py          the process that loads torch
    run.py            `etude doctor RUN`, by the rules of `etude/recipes/diagnosis/`
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.text import Text

from etude.errors import ConfigError
from etude.observe import make_console, progress
from etude.tools.doctor import machine, packages
from etude.tools.doctor.accelerator import start_probe
from etude.tools.doctor.finding import Finding, count, fail

__all__ = ["Finding", "is_healthy", "run_checks", "show", "to_dict"]

TORCH_TIMEOUT_S = 60.0
"""Seconds for torch to load and to list its devices, and to compile kernels on a GPU; on a CPU it takes two."""
STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}
PACKAGE_CHECKS: tuple[Callable[[], Iterable[Finding]], ...] = (
    packages.python,
    packages.command,
    packages.requirements,
    packages.tested,
    packages.extras,
    packages.environments,
)
MACHINE_CHECKS: tuple[Callable[[], Iterable[Finding]], ...] = (
    machine.load,
    machine.memory,
    machine.cache,
    machine.shared_memory,
    machine.limits,
    machine.clock,
    machine.loopback,
    machine.compiler,
)


def run_checks(directory: Path, timeout_s: float = TORCH_TIMEOUT_S) -> list[Finding]:
    """Run all checks; `directory` is the place for runs."""
    if not directory.is_dir():
        raise ConfigError(
            f"There is no directory {directory} (seen from {Path.cwd()}). Name that of a run, or one for runs to come."
        )
    directory = directory.resolve()
    with start_probe() as probe:
        package_findings = [finding for check in PACKAGE_CHECKS for finding in _run_check(check.__name__, check)]
        disk = [*_run_check("place", lambda: machine.place(directory))]
        disk += _run_check("disk", lambda: machine.disk(directory))
        machine_findings = [finding for check in MACHINE_CHECKS for finding in _run_check(check.__name__, check)]
        return [*package_findings, *_run_check("torch", lambda: probe.findings(timeout_s)), *disk, *machine_findings]


def is_healthy(findings: Iterable[Finding]) -> bool:
    """Return True if no finding is a failure."""
    return all(finding.grade != "fail" for finding in findings)


def to_dict(findings: Sequence[Finding]) -> dict[str, Any]:
    """Return the findings as plain data."""
    return {"healthy": is_healthy(findings), "findings": [asdict(finding) for finding in findings]}


def show(directory: Path) -> list[Finding]:
    """Run all checks, and print each finding on a line, with its remedy below."""
    console = make_console()
    with progress("checking this machine", None, console):
        findings = run_checks(directory)
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        grade = (f"{finding.grade:<5}", STYLES[finding.grade])
        line = Text.assemble(grade, " ", (finding.name.ljust(width), "bold"), "  ", finding.what)
        console.print(line, soft_wrap=True)
        if finding.remedy:
            console.print(Text(" " * (width + 8) + finding.remedy, STYLES[finding.grade]), soft_wrap=True)
    counts = {grade: sum(finding.grade == grade for finding in findings) for grade in STYLES}
    summary = f"\n{counts['ok']} ok, {count(counts['warn'], 'warning')}, {count(counts['fail'], 'failure')}."
    console.print(Text(summary), soft_wrap=True)
    return findings


def _run_check(name: str, check: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """Run a check, and yield a failure under its name if it raises."""
    try:
        yield from check()
    except Exception as error:  # a broken machine may raise anything; the other checks must still run
        what = f"This check failed: {type(error).__name__}: {error}."
        yield fail(name, what, "Either the machine is broken there, or the check itself is.")
