"""A crew whose ranks are Ray actors, on one node or on many.

                       ┌─ calls ─ actor, rank 0   worker ─┐
    controller ── Ray ─┤                                  ├─ gloo or NCCL, from node to node
                       └─ calls ─ actor, rank 1   worker ─┘

Each rank stands on a place of its pool, which Ray reserves before any is started. What a call or an answer carries that
is large lies in Ray's object store, from where whoever wants it reads it without a copy.

Ray tells when an actor has died. That one is stopped, it does not tell: the rank is asked for what it has to say all
the time, and an answer, be it empty, is its sign of life.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from etude.batch import Batch, Outline
from etude.config.env import for_ranks_elsewhere
from etude.dispatch.config import CrewConfig
from etude.dispatch.crew import AGAIN, TELL, TICK, Joint, Meeting
from etude.dispatch.divide import Share, divide
from etude.dispatch.held import Held, drafted, held, lend, resolved
from etude.dispatch.machine import machine
from etude.dispatch.member import ENDING, Member, Raised, ending
from etude.dispatch.messages import Body, Make, Said, Sent, pack, unpack
from etude.dispatch.pools import Pool, lacking, places
from etude.dispatch.ray_cluster import Cluster
from etude.dispatch.ray_rank import Here, Rank
from etude.errors import CrewError
from etude.observe import LogLevel, format_seconds, get_log
from etude.protocols import spread_of

__all__ = ["Placed", "RayCrew"]

R = TypeVar("R")

LARGE = 64 * 1024
"""Bytes from which on a value lies in the object store; what is smaller travels with its message."""
LOOPBACK = "127.0.0.1"
"""Where ranks meet that all stand on one machine."""
WAIT = 1.0
"""Seconds that a rank is waited for before it is looked at whether anybody still wants to hear it."""
_ray: Any = ray
"""What has no types there, or others than are true."""
_GROUPS = {"work": 1, "give": 1, "told": 1}


class Depot:
    """Ray's object store."""

    def put(self, body: Body, *, anyhow: bool = False) -> Sent:
        """Leave it there, if it is large, or anyhow: on this node, as long as anybody holds what is returned."""
        return ray.put(body) if anyhow or body.size >= LARGE else body

    def take(self, sent: Sent) -> Body:
        """Look at it: in place where it lies on this node, else in a copy that is fetched."""
        body: Body = sent if isinstance(sent, Body) else _ray.get(sent)
        return body

    def take_all(self, sent: Sequence[Sent]) -> list[Body]:
        """The same of several that were put there anyhow, which are fetched side by side."""
        bodies: list[Body] = _ray.get(list(sent)) if sent else []
        return bodies


class Placed:
    """The places of a pool, reserved until this is closed. Ranks are put near each other where that is possible."""

    def __init__(self, pool: Pool, *, final: bool = False) -> None:
        """`final` is a cluster that no other node joins."""
        self.pool, self._final = pool, final
        self._group = placement_group([dict(pool.place)] * pool.ranks, strategy="PACK")

    def wait(self, timeout: float, closing: threading.Event) -> None:
        """Wait until the places are free, and tell now and then what is lacking. Where they never will be, say so."""
        log, began = get_log("dispatch"), time.monotonic()
        if self._final and self._possible < self.pool.ranks:
            raise CrewError(
                f"The cluster has no room for {self._named()}, and no other node joins it. {self._lack()} Lower "
                f"`ranks` or `threads`, or have `RAY_ADDRESS` name a larger cluster."
            )
        ready, told = self._group.ready(), began
        while not ray.wait([ready], timeout=TICK)[0]:
            passed = time.monotonic() - began
            if passed > timeout or closing.is_set():
                raise CrewError(
                    f"The cluster has had no room for {self._named()} for {passed:.0f} s. {self._lack()} Wait until "
                    f"others are done, add nodes, lower `ranks` or `threads`, or give it longer with `crew.timeout`."
                )
            if time.monotonic() - told > TELL:
                told = time.monotonic()
                log.info("After %s, there is no room for %s. %s", format_seconds(passed), self._named(), self._lack())

    @property
    def _possible(self) -> int:
        """How many such places its nodes have in all."""
        return places(self.pool, [node["Resources"] for node in _ray.nodes() if node["Alive"]])

    def _lack(self) -> str:
        told = lacking(self.pool, _ray.cluster_resources(), _ray.available_resources())
        told = told or "There is enough of everything, but not on single nodes that have a whole place."
        if (possible := self._possible) < self.pool.ranks:
            told += f" Were nothing else there, its nodes would have room for {possible}."
        return told

    def options(self, role: str, rank: int) -> dict[str, Any]:
        """How an actor comes to stand on one of them."""
        share = self.pool.share(role)
        return {
            "num_cpus": share.get("CPU", 0.0),
            "num_gpus": share.get("GPU", 0.0),
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, rank),
        }

    def close(self) -> None:
        """Give them back."""
        remove_placement_group(self._group)

    def _named(self) -> str:
        return f"{self.pool.ranks} ranks of {' and '.join(self.pool.roles)}"


