"""The guests of a run: as many processes as `env.workers`, each with many rollouts at a time.

consumes       rollouts, each of which gets an environment in the guest with the fewest; requests for tasks
produces       environments (`HubEnv`), and tasks
waits for      a guest that is ready, while there is none; a lost one is replaced after a delay
unblocked by   the guest that is ready, or the error that ends the run: a refusal, or guests that all end unused

A request that is cancelled, as after `env.timeout`, leaves a call in its guest that nothing can end. Such a guest gets
no further rollout: another one takes its place, and it is killed when its other rollouts have ended.

All of it lives on an event loop of its own, on one thread, so that callers may be on any loop or on none.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Coroutine, Mapping
from concurrent.futures import Future
from itertools import count
from typing import Any, Self, TypeAlias, TypeVar

from etude.agents.execution.backoff import RestartBackoff
from etude.agents.hubs.process import HubProcess, HubSpec
from etude.chat.messages import message_to_dict
from etude.errors import ConfigError, EnvError, EtudeError, GuestLostError, HubError
from etude.observe import get_logger
from etude.protocols import Observation
from etude.records import Message, Task

T = TypeVar("T")
Place: TypeAlias = tuple[HubProcess, int]
"""The guest of a rollout, and the rollout's number there."""
MAX_UNUSED = 3
"""Guests that may end one after the other without an answer, before the run ends."""
CLOSE_TIMEOUT_S = 30.0
TASKS_PER_REQUEST = 1000
OBSERVATION_FIELDS = frozenset({"content", "reward", "done", "truncated", "tools", "role", "opponent"})


