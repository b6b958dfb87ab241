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
    version, package = platform.python_version(), _etude_metadata()
    wanted = ">=3.11" if package is None else package["Requires-Python"]
    environment = "an environment of its own" if sys.prefix != sys.base_prefix else "no environment of its own"
    if Version(version) not in SpecifierSet(wanted):
        remedy = f"Make an environment with one that is {wanted}, and install Etude there."
        yield fail("python", f"This is Python {version}; Etude needs {wanted}.", remedy)
    else:
        yield ok("python", f"{version} on {platform.platform()}, in {environment} ({sys.prefix})")


def command() -> Iterator[Finding]:
    """Whether a shell finds this `etude`, and not another."""
    on_path, binaries = shutil.which("etude"), Path(sys.prefix) / "bin"
    start = f"Type `source {binaries / 'activate'}`, or call {binaries / 'etude'}."
    if on_path is None:
        yield warn("command", "A shell finds no `etude` here: it is not on the PATH.", start)
    elif Path(on_path).parent.resolve() != binaries.resolve():
        yield warn("command", f"A shell finds another `etude`: {on_path}, not the one of this Python.", start)
    else:
        yield ok("command", f"etude {_version('etude') or 'that is not installed'}, {on_path}")


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
    differing = [
        f"{name} {version} (tested: {pin})"
        for name, pin in pins.items()
        if canonicalize_name(name) in needed and (version := _version(name)) and Version(version).public != pin
    ]
    if differing:
        listed = ", ".join(differing[:LISTED]) + (
            f" and {len(differing) - LISTED} more" if len(differing) > LISTED else ""
        )
        remedy = f"If something does not work, `pip install --constraint {constraints} --editable .` brings those back."
        yield warn("tested", f"Other versions than those that were tested: {listed}.", remedy)
    else:
        yield ok("tested", "the versions that were tested")


def extras() -> Iterator[Finding]:
    """What is optional: there in versions that fit, or not there."""
    package = _etude_metadata()
    for extra in sorted(set(package.get_all("Provides-Extra") or ()) - NOT_FOR_RUNS) if package is not None else ():
        requirements = [
            requirement
            for requirement in _requirements("etude")
            if requirement.marker and requirement.marker.evaluate({"extra": extra})
        ]
        requirements = [
            requirement
            for requirement in requirements
            if not (requirement.marker and requirement.marker.evaluate({"extra": ""}))
        ]
        installed = {
            requirement.name: version for requirement in requirements if (version := _version(requirement.name))
        }
        conflicting = [
            requirement
            for requirement in requirements
            if requirement.name in installed and not _fits(requirement, installed[requirement.name])
        ]
        listed = ", ".join(f"{name} {version}" for name, version in installed.items())
        install = f"pip install 'etude[{extra}]'"
        if conflicting:
            needs = ", ".join(f"{requirement.name}{requirement.specifier}" for requirement in conflicting)
            yield warn(extra, f"{listed} installed, and Etude needs {needs}.", f"`{install}` brings them up to date.")
        elif len(installed) < len(requirements):
            missing = ", ".join(requirement.name for requirement in requirements if requirement.name not in installed)
            yield ok(extra, f"not installed: {missing} (`{install}`)")
        else:
            yield ok(extra, listed)


def environments() -> Iterator[Finding]:
    """The environments of other engines that were built, which live apart from this one."""
    directory = cache_directory() / "environments"
    complete = sorted(path.parent.name.rpartition("-")[0] for path in directory.glob("*/whole.json"))
    incomplete = sorted(path.name for path in directory.glob("*/") if not (path / "whole.json").exists())
    if incomplete:
        listed = ", ".join(str(directory / name) for name in incomplete)
        yield warn("environments", f"Half built: {listed}.", "What needs one builds it again; or remove it.")
    yield ok("environments", f"for other engines: {', '.join(complete) or 'none built yet'} ({directory})")


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
    for name, extras in queue:
        if _version(name) is None:
            continue
        for requirement in _requirements(name):
            if requirement.marker and not any(requirement.marker.evaluate({"extra": extra}) for extra in (*extras, "")):
                continue
            dependency = canonicalize_name(requirement.name)
            yield dependency, (name, requirement)
            if (step := (dependency, frozenset(requirement.extras))) not in seen:
                seen.add(step)
                queue.append(step)


def _conflicts() -> Iterator[Finding]:
    """Every package that is absent or does not fit. What Etude itself asks for is a failure, the rest a warning."""
    for name, source in _needed():
        if source is None:
            continue
        parent, wanted = source
        version = _version(name)
        if version is not None and _fits(wanted, version):
            continue
        grade = fail if parent == "etude" else warn
        state = f"{version} is installed" if version else "it is not installed"
        remedy = f"`pip install '{wanted.name}{wanted.specifier}'` mends it."
        yield grade("packages", f"{parent} needs {wanted.name}{wanted.specifier}, and {state}.", remedy)


def _fits(wanted: Requirement, version: str) -> bool:
    return wanted.specifier.contains(version, prereleases=True)
