"""A run on a simulated cluster: rollouts, engines and the trainer as discrete events around the run's own scheduler.

    wait for a step ─► update ─► publish ─► evaluate, save ─► the next step      the trainer
    runner ─► line ─► engine ─► tool ─► … ─► judge ─► runner, scheduler          a rollout

At most `attempts` rollouts are on their way; others wait for a runner, first come, first served. A rollout that fails
is made again up to `retries` times, as in a run, and the scheduler hears of its last attempt.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush

from etude.recipes.collect.scheduler import (
    AdmitStep,
    CollectionScheduler,
    DropTask,
    IssueRollout,
    RolloutFailed,
    RolloutFinished,
    SchedulerEvent,
    StepOpened,
    VersionPublished,
)
from etude.tools.simulate.cluster import NEVER, Cluster, Engines
from etude.tools.simulate.workload import SimulatedRollout, Workload

DAY_S = 86_400.0
SHARED_RATE = 0.5
"""The speed of engine and trainer while both compute on the same processors."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """The seconds of one step, from the moment it was requested."""

    step: int
    wait_s: float
    """Seconds that the trainer waited for the step's groups."""
    update_s: float
    publish_s: float
    between_s: float
    tasks: tuple[int, ...]
    """The tasks that the step trained on."""
    tokens: int
    """The tokens that the step trained on."""
    last_tokens: int
    """The tokens of the rollout that the step waited for last; 0 if it did not wait."""
    last_tool_s: float = 0.0
    """The seconds that this rollout spent in tools."""

    @property
    def seconds(self) -> float:
        """The whole step."""
        return self.wait_s + self.update_s + self.publish_s + self.between_s


@dataclass
class SimulationResult:
    """The result of a simulated run."""

    steps: list[StepResult] = field(default_factory=list)
    staleness: Counter[int] = field(default_factory=Counter)
    """The number of trained rollouts by their staleness."""
    tokens_by_staleness: Counter[int] = field(default_factory=Counter)
    """The sum of the tokens of trained rollouts by their staleness."""
    trained: list[int] = field(default_factory=list)
    """The tokens of each rollout that was trained on."""
    finished: list[int] = field(default_factory=list)
    """The tokens of each rollout that was scored."""
    dropped: Counter[str] = field(default_factory=Counter)
    """The number of tasks that were dropped, by cause."""
    failed_attempts: int = 0
    engine_failures: int = 0
    seconds: float = 0.0
    busy: float = 0.0
    """The share of the engines' time in which they had a request."""
    drawn: float = 0.0
    """The work of the engines, in tokens; in a replay in seconds."""


@dataclass(slots=True)
class _Rollout:
    """A rollout on its way."""

    task: int
    sample: int
    plan: SimulatedRollout
    turn: int = 0
    attempt: int = 0
    oldest: int = -1


