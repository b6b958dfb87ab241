"""Settings of all tests: one thread a process, a plot backend without a display, the hypothesis profiles, and the
tiers."""

from __future__ import annotations

import gc
import logging
import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import Phase, is_hypothesis_test, settings

from tests.components import running
from tests.durations import CHECK_SHARE, Record, Watch
from tests.leftovers import Leftovers
from tests.parts import OnePart, Part
from tests.processes import give_memory_back
from tests.sweeps import inner
from tests.tiers import is_left_out, longest_first, mark

if TYPE_CHECKING:
    from etude.rollout import ServerPool

# Set before torch is imported, and inherited by the processes that tests start: results then do not depend on how many
# cores the machine has, and test processes side by side do not fight over them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")

# `default` derives its examples from the tests, not from the day, so that a failure is the change's; the same selection
# of tests draws the same examples, and another one may draw others. `check` draws a few of them, `soak` new ones each
# time, and more of them. Chosen with --hypothesis-profile.
EXAMPLES, SOAK_FACTOR = 25, 10
FACTORS = {"soak": SOAK_FACTOR, "check": 1 / CHECK_SHARE}
"""The factor of a test's own number of examples, by profile."""
PHASES = (Phase.explicit, Phase.reuse, Phase.generate, Phase.target, Phase.shrink)  # explaining can take minutes
settings.register_profile(
    "default", max_examples=EXAMPLES, derandomize=True, deadline=None, database=None, phases=PHASES
)
settings.register_profile("check", settings.get_profile("default"))
settings.register_profile(
    "soak", max_examples=EXAMPLES, derandomize=False, deadline=None, print_blob=True, phases=PHASES
)
settings.load_profile("default")

RECORD = pytest.StashKey[Record]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-durations", action="store_true", help="record how long the tests take that are run")
    parser.addoption("--part", help="run one part of the selected tests, of about equal seconds, such as 2/4")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[RECORD] = Record.read()
    # A shell starts background commands with SIGINT ignored, and tests send Ctrl-C.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.pluginmanager.register(Watch(config.stash[RECORD]))
    config.pluginmanager.register(Leftovers())
    if part := config.getoption("part"):
        config.pluginmanager.register(OnePart(Part.parse(part), config.stash[RECORD]))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import files of which the marker expression leaves out every test."""
    return True if is_left_out(collection_path, config.option.markexpr) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Set the markers that follow from a test's place, order tests by duration, and give property tests the number of
    examples of the profile, even if a test sets its own."""
    mark(items, config.stash[RECORD])
    longest_first(items, config.stash[RECORD])
    factor = FACTORS.get(settings.get_current_profile_name())
    if factor is None:
        return
    every = (inner(item.obj) for item in items if isinstance(item, pytest.Function))
    tests = {test for test in every if is_hypothesis_test(test)}
    for test in tests:
        # Hypothesis has no public way to change the settings of a test that is already decorated. Those of a state
        # machine are its class's.
        holder, name = test, "_hypothesis_internal_use_settings"
        if not hasattr(test, name):
            holder, name = type(test.__self__), "settings"  # type: ignore[attr-defined]
        own = getattr(holder, name)
        setattr(holder, name, settings(own, max_examples=max(1, round(factor * own.max_examples))))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage while modules are loaded, and exclude them from every later collection. Each collection would
    walk through all of them, for most of a second."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> None:
    """Record which test runs."""
    running[:] = [item]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """Send a file's tests to one process, so that shared fixtures are made once, in the order of `longest_first`."""
    from xdist.scheduler import LoadGroupScheduling

    class Files(LoadGroupScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            group = str(super()._split_scope(nodeid))
            return nodeid.partition("::")[0] if group == nodeid else group

    config.option.loadscopereorder = False
    return Files(config, log)


@pytest.fixture(scope="module", autouse=True)
def memory_is_given_back() -> Iterator[None]:
    """Free memory after each file of tests. An Etude process keeps freed memory for its next step; here it would grow
    by gigabytes. The remaining objects are excluded from later collections: most of them live as long as the process.
    """
    yield
    give_memory_back()
    gc.freeze()


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """The captured log, even if an earlier test of the process configured Etude's logger."""
    root = logging.getLogger("etude")
    before = root.level, root.propagate
    root.setLevel(logging.NOTSET)
    root.propagate = True
    yield caplog
    root.setLevel(before[0])
    root.propagate = before[1]


# The following fixtures load much, and only for tests that ask for them.


@pytest.fixture(scope="session")
def a_ray() -> Iterator[None]:
    """One Ray for every test of this process that uses it."""
    from tests.rays import joined

    with joined():
        yield


@pytest.fixture(scope="session")
def served_models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The directories of the model that servers start with, and of another."""
    from tests.served import make_served_model

    directory = tmp_path_factory.mktemp("models")
    return make_served_model(directory / "first", 0), make_served_model(directory / "second", 1)


@pytest.fixture(scope="session")
def vllm_server(served_models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerPool]:
    """vLLM's server, with the first model. A test that gives it other weights restores these."""
    from tests.served import started

    with started("vllm", served_models[0], tmp_path_factory.mktemp("vllm")) as engine:
        yield engine


@pytest.fixture(scope="session")
def sglang_server(served_models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerPool]:
    """SGLang's server, with the first model. A test that gives it other weights restores these."""
    from tests.served import started

    with started("sglang", served_models[0], tmp_path_factory.mktemp("sglang")) as engine:
        yield engine