class RayCrew(Joint["Actor"]):
    """Workers in Ray actors, spoken to as one."""

    sees_every_gpu = False

    def __init__(
        self,
        make: Callable[..., object],
        *args: object,
        ranks: int,
        share: Share,
        logs: Path,
        config: CrewConfig | None = None,
        threads: int = 1,
        device: Literal["cpu", "cuda"] = "cpu",
        level: LogLevel = "warning",
        role: str = "policy",
        placed: Placed | None = None,
        repeats: int = 1,
    ) -> None:
        """Start the ranks, each with `make(*args)` for a worker, and return once all of them are there.

        As `ProcessCrew`; `logs` is on each rank's own node. `role` names who works here, and `placed` the places that
        it shares with other roles; by default it has its own.
        """
        members = [Actor(rank, role, logs / f"{_file(role)}rank-{rank}.log", self._said) for rank in range(ranks)]
        super().__init__(
            members, share=share, config=config, threads=threads, device=device, level=level, repeats=repeats
        )
        self._role, self._placed, self._own = role, placed, placed is None
        self._depot = Depot()
        self._cluster = Cluster(ranks * threads)
        try:
            if placed is None:
                pool = Pool((role,), ranks, threads, float(device == "cuda"))
                self._placed = Placed(pool, final=self._cluster.ours)
            self._start(make, *args)
        except BaseException:
            self.close()
            raise

    @property
    def nodes(self) -> list[str]:
        """The nodes that they stand on."""
        return [member.here.node for member in self._members]

    def hold(self, method: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        """As `call`, and the batch stays with the ranks: what is returned is a `Held`."""
        division = divide(spread_of(method), args, kwargs, self.ranks, self._share, self._repeats)
        assert division.cut is not None, "a batch that is held was cut from one"
        stays: Any = held(*division.cut, self._answers(method, division, keep=True)[:: self._repeats])
        return stays  # type: ignore[no-any-return]

    def keep(self, value: object) -> Sent:
        """Lay a value into the object store, for as long as anybody has what is returned."""
        return self._stored(value, anyhow=True)

    def compose(self, outline: Outline, kept: Sequence[Sent], make: Make, told: Sequence[Any]) -> Batch:
        """A batch of values that were kept, which each rank makes of those that it is given."""
        stays: Any = drafted(outline, kept, make, told)
        return stays  # type: ignore[no-any-return]

    def fetch(self, batch: Batch) -> Batch:
        """A batch that stayed with the ranks, here."""
        stays: Any = batch
        if not isinstance(stays, Held):
            return batch
        return resolved(stays.lent(), lambda sent: [self._unpack(each) for each in sent])

    def close(self) -> None:
        """End every rank, whatever it is at; and Ray, where it was started for this crew."""
        super().close()
        if self._own and self._placed is not None:
            with suppress(RayError):
                self._placed.close()
            self._placed = None
        self._cluster.close()

    def _pack(self, value: object) -> Sent:
        return self._stored(value)

    def _stored(self, value: object, *, anyhow: bool = False) -> Sent:
        try:
            return self._depot.put(pack(value, lend), anyhow=anyhow)
        except RayError as error:
            raise CrewError(
                f"What the ranks of {self._role} are to be given could not be put into Ray's object store: "
                f"{_why(error)}. Its own logs say more: {self._cluster.logs}"
            ) from error

    def _unpack(self, sent: Sent) -> Any:
        """The value that came from a rank. One that cannot be had any more since the rank is lost is what the keeper
        says of that."""
        until = time.monotonic() + self._config.timeout
        try:
            while not isinstance(sent, Body) and not ray.wait([sent], timeout=WAIT)[0]:
                if self._told.is_set() or time.monotonic() > until:
                    raise GetTimeoutError("nobody hands it over")
            return unpack(self._depot.take(sent))
        except RayError as error:
            self._told.wait(ENDING)
            raise self._error or CrewError(
                f"What a rank of {self._role} has answered cannot be read any more: {_why(error)}. {AGAIN}"
            ) from error

    def _look(self, came: Future[Any], read: Callable[[Future[Any]], None]) -> None:
        """What lies in the object store may have to be fetched, and the thread that heard of it goes on hearing."""
        if came.exception() is not None or isinstance(came.result(), (Body, Raised)):
            read(came)
        else:
            threading.Thread(target=read, args=(came,), name="etude-fetch", daemon=True).start()

    def _spawn(self) -> Meeting:
        """Start every actor on its place, and wait until all of them say where they came to stand."""
        assert self._placed is not None
        until = time.monotonic() + self._config.timeout
        self._placed.wait(self._config.timeout, self._closing)
        given = {} if self._cluster.ours else for_ranks_elsewhere()
        along = {"runtime_env": {"env_vars": given}} if given else {}
        for member in self._members:
            member.start(self._placed.options(self._role, member.rank) | along, self._depot)
        first: list[Here] = self._all([member.ask_where() for member in self._members], until)
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in _ray.nodes()}
        alone = len({here.machine for here in first}) == 1 and bool(first[0].machine)
        for member, here in zip(self._members, first, strict=True):
            member.here, member.address = here, addresses[here.node]
            member.meets_at = LOOPBACK if alone else member.address
        for node in dict.fromkeys(self.nodes):
            stands = [str(member.rank) for member in self._members if member.here.node == node]
            get_log("dispatch").info("Ranks of %s on node %s: %s.", self._role, addresses[node], ", ".join(stands))
        host = self._members[0].meets_at
        (told,) = self._all([self._members[0].ask_meeting(host)], until)
        for member in self._members:
            member.listen(min(1.0, self._config.silence / 5))
        return Meeting(host, *told)

    def _all(self, asked: list[Any], until: float) -> list[Any]:
        """What actors answer that are being started; each that cannot is named."""
        log, began, told = get_log("dispatch"), time.monotonic(), time.monotonic()
        found: dict[Any, Any] = {}
        while len(found) < len(asked):
            for ref in ray.wait(asked, num_returns=len(asked), timeout=TICK)[0]:
                if ref not in found:
                    found[ref] = self._answered(ref, asked.index(ref))
            now = time.monotonic()
            if len(found) < len(asked) and (now > until or self._closing.is_set()):
                raise CrewError(
                    f"Ray did not start {len(asked) - len(found)} of {len(asked)} ranks of {self._role} within "
                    f"`crew.timeout` = {self._config.timeout:g} s. Its own logs say more: {self._cluster.logs}"
                )
            if now - told > TELL:
                told = now
                log.info("After %s: Ray is starting %s.", format_seconds(now - began), self._role)
        return [found[ref] for ref in asked]

    def _answered(self, ref: Any, rank: int) -> Any:
        """What one of them answered that is being started."""
        try:
            return _ray.get(ref)
        except RayError as error:
            raise CrewError(f"Ray could not start rank {rank} of {self._role}: {_why(error)}") from error


