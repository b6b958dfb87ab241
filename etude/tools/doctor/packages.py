"""Checks of Python and its packages: installed, compatible, and the tested versions."""

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

NOT_FOR_RUNS = frozenset({"all", "dev", "docs"})
"""Extras without an effect on runs."""
LISTED = 5
PACKAGE = Path(__file__).parents[2]


def python() -> Iterator[Finding]:
    """Check the version of Python, and report its environment."""
    version, package = platform.python_version(), _etude_metadata()
    wanted = ">=3.11" if package is None else package["Requires-Python"]
    environment = "a virtual environment" if sys.prefix != sys.base_prefix else "no virtual environment"
    if Version(version) not in SpecifierSet(wanted):
        remedy = f"Create an environment with Python {wanted}, and install Etude there."
        yield fail("python", f"This is Python {version}; Etude needs {wanted}.", remedy)
    else:
        yield ok("python", f"{version} on {platform.platform()}, in {environment} ({sys.prefix})")


def command() -> Iterator[Finding]:
    """Check that a shell finds this `etude`, and not another."""
    on_path, binaries = shutil.which("etude"), Path(sys.prefix) / "bin"
    start = f"Run `source {binaries / 'activate'}`, or call {binaries / 'etude'}."
    if on_path is None:
        yield warn("command", "The shell finds no `etude`: it is not on the PATH.", start)
    elif Path(on_path).parent.resolve() != binaries.resolve():
        yield warn("command", f"The shell finds another `etude`: {on_path}, not the one of this Python.", start)
    else:
        yield ok("command", f"etude {_version('etude') or 'that is not installed'}, {on_path}")


def requirements() -> Iterator[Finding]:
    """Check all required packages and their requirements for compatible versions."""
    if _etude_metadata() is None:
        yield warn(
            "packages",
            f"Etude is imported from {PACKAGE} and is not installed, so its requirements are unknown.",
            "Install it: `pip install --editable .` in its checkout.",
        )
        return
    problems = list(_conflicts())
    yield from problems
    if not problems:
        count = len({name for name, _, _ in _needed()})
        yield ok("packages", f"{count + 1} packages, all installed in compatible versions")


def tested() -> Iterator[Finding]:
    """In a checkout, check that the versions are those of `constraints.txt`, which the tests used."""
    constraints = PACKAGE.parent / "constraints.txt"
    if not constraints.is_file():
        return
    pins = dict(line.split("==") for line in constraints.read_text(encoding="utf-8").splitlines() if "==" in line)
    needed = {name for name, _, _ in _needed()}
    differing = [
        f"{name} {version} (tested: {pin})"
        for name, pin in pins.items()
        if canonicalize_name(name) in needed and (version := _version(name)) and Version(version).public != pin
    ]
    if differing:
        listed = ", ".join(differing[:LISTED]) + (
            f" and {len(differing) - LISTED} more" if len(differing) > LISTED else ""
        )
        remedy = f"If something does not work, `pip install --constraint {constraints} --editable .` installs those."
        yield warn("tested", f"These versions differ from the tested ones: {listed}.", remedy)
    else:
        yield ok("tested", "the tested versions")


def extras() -> Iterator[Finding]:
    """Report the optional packages of each extra: installed in a compatible version, or not installed."""
    package = _etude_metadata()
    for extra in sorted(set(package.get_all("Provides-Extra") or ()) - NOT_FOR_RUNS) if package is not None else ():
        requirements = [
            wanted
            for wanted in _requirements("etude")
            if (marker := wanted.marker) and marker.evaluate({"extra": extra}) and not marker.evaluate({"extra": ""})
        ]
        installed = {wanted.name: version for wanted in requirements if (version := _version(wanted.name))}
        present = [wanted for wanted in requirements if wanted.name in installed]
        conflicting = [wanted for wanted in present if not _fits(wanted, installed[wanted.name])]
        listed = ", ".join(f"{name} {version}" for name, version in installed.items())
        install = f"pip install 'etude[{extra}]'"
        if conflicting:
            needs = ", ".join(f"{wanted.name}{wanted.specifier}" for wanted in conflicting)
            yield warn(extra, f"{listed} installed, and Etude needs {needs}.", f"`{install}` updates them.")
        elif len(installed) < len(requirements):
            missing = ", ".join(wanted.name for wanted in requirements if wanted.name not in installed)
            yield ok(extra, f"not installed: {missing} (`{install}`)")
        else:
            yield ok(extra, listed)


def environments() -> Iterator[Finding]:
    """Report the installed environments of inference servers, which are separate from this one."""
    directory = cache_directory() / "environments"
    complete = sorted(path.parent.name.rpartition("-")[0] for path in directory.glob("*/whole.json"))
    incomplete = sorted(path.name for path in directory.glob("*/") if not (path / "whole.json").exists())
    if incomplete:
        listed = ", ".join(str(directory / name) for name in incomplete)
        yield warn("environments", f"Incomplete: {listed}.", "The next use installs it again; or remove it.")
    yield ok("environments", f"for inference servers: {', '.join(complete) or 'none installed yet'} ({directory})")


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


def _needed() -> Iterator[tuple[str, str, Requirement]]:
    """Iterate breadth-first over all dependencies of Etude, each with the package and the requirement behind it."""
    queue: list[tuple[str, frozenset[str]]] = [("etude", frozenset())]
    seen = set(queue)
    for name, extras in queue:
        if _version(name) is None:
            continue
        for requirement in _requirements(name):
            if requirement.marker and not any(requirement.marker.evaluate({"extra": extra}) for extra in (*extras, "")):
                continue
            dependency = canonicalize_name(requirement.name)
            yield dependency, name, requirement
            if (step := (dependency, frozenset(requirement.extras))) not in seen:
                seen.add(step)
                queue.append(step)


def _conflicts() -> Iterator[Finding]:
    """Yield each missing or incompatible package: a failure for Etude's own requirements, else a warning."""
    for name, parent, wanted in _needed():
        version = _version(name)
        if version is not None and _fits(wanted, version):
            continue
        grade = fail if parent == "etude" else warn
        state = f"{version} is installed" if version else "it is not installed"
        remedy = f"`pip install '{wanted.name}{wanted.specifier}'` fixes it."
        yield grade("packages", f"{parent} needs {wanted.name}{wanted.specifier}, and {state}.", remedy)


def _fits(wanted: Requirement, version: str) -> bool:
    return wanted.specifier.contains(version, prereleases=True)
