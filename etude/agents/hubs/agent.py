"""The program of a hub as an agent: it plays an attempt by calls of the model endpoint, as its authors wrote it."""

from __future__ import annotations

from typing import Any, Self

from etude.agents.agent import LLM, Agent, CallSignature
from etude.agents.hubs.pool import HubPool
from etude.agents.hubs.process import HubSpec
from etude.errors import EnvError, GuestLostError, HubError
from etude.records import Outcome, Task
from etude.store.queue.rollout_queue import AttemptReport


class HubAgent(Agent):
    """Has the guests of a run play its attempts. It belongs to the process that started them."""

    def __init__(self, pool: HubPool) -> None:
        self._pool = pool

    def __copy__(self) -> Self:
        return self  # all runners of this process share the guests

    @property
    def spec(self) -> HubSpec:
        """The environment that the guests play, and how."""
        return self._pool.spec

    @property
    def title(self) -> str:
        return self.spec.title

    def call_signature(self) -> CallSignature:
        return CallSignature(("task", "llm"), is_async=True)

    async def run(self, task: Task, llm: LLM) -> AttemptReport:
        """Have a guest play one attempt. A cancelled attempt is cancelled there too."""
        pool = self._pool
        try:
            guest, session = await pool.begin()
            try:
                ended = await pool.call(
                    guest.ask(
                        "run",
                        session=session,
                        task=dict(task.fields),
                        base_url=llm.base_url,
                        api_key=llm.api_key,
                        model=llm.model,
                    )
                )
            finally:
                await pool.end((guest, session))
        except (GuestLostError, EnvError) as error:
            return AttemptReport(Outcome.INFRA_ERROR, str(error))
        except HubError as error:
            return AttemptReport(Outcome.FAILED, f"{self.title} failed: {error}")
        return self._read(ended)

    def _read(self, ended: Any) -> AttemptReport:
        """Return the report that a guest's answer is."""
        if not isinstance(ended, dict) or not ended.keys() >= {"rewards", "errors", "timed_out"}:
            return AttemptReport(
                Outcome.FAILED, f"{self.title} gave {str(ended)[:200]!r}, which is no end of a rollout."
            )
        error = f"{self.title} ended with errors. {' '.join(ended['errors'])}"
        if ended["timed_out"]:
            return AttemptReport(Outcome.TIMED_OUT, error)
        if ended["errors"]:
            return AttemptReport(Outcome.FAILED, error)
        truncated = bool(ended.get("truncated"))
        return AttemptReport(Outcome.SUCCEEDED, reward=ended["rewards"] or None, truncated=truncated)
