"""A taskset of verifiers for tests, with a harness of its own: the model copies a digit.

The harness makes its calls in this process, so that a rollout costs no Python of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import verifiers.v1 as vf
from verifiers.v1.runtimes import ProgramResult, Runtime


class CopyData(vf.TaskData):
    """The digit that is right."""

    digit: str


class CopyTask(vf.Task[CopyData, vf.State, vf.TaskConfig]):
    """One digit to copy."""

    @vf.reward(weight=0.5)
    async def digit(self, trace: vf.Trace) -> float:
        """Reward an answer that is one of the digits."""
        return float(trace.last_reply.strip() in ("1", "2", "3"))

    @vf.reward(weight=0.5)
    async def right(self, trace: vf.Trace) -> float:
        """Reward the answer that was asked for."""
        return float(trace.last_reply.strip() == self.data.digit)


class CopyTaskset(vf.Taskset[CopyTask, vf.TasksetConfig]):
    """Three digits, again and again."""

    INFINITE = True

    def load(self) -> Iterator[CopyTask]:
        while True:
            for digit in "123":
                yield CopyTask(CopyData(prompt=f"{digit} ", digit=digit), self.config.task)


class CopyHarness(vf.Harness[vf.HarnessConfig]):
    """One call of the model."""

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> ProgramResult:
        asked = {"model": ctx.model, "messages": [{"role": "user", "content": data.prompt}]}
        async with httpx.AsyncClient(
            headers={"Authorization": f"Bearer {secret}"}, timeout=None, verify=False
        ) as client:
            answer = await client.post(f"{endpoint}/chat/completions", json=asked)
        return ProgramResult(0 if answer.is_success else 1, answer.text, "")


__all__ = ["CopyHarness", "CopyTaskset"]