class HubPool:
    """The guests of one environment. Use it as a context manager: it starts at the beginning, and ends them all."""

    def __init__(self, spec: HubSpec, workers: int) -> None:
        self.spec = spec
        self._workers = workers
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="etude-hub", daemon=True)
        self._sessions: dict[HubProcess, set[int]] = {}
        """The rollouts of each guest that has begun and not ended."""
        self._retired: dict[HubProcess, asyncio.Event] = {}
        """The event of each guest that gets rollouts, set where it gets no further ones."""
        self._numbers = count(1)
        self._changed = asyncio.Event()
        self._closing = asyncio.Event()
        self.failure: EtudeError | None = None
        """The error after which no guest begins."""

    def __enter__(self) -> Self:
        """Start the guests, and wait until one is ready. Raise `ConfigError` if it refuses its options."""
        self._thread.start()
        try:
            self._submit(self.ready()).result()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def check(self) -> None:
        """Raise the error that ended the guests, if no other will begin."""
        if self.failure is not None:
            raise self.failure

    def close(self) -> None:
        """End all guests."""
        self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join(CLOSE_TIMEOUT_S)

    def tasks(self, first: int, stop: int) -> list[Mapping[str, Any]]:
        """Return the hub's tasks with these numbers; fewer at its end."""
        return self._submit(self._draw(first, stop)).result()

    def new_env(self) -> HubEnv:
        """Return an environment for one rollout."""
        return HubEnv(self)

    async def wait_ready(self) -> None:
        """Wait until a guest takes rollouts. Raise the error that ends the run."""
        await self.call(self.ready())

    async def begin(self) -> Place:
        """Return a guest for a rollout, and the rollout's number there. A caller that was cancelled has begun none."""
        taken = self._submit(self.take())
        try:
            return await asyncio.shield(asyncio.wrap_future(taken))
        except asyncio.CancelledError:
            taken.add_done_callback(self._give_back)  # it may have a guest already, or get one later
            raise

    async def end(self, place: Place) -> None:
        """End a rollout in its guest, also where the caller is cancelled meanwhile."""
        await asyncio.shield(self.call(self.release(*place)))

    def call(self, work: Coroutine[Any, Any, T]) -> Awaitable[T]:
        """Return what awaits work of the pool on the caller's loop."""
        return asyncio.wrap_future(self._submit(work))

    def _give_back(self, taken: Future[Place]) -> None:
        """End a rollout whose caller was cancelled while it began."""
        if not taken.cancelled() and taken.exception() is None:
            self._submit(self.release(*taken.result()))

    # -- on the pool's loop --------------------------------------------------------------------------------------------

    async def ready(self) -> None:
        """Wait until a guest takes rollouts."""
        while not self._retired:
            self.check()
            self._changed.clear()
            await self._changed.wait()

    async def take(self) -> Place:
        """Return a guest for a rollout, and the rollout's number there."""
        await self.ready()
        guest = min(self._retired, key=lambda each: len(self._sessions[each]))
        session = next(self._numbers)
        self._sessions[guest].add(session)
        return guest, session

    async def ask(self, guest: HubProcess, do: str, **fields: Any) -> Any:
        """Return a guest's answer. A guest that is late retires."""
        try:
            return await guest.ask(do, **fields)
        except asyncio.CancelledError:
            if guest in self._retired:
                self._retired[guest].set()
            raise

    async def release(self, guest: HubProcess, session: int) -> None:
        """End a rollout. A guest that retired is killed after its last one."""
        guest.tell("close", session=session)
        sessions = self._sessions.get(guest)
        if sessions is None:
            return
        sessions.discard(session)
        if not sessions and (guest not in self._retired or self._retired[guest].is_set()):
            del self._sessions[guest]
            await guest.kill("was late")

    async def _draw(self, first: int, stop: int) -> list[Mapping[str, Any]]:
        await self.ready()
        guest = next(iter(self._retired))
        drawn: list[Mapping[str, Any]] = []
        while first + len(drawn) < stop:
            wanted = min(TASKS_PER_REQUEST, stop - first - len(drawn))
            tasks = await guest.ask("tasks", first=first + len(drawn), count=wanted)
            if not isinstance(tasks, list) or not all(isinstance(task, dict) for task in tasks):
                raise HubError(f"{self.spec.title} gave tasks that are no JSON objects.")
            drawn += tasks
            if len(tasks) < wanted:
                break
        return drawn

    async def _keep_guest(self) -> None:
        """Keep one guest running: replace it where it ended, or retired."""
        unused = 0
        backoff = RestartBackoff()
        loop = asyncio.get_running_loop()
        while True:
            guest = HubProcess(self.spec)
            backoff.started(loop.time())
            try:
                await guest.start()
                await self._use(guest)
                unused = 0 if guest.has_answered else unused + guest.ended.is_set()
            except ConfigError as error:
                return self._fail(error)
            except GuestLostError as error:
                unused += 1
                lost: EtudeError = error
            else:
                lost = guest.lost()
            if not guest.ended.is_set():  # it retired
                continue
            get_logger("agents").warning("%s", lost)
            if unused == MAX_UNUSED:
                return self._fail(EnvError(f"{MAX_UNUSED} guests ended one after the other without an answer. {lost}"))
            delay = backoff.next_delay(loop.time())
            if delay is None:
                return self._fail(EnvError(f"Guests end again and again. {lost}"))
            await asyncio.sleep(delay)

    async def _use(self, guest: HubProcess) -> None:
        """Give a guest rollouts until it ends or retires."""
        retired = asyncio.Event()
        self._retired[guest] = retired
        self._sessions[guest] = set()
        self._changed.set()
        ends = [asyncio.create_task(guest.ended.wait()), asyncio.create_task(retired.wait())]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            del self._retired[guest]
            for end in ends:
                end.cancel()
            if guest.ended.is_set():
                self._sessions.pop(guest, None)  # gone if it retired too, and its last rollout has ended

    def _fail(self, error: EtudeError) -> None:
        self.failure = error
        self._changed.set()

    async def _run(self) -> None:
        keepers = [asyncio.create_task(self._keep_guest()) for _ in range(self._workers)]
        await self._closing.wait()
        for keeper in keepers:
            keeper.cancel()
        await asyncio.gather(*keepers, return_exceptions=True)
        await asyncio.gather(*(guest.kill("was not needed any more") for guest in self._sessions))

    def _serve(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._run())

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)


class HubEnv:
    """One environment of a hub, as the run plays it."""

    def __init__(self, pool: HubPool) -> None:
        self._pool = pool
        self._place: Place | None = None

    async def reset(self, task: Task) -> Observation:
        """Begin the rollout of a task."""
        self._place = await self._pool.begin()
        return await self._ask("reset", task=dict(task.fields))

    async def step(self, answer: Message) -> Observation:
        """Return the observation after an answer."""
        return await self._ask("step", answer=message_to_dict(answer, arguments_as_text=True))

    async def close(self) -> None:
        """End the rollout in its guest."""
        if self._place is not None:
            await self._pool.end(self._place)

    async def _ask(self, do: str, **fields: Any) -> Observation:
        assert self._place is not None, "a rollout begins with `reset`"
        guest, session = self._place
        result = await self._pool.call(self._pool.ask(guest, do, session=session, **fields))
        if not isinstance(result, dict) or not result.keys() <= OBSERVATION_FIELDS:
            raise HubError(f"it gave {str(result)[:200]!r}, which is no observation")
        return Observation(**result)
