"""The reward of programs: the code of an answer runs in a sandbox against the tests of its task.

The code is the last block of an answer that is fenced as Python, otherwise the last fenced block, otherwise the whole
text. It is isolated from this machine as far as the kernel allows (`etude.rewards.sandbox.sandbox`). The tests are out
of its reach: a separate process, the test runner, holds the expected output and runs the statements about functions.
So a program cannot pass by its prints, by redefining or killing anything, or by ending early.
"""

from __future__ import annotations

import os
import re
from contextlib import AbstractAsyncContextManager, aclosing
from functools import cached_property
from typing import Any, ClassVar, Literal

from pydantic import Field

from etude.errors import ConfigError, RewardError
from etude.observe import get_logger
from etude.records import Task
from etude.rewards.base import CapacityLimiter, RewardFunction
from etude.rewards.sandbox.probe import PROTECTIONS, Protection, probe_protections
from etude.rewards.sandbox.program_tests import ProgramTests, read_tests
from etude.rewards.sandbox.sandbox import Sandbox, SandboxBrokenError, SandboxLimits, SandboxLostError
from etude.running_time import running_time

# No repetition backtracks, so that the search stays linear in the text.
_FENCE = re.compile(r"(?ms)^[ \t]*+(`{3,}+|~{3,}+)[ \t]*+([^\s`]*+)[^\n]*+\n(.*?)(?:^[ \t]*+\1[ \t]*+$|\Z)")
_PYTHON = frozenset({"python", "py", "python3"})


class Code(SandboxLimits, RewardFunction):
    """1 if the program in an answer passes every test of its task, or the share of the tests that it passes.

    The tests are the task's right answer: pairs of inputs and outputs, or `assert` statements
    (`etude.rewards.sandbox.program_tests`).
    """

    score: Literal["all", "share"] = Field(
        "all", description="`all`: 1 if all tests pass, else 0; `share`: the share of the tests that pass"
    )
    timeout: float = Field(10.0, gt=0, description="seconds of one test; larger lets slow programs pass")
    total_timeout: float = Field(
        20.0, gt=0, description="seconds of all tests together; larger reaches more tests, and tests not reached fail"
    )
    max_concurrency: int | None = Field(
        None, ge=1, description="programs that run at a time; null is one for each processor"
    )
    require: tuple[Protection, ...] = Field(
        (), description="protections that a run needs to start: network, files, disk, processes, rights"
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
        """Find out which protections hold on this machine, and log them."""
        present = probe_protections()
        missing = [name for name in PROTECTIONS if name not in present]
        refused = [name for name in missing if name in self.require]
        if refused:
            raise ConfigError(
                f"`require` asks for {' and '.join(refused)}, and on this machine programs can "
                f"{'; '.join(PROTECTIONS[name].when_missing for name in refused)}: it grants neither namespaces nor "
                f"their substitutes (Landlock, seccomp). Run on a machine that does, such as Linux with user "
                f"namespaces, or leave that out of `require`."
            )
        log = get_logger("rewards")
        if missing:
            log.warning(
                "The programs of answers run with limits and in their own directories, but on this machine they can "
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
        deadline = running_time() + self.total_timeout
        passed, first_error = 0, None
        for _ in range(2):  # the machine, and not the program, may have ended the first sandbox
            try:
                passed = await self._count_passed(tests, code, deadline)
                break
            except SandboxBrokenError as error:
                first_error = first_error or error
            except SandboxLostError as error:
                raise RewardError(f"the sandbox of its program was lost: {error}") from error
        else:
            get_logger("rewards").warning("A program ended its sandbox twice, and passes no test: %s", first_error)
        return passed / tests.count if self.score == "share" else float(passed == tests.count)

    async def _count_passed(self, tests: ProgramTests, code: str, deadline: float) -> int:
        """Count the tests that a program passes."""
        passed = 0
        async with (
            Sandbox(code, self) as sandbox,
            aclosing(tests.run(sandbox, self.timeout, deadline)) as outcomes,
        ):
            async for test_passed in outcomes:
                passed += test_passed
                if not test_passed and self.score == "all":
                    break
        return passed


def extract_code(answer: str) -> str:
    """Return the code in an answer."""
    fenced = [(block[2].lower(), block[3]) for block in _FENCE.finditer(answer)]
    python = [code for language, code in fenced if language in _PYTHON]
    return (python or [code for _, code in fenced] or [answer])[-1]