class Actor(Member):
    """A rank that is a Ray actor."""

    def __init__(self, rank: int, role: str, log: Path, said: Callable[[Member, Said], None]) -> None:
        super().__init__(rank, log, said)
        self._role = role
        self._actor: Any = None
        self.here = Here(0, "", "")
        """Where it came to stand."""
        self.address = ""
        """Of its node."""
        self.meets_at = ""
        """By which of its node's addresses it speaks to the other ranks."""
        self._killed = threading.Event()
        self._working: Any = None
        self._why = "it was ended"

    def __str__(self) -> str:
        where = f" (process {self.here.pid} on node {self.address})" if self.here.pid else ""
        return f"Rank {self.rank} of {self._role}{where}"

    @property
    def pid(self) -> int:
        """Of its process, on its node."""
        return self.here.pid

    def start(self, options: dict[str, Any], depot: Depot) -> None:
        """Have Ray start it."""
        kind = _ray.remote(concurrency_groups=_GROUPS)(_Rank)
        self._actor = kind.options(max_restarts=0, **options).remote(self.log, sys.path, depot)

    def ask_where(self) -> Any:
        """Where it stands, once that is known."""
        return self._actor.here.remote()

    def ask_meeting(self, host: str) -> Any:
        """Where it will wait for the others."""
        return self._actor.meeting.remote(host)

    def listen(self, every: float) -> None:
        """Have it begin, and hear what it says from now on."""
        self._working = self._actor.work.options(concurrency_group="work").remote(self.meets_at)
        threading.Thread(target=self._hear, args=(every,), name=f"etude-rank-{self.rank}", daemon=True).start()

    def send(self, message: object) -> None:
        """Send a message, without waiting. An actor that has died gets nothing: that is noticed elsewhere."""
        with suppress(RayError):
            self._actor.give.options(concurrency_group="give").remote(message)

    def trace(self) -> None:
        """Have it write to its log where each of its threads stands, whatever they are at."""
        self._there(_signal, self.pid, signal.SIGUSR1)

    def kill(self) -> None:
        """End it now, also one that is stopped and cannot notice."""
        if self._actor is None or self._killed.is_set():
            return
        with suppress(RayError):
            ray.kill(self._actor)
        if self.pid and not self.over.is_set():
            self._there(_signal, self.pid, signal.SIGKILL)
        self._killed.set()

    def wait(self) -> None:
        """Until it is gone."""
        if self._working is not None:
            self.over.wait(ENDING)

    @property
    def ended(self) -> bool:
        """Whether the actor has died, or nothing comes from it any more."""
        return self.over.is_set()

    def end(self) -> str:
        """How it ended, as Ray tells it."""
        return self._why

    def state(self) -> str:
        """What the system says of it, where it stands on this machine."""
        return super().state() if self._is_here else ""

    def last_words(self) -> str:
        """The last lines of its log, as a sentence; a log on another node is read there."""
        if self._is_here or self.log.exists():
            return super().last_words()
        told: str | None = self._there(ending, self.log)
        return told or f"Its log, {self.log}, is on node {self.address}, which does not answer."

    @property
    def _is_here(self) -> bool:
        return bool(self.here.machine) and self.here.machine == machine()

    def _there(self, function: Callable[..., Any], *args: Any) -> Any:
        """Do this on its node: here, if that is this machine; None where nobody does it in time."""
        if self._is_here:
            return function(*args)
        strategy = NodeAffinitySchedulingStrategy(self.here.node, soft=False)
        with suppress(RayError, GetTimeoutError):
            errand: Any = ray.remote(function)
            return ray.get(errand.options(num_cpus=0, scheduling_strategy=strategy).remote(*args), timeout=ENDING)
        return None

    def _hear(self, every: float) -> None:
        """Come for what it says, until it says nothing more; on a thread of its own."""
        tell = self._actor.told.options(concurrency_group="told")
        try:
            asked = tell.remote(every)
            while True:
                if not ray.wait([asked], timeout=WAIT)[0]:
                    if self._killed.is_set():
                        break
                    continue
                messages: Sequence[object] = ray.get(asked)
                asked = tell.remote(every)
                self.heard()
                for message in messages:
                    self.heard(message)
        except Exception as error:  # whatever Ray raises, nothing more comes from there
            self._why = _why(error)
        self.over.set()


class _Rank(Rank):
    """What stands in the actor, told by Ray where that is."""

    def __init__(self, log: Path, path: Sequence[str], depot: Depot) -> None:
        context = ray.get_runtime_context()
        super().__init__(log, path, depot, context.get_node_id())


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _why(error: Exception) -> str:
    """What Ray says of an end, without what it says each time."""
    told = str(error)
    _, found, detail = told.partition("Worker exit detail: ")
    detail = detail.partition("Some common causes")[0].partition("There are some potential root causes")[0]
    lines = [line.strip() for line in told.splitlines() if line.strip()]
    said = detail if found else lines[-1] if lines else type(error).__name__
    said = " ".join(said.split())[:400].rstrip(".")
    return f"its process is gone, as Ray tells: {said}" if found else said


def _file(role: str) -> str:
    """What the log files of a role begin with, where it is not the only one."""
    return "" if role == "policy" else f"{role}-"