class Simulation:
    """One run. `run` plays it to its last step."""

    def __init__(
        self,
        cluster: Cluster,
        workload: Workload,
        scheduler: CollectionScheduler,
        *,
        steps: int,
        skip: int = 0,
        retries: int = 1,
        seed: int = 0,
        on_step: Callable[[], None] = lambda: None,
    ) -> None:
        """skip: steps at the beginning that the result leaves out. on_step: called after each step."""
        self._cluster = cluster
        self._workload = workload
        self._scheduler = scheduler
        self._steps = steps
        self._skip = skip
        self._retries = retries
        self._on_step = on_step
        self._engines = Engines(cluster, self._started)
        self._chance = random.Random(seed)
        self._now = self._engine_now = 0.0
        """The time, and that of the engines' own clock: it stops during a pause, and is slower beside an update if both
        share processors."""
        self._paused = False
        self._update: StepResult | None = None
        """The step that trains."""
        self._update_left = NEVER
        """Seconds that its update still takes at full speed."""
        self._update_began = 0.0
        self._version = self._step = 0
        self._asked_at = self._measured_from = 0.0
        self._calls: list[tuple[float, int, Callable[[], None]]] = []
        """What happens at a time, as a heap: time, number, call."""
        self._number = 0
        self._open: dict[int, _Rollout] = {}
        """Rollouts on their way by their number."""
        self._attempts = NEVER if cluster.attempts is None else cluster.attempts
        self._running = 0
        """The number of rollouts that have a runner."""
        self._waiting: deque[int] = deque()
        """The rollouts that wait for a runner."""
        self._scored: dict[tuple[int, int], _Rollout] = {}
        """Rollouts that were scored, until their task is closed."""
        self._last: _Rollout | None = None
        """The rollout that ended last."""
        self.result = SimulationResult()

    def run(self) -> SimulationResult:
        """Play the run, and return its result."""
        self._tell(VersionPublished(0, 0))
        self._lose_later()
        self._ask()
        engines = self._engines
        while self._step <= self._steps:
            next_end = NEVER if self._paused else engines.next_end
            shared = self._cluster.shares_processors and next_end < NEVER and self._update is not None
            rate = SHARED_RATE if shared else 1.0
            ends_at = self._now + (next_end - self._engine_now) / rate
            trained_at = self._now + self._update_left / rate
            called_at = self._calls[0][0] if self._calls else NEVER
            at = min(ends_at, trained_at, called_at)
            if at == NEVER:
                raise RuntimeError(f"step {self._step} waits, and nothing runs")
            self._update_left -= (at - self._now) * rate
            if not self._paused:
                self._engine_now = next_end if at == ends_at else self._engine_now + (at - self._now) * rate
            self._now = at
            if at == ends_at:
                self._turn_ended(engines.end(self._engine_now))
            elif at == trained_at:
                self._trained()
            else:
                heappop(self._calls)[2]()
        engines.count(self._engine_now)
        result, seconds = self.result, self._now - self._measured_from
        result.seconds = seconds
        result.drawn = engines.drawn
        result.busy = engines.busy_s / (seconds * self._cluster.engines) if seconds else 0.0
        return result

    # -- time ---------------------------------------------------------------------------------------------------------

    def _after(self, seconds: float, call: Callable[[], None]) -> None:
        """Call this later; at once if no time passes in between."""
        if seconds <= 0:
            call()
            return
        self._number += 1
        heappush(self._calls, (self._now + seconds, self._number, call))

    # -- the scheduler ------------------------------------------------------------------------------------------------

    def _tell(self, event: SchedulerEvent) -> None:
        for decision in self._scheduler.handle(event):
            match decision:
                case IssueRollout(task, sample, _):
                    self._issue(task, sample)
                case AdmitStep():
                    self._admit(decision)
                case DropTask(task, cause):
                    self.result.dropped[cause] += 1
                    self._forget(task)

    def _issue(self, task: int, sample: int) -> None:
        self._number += 1
        self._open[self._number] = _Rollout(task, sample, self._workload.draw(task, sample))
        self._waiting.append(self._number)
        self._start_attempts()

    def _forget(self, task: int) -> None:
        """Drop the rollouts of a task that was closed."""
        sample = 0
        while self._scored.pop((task, sample), None) is not None:
            sample += 1

    # -- rollouts -----------------------------------------------------------------------------------------------------

    def _start_attempts(self) -> None:
        """Give the free runners a rollout each."""
        while self._waiting and self._running < self._attempts:
            self._running += 1
            self._prepare(self._waiting.popleft())

    def _prepare(self, number: int) -> None:
        self._after(self._open[number].plan.before, lambda: self._next_turn(number))

    def _started(self, number: int) -> None:
        rollout = self._open[number]
        if rollout.turn == 0:
            rollout.oldest = self._version

    def _turn_ended(self, number: int) -> None:
        rollout = self._open[number]
        turns = rollout.plan.turns
        wait = turns[rollout.turn].wait
        rollout.turn += 1
        if rollout.turn < len(turns):
            self._after(wait, lambda: self._next_turn(number))
        else:
            self._after(wait + self._cluster.judge_s, lambda: self._ended(number))

    def _next_turn(self, number: int) -> None:
        rollout = self._open[number]
        self._engines.submit(self._engine_now, number, rollout.plan.turns[rollout.turn].work)

    def _ended(self, number: int) -> None:
        rollout = self._open[number]
        if rollout.attempt < rollout.plan.failures:
            rollout.attempt = rollout.attempt + 1
            rollout.turn = 0
            self.result.failed_attempts += 1
            if rollout.attempt <= self._retries:
                self._prepare(number)
                return
            self._release(number)
            self._tell(RolloutFailed(rollout.task, rollout.sample))
            return
        self._release(number)
        self._last = self._scored[rollout.task, rollout.sample] = rollout
        self.result.finished.append(rollout.plan.tokens)
        self._tell(RolloutFinished(rollout.task, rollout.sample, rollout.plan.metric))

    def _release(self, number: int) -> None:
        """Forget a rollout that has ended, and give its runner the next one."""
        del self._open[number]
        self._running -= 1
        self._start_attempts()

    # -- the trainer --------------------------------------------------------------------------------------------------

    def _ask(self) -> None:
        """Ask for the groups of the next step, which ends the run after its last one."""
        if self._step == self._skip > 0:
            self._engines.count(self._engine_now)
            self._engines.busy_s = self._engines.drawn = 0.0
            self.result = SimulationResult()
            self._measured_from = self._now
        self._step += 1
        if self._step <= self._steps:
            self._asked_at = self._now
            self._tell(StepOpened(self._step))

    def _admit(self, admit: AdmitStep) -> None:
        """Train on a step's groups, then publish."""
        rollouts = [self._scored.pop((task, sample)) for task, samples in admit.tasks.items() for sample in samples]
        for task in admit.tasks:
            self._forget(task)
        tokens = [rollout.plan.tokens for rollout in rollouts]
        self.result.trained += tokens
        for rollout, drawn in zip(rollouts, tokens, strict=True):
            self.result.staleness[admit.step - 1 - rollout.oldest] += 1
            self.result.tokens_by_staleness[admit.step - 1 - rollout.oldest] += drawn
        cluster = self._cluster
        last = self._last
        wait = self._now - self._asked_at
        waited_for = last is not None and wait > 0
        step = StepResult(
            admit.step,
            wait,
            cluster.update_s(admit.step, sum(tokens)),
            cluster.publish_s,
            cluster.between_s(admit.step),
            tuple(admit.tasks),
            sum(tokens),
            last.plan.tokens if last is not None and waited_for else 0,
            sum(turn.wait for turn in last.plan.turns) if last is not None and waited_for else 0.0,
        )
        self._update = step
        self._update_left = step.update_s
        self._update_began = self._now

    def _trained(self) -> None:
        step, cluster = self._update, self._cluster
        assert step is not None
        self.result.steps.append(replace(step, update_s=self._now - self._update_began))
        self._update = None
        self._update_left = NEVER
        if cluster.pause_s:
            self._after(cluster.publish_s - cluster.pause_s, self._pause)
        self._after(cluster.publish_s, self._published)

    def _pause(self) -> None:
        self._paused = True

    def _published(self) -> None:
        """Every engine has the new weights."""
        self._paused = False
        self._version = self._step
        self._tell(VersionPublished(self._version, self._version))
        self._on_step()
        self._after(self._cluster.between_s(self._step), self._ask)

    # -- engines that are lost ----------------------------------------------------------------------------------------

    def _lose_later(self) -> None:
        rate = self._cluster.failures_per_day * self._cluster.engines / DAY_S
        if rate:
            self._after(self._chance.expovariate(rate), self._lose)

    def _lose(self) -> None:
        engine = self._chance.randrange(self._cluster.engines)
        if self._engines.is_up(engine):
            self.result.engine_failures += 1
            self._engines.lose(engine, self._engine_now)
            self._after(self._cluster.restart_s, lambda: self._engines.restore(engine, self._engine_now))
        self._lose_later()
