"""Python and its packages: whether they are there, whether their versions fit, and whether they are those tested."""

from __future__ import annotations

import platform
import shutil
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from etude.config.env import cache_directory
from etude.tools.doctor.finding import Finding, fail, ok, warn

__all__ = ["command", "environments", "extras", "python", "requirements", "tested"]

NOT_FOR_RUNS = frozenset({"all", "dev", "docs"})
"""Extras that switch nothing on in a run."""
LISTED = 5
PACKAGE = Path(__file__).parents[2]


def python() -> Iterator[Finding]:
    """Its version, and whose packages it sees."""
    found, about = platform.python_version(), _etude_metadata()
    wanted = ">=3.11" if about is None else about["Requires-Python"]
    where = "an environment of its own" if sys.prefix != sys.base_prefix else "no environment of its own"
    if Version(found) not in SpecifierSet(wanted):
        remedy = f"Make an environment with one that is {wanted}, and install Etude there."
        yield fail("python", f"This is Python {found}; Etude needs {wanted}.", remedy)
    else:
        yield ok("python", f"{found} on {platform.platform()}, in {where} ({sys.prefix})")


def command() -> Iterator[Finding]:
    """Whether a shell finds this `etude`, and not another."""
    found, here = shutil.which("etude"), Path(sys.prefix) / "bin"
    start = f"Type `source {here / 'activate'}`, or call {here / 'etude'}."
    if found is None:
        yield warn("command", "A shell finds no `etude` here: it is not on the PATH.", start)
    elif Path(found).parent.resolve() != here.resolve():
        yield warn("command", f"A shell finds another `etude`: {found}, not the one of this Python.", start)
    else:
        yield ok("command", f"etude {_version('etude') or 'that is not installed'}, {found}")


def requirements() -> Iterator[Finding]:
    """Every package that Etude needs, and that those need, in a version that fits."""
    if _etude_metadata() is None:
        yield warn(
            "packages",
            f"Etude is read from {PACKAGE} and was not installed, so what it needs is not known.",
            "Install it: `pip install --editable .` in its checkout.",
        )
        return
    problems = list(_conflicts())
    yield from problems
    if not problems:
        count = len(dict.fromkeys(name for name, _ in _needed()))
        yield ok("packages", f"{count} packages, all there and in versions that fit each other")


def tested() -> Iterator[Finding]:
    """Where this is a checkout: whether the versions are those that its tests ran with."""
    constraints = PACKAGE.parent / "constraints.txt"
    if not constraints.is_file():
        return
    pins = dict(line.split("==") for line in constraints.read_text(encoding="utf-8").splitlines() if "==" in line)
    needed = {name for name, _ in _needed()}
    others = [
        f"{name} {found} (tested: {pin})"
        for name, pin in pins.items()
        if canonicalize_name(name) in needed and (found := _version(name)) and Version(found).public != pin
    ]
    if others:
        listed = ", ".join(others[:LISTED]) + (f" and {len(others) - LISTED} more" if len(others) > LISTED else "")
        remedy = f"If something does not work, `pip install --constraint {constraints} --editable .` brings those back."
        yield warn("tested", f"Other versions than those that were tested: {listed}.", remedy)
    else:
        yield ok("tested", "the versions that were tested")


def extras() -> Iterator[Finding]:
    """What is optional: there in versions that fit, or not there."""
    about = _etude_metadata()
    for extra in sorted(set(about.get_all("Provides-Extra") or ()) - NOT_FOR_RUNS) if about is not None else ():
        asked = [each for each in _requirements("etude") if each.marker and each.marker.evaluate({"extra": extra})]
        asked = [each for each in asked if not (each.marker and each.marker.evaluate({"extra": ""}))]
        there = {each.name: found for each in asked if (found := _version(each.name))}
        bad = [each for each in asked if each.name in there and not _fits(each, there[each.name])]
        listed = ", ".join(f"{name} {found}" for name, found in there.items())
        install = f"pip install 'etude[{extra}]'"
        if bad:
            wants = ", ".join(f"{each.name}{each.specifier}" for each in bad)
            yield warn(extra, f"{listed} installed, and Etude needs {wants}.", f"`{install}` brings them up to date.")
        elif len(there) < len(asked):
            absent = ", ".join(each.name for each in asked if each.name not in there)
            yield ok(extra, f"not installed: {absent} (`{install}`)")
        else:
            yield ok(extra, listed)


def environments() -> Iterator[Finding]:
    """The environments of other engines that were built, which live apart from this one."""
    kept = cache_directory() / "environments"
    whole = sorted(path.parent.name.rpartition("-")[0] for path in kept.glob("*/whole.json"))
    torn = sorted(path.name for path in kept.glob("*/") if not (path / "whole.json").exists())
    if torn:
        listed = ", ".join(str(kept / name) for name in torn)
        yield warn("environments", f"Half built: {listed}.", "What needs one builds it again; or remove it.")
    yield ok("environments", f"for other engines: {', '.join(whole) or 'none built yet'} ({kept})")


# -- small parts ------------------------------------------------------------------------------------------------------


def _etude_metadata() -> metadata.PackageMetadata | None:
    try:
        return metadata.metadata("etude")
    except metadata.PackageNotFoundError:
        return None


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _requirements(name: str) -> list[Requirement]:
    return [Requirement(text) for text in metadata.requires(name) or ()]


def _needed() -> Iterator[tuple[str, tuple[str, Requirement] | None]]:
    """Etude and every package below it, by name, each with who asks for it and how; walked breadth first."""
    queue: list[tuple[str, frozenset[str]]] = [("etude", frozenset())]
    seen = set(queue)
    yield "etude", None
    for name, asked_extras in queue:
        if _version(name) is None:
            continue
        for each in _requirements(name):
            if each.marker and not any(each.marker.evaluate({"extra": extra}) for extra in (*asked_extras, "")):
                continue
            below = canonicalize_name(each.name)
            yield below, (name, each)
            if (step := (below, frozenset(each.extras))) not in seen:
                seen.add(step)
                queue.append(step)


def _conflicts() -> Iterator[Finding]:
    """Every package that is absent or does not fit. What Etude itself asks for is a failure, the rest a warning."""
    for name, asked in _needed():
        if asked is None:
            continue
        who, wanted = asked
        found = _version(name)
        if found is not None and _fits(wanted, found):
            continue
        grade = fail if who == "etude" else warn
        has = f"{found} is installed" if found else "it is not installed"
        remedy = f"`pip install '{wanted.name}{wanted.specifier}'` mends it."
        yield grade("packages", f"{who} needs {wanted.name}{wanted.specifier}, and {has}.", remedy)


def _fits(wanted: Requirement, found: str) -> bool:
    return wanted.specifier.contains(found, prereleases=True)
