"""Require a line coverage of each package that must be exact.

Usage: python -m tests.coverage_floor coverage.json

One floor for the whole of Etude would let a well-tested package compensate for a neglected one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Per cent of lines, by the path that a package's files start with.
FLOORS: dict[str, float] = {"etude/algorithms/": 95.0, "etude/batch": 95.0, "etude/config/": 95.0}


def covered(report: Mapping[str, Any], prefix: str) -> float | None:
    """Return the per cent of lines run in the files under `prefix`; None if the report has no such line."""
    summaries = [entry["summary"] for path, entry in report["files"].items() if path.startswith(prefix)]
    statements = sum(summary["num_statements"] for summary in summaries)
    if statements == 0:
        return None
    return float(100.0 * sum(summary["covered_lines"] for summary in summaries) / statements)


def shortfalls(report: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each package whose coverage is missing or too low."""
    lines = []
    for prefix, floor in FLOORS.items():
        percent = covered(report, prefix)
        if percent is None:
            lines.append(f"{prefix} has no line in the coverage report, so no test imported it.")
        elif percent < floor:
            lines.append(f"{prefix} has {percent:.1f} % of its lines covered; at least {floor:.0f} % are asked for.")
    return lines


def main(path: str) -> int:
    """Print each package's coverage; exit with 1 if one falls short."""
    report = json.loads(Path(path).read_text())
    for prefix in FLOORS:
        percent = covered(report, prefix)
        print(f"coverage  {prefix:<20} {'none' if percent is None else f'{percent:.1f} %'}")
    problems = shortfalls(report)
    for problem in problems:
        print(f"coverage  {problem}")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
