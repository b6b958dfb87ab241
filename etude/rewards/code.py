"""Programs: the code of an answer, run in a box and put to the tests of its task.

The code is the last block of an answer that is fenced as Python; where none says so, the last fenced block; where there
is none, the whole text. It runs apart from this machine as far as that grants it (`etude.rewards.sandbox.sandbox`), and
its tests lie out of its reach: a process beside it, which it cannot touch, knows what a script should print, and runs
the statements about its functions. So nothing that it prints, redefines, kills or ends makes it pass.
"""

from __future__ import annotations

import os
import re
import time
from contextlib import AbstractAsyncContextManager, aclosing
from functools import cached_property
from typing import Any, ClassVar, Literal

from pydantic import Field

from etude.errors import ConfigError, RewardError
from etude.observe import get_logger
from etude.records import Task
from etude.rewards.base import RewardFunction
from etude.rewards.capacity_limiter import CapacityLimiter
from etude.rewards.sandbox.probe import PROTECTIONS, Protection, probe_protections
from etude.rewards.sandbox.program_tests import ProgramTests, read_tests
from etude.rewards.sandbox.sandbox import Sandbox, SandboxBrokenError, SandboxLimits, SandboxLostError

__all__ = ["Code", "extract_code"]

# No repetition gives back what it took, so that the search stays linear in the text.
_FENCE = re.compile(r"(?ms)^[ \t]*+(`{3,}+|~{3,}+)[ \t]*+([^\s`]*+)[^\n]*+\n(.*?)(?:^[ \t]*+\1[ \t]*+$|\Z)")
_DEFAULT_LIMITS = SandboxLimits()
_PYTHON = frozenset({"python", "py", "python3"})


class Code(RewardFunction):
    """1 where the program in an answer passes every test of its task, or the share that it passes.

    The tests are the task's right answer: pairs of inputs and outputs, or `assert` statements
    (`etude.rewards.sandbox.program_tests`).
    """

    score: Literal["all", "share"] = Field(
        "all", description="`all`: 1 for passing every test, else 0; `share`: the share of tests passed"
    )
    timeout: float = Field(10.0, gt=0, description="seconds that a program may take for a test")
    total_timeout: float = Field(
        20.0, gt=0, description="seconds for all tests together; those not come to are not passed"
    )
    cpu: int = Field(
        _DEFAULT_LIMITS.cpu,
        ge=1,
        description="seconds of a processor that a process may use up, for each test; one that is there for all tests "
        "may use up those of all, up to `total`",
    )
    memory_mb: int = Field(
        _DEFAULT_LIMITS.memory_mb, ge=64, description="megabytes of memory for each process of a program"
    )
    disk_mb: int = Field(_DEFAULT_LIMITS.disk_mb, ge=1, description="megabytes that a program may write")
    output_kb: int = Field(_DEFAULT_LIMITS.output_kb, ge=1, description="kilobytes that a program may print for a test")
    max_processes: int = Field(
        _DEFAULT_LIMITS.processes, ge=1, description="processes and threads that a program may have at a time"
    )
    packages: bool = Field(
        _DEFAULT_LIMITS.packages, description="whether programs may import what is installed here, such as numpy"
    )
    max_concurrency: int | None = Field(
        None, ge=1, description="programs that run at a time; null is one for each processor"
    )
    require: tuple[Protection, ...] = Field(
        (), description="protections without which a run does not begin: network, files, disk, processes, rights"
    )

    in_place: ClassVar[bool] = True

    @property
    def max_seconds(self) -> float:
        return self.total_timeout

    @cached_property
    def _limiter(self) -> CapacityLimiter:
        return CapacityLimiter(self.max_concurrency or os.cpu_count() or 1)

    def throttle(self) -> AbstractAsyncContextManager[Any]:
        return self._limiter.slot()

    def prepare(self) -> None:
        """Find out what holds for programs on this machine, and say so."""
        present = probe_protections()
        missing = [name for name in PROTECTIONS if name not in present]
        refused = [name for name in missing if name in self.require]
        if refused:
            raise ConfigError(
                f"`require` asks for {' and '.join(refused)}, and on this machine programs can "
                f"{'; '.join(PROTECTIONS[name].when_missing for name in refused)}: it grants neither namespaces nor "
                f"what would stand in for them (Landlock, seccomp). Run where it does, such as on Linux with user "
                f"namespaces, or leave that out of `require`."
            )
        log = get_logger("rewards")
        if missing:
            log.warning(
                "The programs of answers run with limits and in directories of their own, but on this machine they can "
                "%s. `require` would refuse such a run.",
                "; ".join(PROTECTIONS[name].when_missing for name in missing),
            )
        else:
            log.info(
                "The programs of answers %s.", "; ".join(protection.when_present for protection in PROTECTIONS.values())
            )

    def check(self, task: Task) -> None:
        read_tests(task)

    async def __call__(self, task: Task, answer: str) -> float:
        tests, code = read_tests(task), extract_code(answer)
        deadline = time.monotonic() + self.total_timeout
        try:
            passed = await self._count_passed(tests, code, deadline)
        except SandboxBrokenError as error:
            passed = await self._count_passed_again(tests, code, deadline, error)
        except SandboxLostError as error:
            raise RewardError(f"the sandbox of its program was lost: {error}") from error
        return passed / tests.count if self.score == "share" else float(passed == tests.count)

    async def _count_passed(self, tests: ProgramTests, code: str, deadline: float) -> int:
        """How many tests a program passes."""
        passed = 0
        async with (
            Sandbox(code, self._limits()) as sandbox,
            aclosing(tests.run(sandbox, self.timeout, deadline)) as outcomes,
        ):
            async for test_passed in outcomes:
                passed += test_passed
                if not test_passed and self.score == "all":
                    break
        return passed

    async def _count_passed_again(
        self, tests: ProgramTests, code: str, deadline: float, first_error: SandboxBrokenError
    ) -> int:
        """The same for a program whose box ended under it. The machine may have ended that one; a program whose second
        box ends too has found a way to end boxes, and passes nothing."""
        try:
            return await self._count_passed(tests, code, deadline)
        except SandboxBrokenError:
            get_logger("rewards").warning("A program ended its box twice, and passes no test: %s", first_error)
            return 0
        except SandboxLostError as error:
            raise RewardError(f"the sandbox of its program was lost: {error}") from error

    def _limits(self) -> SandboxLimits:
        return SandboxLimits(self.cpu, self.memory_mb, self.disk_mb, self.output_kb, self.max_processes, self.packages)


def extract_code(answer: str) -> str:
    """The code in an answer."""
    fenced = [(block[2].lower(), block[3]) for block in _FENCE.finditer(answer)]
    python = [code for language, code in fenced if language in _PYTHON]
    return (python or [code for _, code in fenced] or [answer])[-1]
