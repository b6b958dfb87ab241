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
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from etude.batch import Batch, BatchMeta
from etude.config.env import build_remote_rank_env
from etude.dispatch.config import CrewConfig
from etude.dispatch.machine import machine_id
from etude.dispatch.messages import BatchFactory, Payload, PayloadRef, RankLogRecord, deserialize, serialize
from etude.dispatch.multi_rank_crew import REPORT_INTERVAL, RESTART_HINT, TICK, MultiRankCrew, Rendezvous
from etude.dispatch.rank_handle import EXIT_TIMEOUT, RankFailure, RankHandle, read_log_tail
from etude.dispatch.ray_cluster import RayCluster
from etude.dispatch.ray_rank import RankActor, RankLocation
from etude.dispatch.ray_reservation import PoolReservation
from etude.dispatch.remote_batch import RemoteBatch, compose_remote_batch, gather_remote_batch, load_batch, to_batch_ref
from etude.dispatch.resource_pool import ResourcePool
from etude.dispatch.split_call import Partitioner, split_call
from etude.errors import CrewError
from etude.observe import LogLevel, format_seconds, get_logger
from etude.protocols import get_dispatch_mode

__all__ = ["RayCrew"]

R = TypeVar("R")

MIN_STORED_BYTES = 64 * 1024
"""Bytes from which on a value lies in the object store; what is smaller travels with its message."""
LOOPBACK = "127.0.0.1"
"""Where ranks meet that all stand on one machine."""
POLL_SECONDS = 1.0
"""Seconds that a rank is waited for before it is looked at whether anybody still wants to hear it."""
_ray: Any = ray
"""What has no types there, or others than are true."""
_GROUPS = {"serve": 1, "deliver": 1, "take_messages": 1}


class RayObjectStore:
    """Ray's object store."""

    def put(self, payload: Payload, *, always: bool = False) -> PayloadRef:
        """Leave it there, if it is large, or anyhow: on this node, as long as anybody holds what is returned."""
        return ray.put(payload) if always or payload.size >= MIN_STORED_BYTES else payload

    def get(self, payload_ref: PayloadRef) -> Payload:
        """Look at it: in place where it lies on this node, else in a copy that is fetched."""
        payload: Payload = payload_ref if isinstance(payload_ref, Payload) else _ray.get(payload_ref)
        return payload

    def get_all(self, payload_refs: Sequence[PayloadRef]) -> list[Payload]:
        """The same of several that were put there anyhow, which are fetched side by side."""
        payloads: list[Payload] = _ray.get(list(payload_refs)) if payload_refs else []
        return payloads


class RayCrew(MultiRankCrew["RayRankHandle"]):
    """Workers in Ray actors, spoken to as one."""

    sees_every_gpu = False

    def __init__(
        self,
        factory: Callable[..., object],
        *args: object,
        ranks: int,
        share: Partitioner,
        logs: Path,
        config: CrewConfig | None = None,
        threads: int = 1,
        device: Literal["cpu", "cuda"] = "cpu",
        level: LogLevel = "warning",
        role: str = "policy",
        placed: PoolReservation | None = None,
        repeats: int = 1,
    ) -> None:
        """Start the ranks, each with `make(*args)` for a worker, and return once all of them are there.

        As `ProcessCrew`; `logs` is on each rank's own node. `role` names who works here, and `placed` the places that
        it shares with other roles; by default it has its own.
        """
        handles = [
            RayRankHandle(rank, role, logs / f"{_log_prefix(role)}rank-{rank}.log", self._forward_log)
            for rank in range(ranks)
        ]
        super().__init__(
            handles, share=share, config=config, threads=threads, device=device, level=level, repeats=repeats
        )
        self._role, self._placed, self._own = role, placed, placed is None
        self._object_store = RayObjectStore()
        self._cluster = RayCluster(ranks * threads)
        try:
            if placed is None:
                pool = ResourcePool((role,), ranks, threads, float(device == "cuda"))
                self._placed = PoolReservation(pool, fixed_size=self._cluster.is_own)
            self._start(factory, *args)
        except BaseException:
            self.close()
            raise

    @property
    def nodes(self) -> list[str]:
        """The nodes that they stand on."""
        return [handle.location.node for handle in self._handles]

    def call_for_ref(self, method: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        """As `call`, and the batch stays with the ranks: what is returned is a `RemoteBatch`."""
        split = split_call(get_dispatch_mode(method), args, kwargs, self.ranks, self._share, self._repeats)
        assert split.batch_split is not None, "a batch that is held was cut from one"
        remote: Any = gather_remote_batch(
            *split.batch_split, self._call_ranks(method, split, keep=True)[:: self._repeats]
        )
        return remote  # type: ignore[no-any-return]

    def put(self, value: object) -> PayloadRef:
        """Lay a value into the object store, for as long as anybody has what is returned."""
        return self._store(value, always=True)

    def build_batch(
        self, meta: BatchMeta, refs: Sequence[PayloadRef], factory: BatchFactory, metadata: Sequence[Any]
    ) -> Batch:
        """A batch of values that were kept, which each rank makes of those that it is given."""
        remote: Any = compose_remote_batch(meta, refs, factory, metadata)
        return remote  # type: ignore[no-any-return]

    def fetch(self, batch: Batch) -> Batch:
        """A batch that stayed with the ranks, here."""
        remote: Any = batch
        if not isinstance(remote, RemoteBatch):
            return batch
        return load_batch(remote.to_ref(), lambda payload_refs: [self._deserialize(ref) for ref in payload_refs])

    def close(self) -> None:
        """End every rank, whatever it is at; and Ray, where it was started for this crew."""
        super().close()
        if self._own and self._placed is not None:
            with suppress(RayError):
                self._placed.close()
            self._placed = None
        self._cluster.close()

    def _serialize(self, value: object) -> PayloadRef:
        return self._store(value)

    def _store(self, value: object, *, always: bool = False) -> PayloadRef:
        try:
            return self._object_store.put(serialize(value, to_batch_ref), always=always)
        except RayError as error:
            raise CrewError(
                f"What the ranks of {self._role} are to be given could not be put into Ray's object store: "
                f"{_describe_ray_error(error)}. Its own logs say more: {self._cluster.logs}"
            ) from error

    def _deserialize(self, payload_ref: PayloadRef) -> Any:
        """The value that came from a rank. One that cannot be had any more since the rank is lost is what the keeper
        says of that."""
        deadline = time.monotonic() + self._config.timeout
        try:
            while not isinstance(payload_ref, Payload) and not ray.wait([payload_ref], timeout=POLL_SECONDS)[0]:
                if self._failure_announced.is_set() or time.monotonic() > deadline:
                    raise GetTimeoutError("nobody hands it over")
            return deserialize(self._object_store.get(payload_ref))
        except RayError as error:
            self._failure_announced.wait(EXIT_TIMEOUT)
            raise self._error or CrewError(
                f"What a rank of {self._role} has answered cannot be read any more: {_describe_ray_error(error)}. "
                f"{RESTART_HINT}"
            ) from error

    def _handle_reply(self, reply: Future[Any], read: Callable[[Future[Any]], None]) -> None:
        """What lies in the object store may have to be fetched, and the thread that heard of it goes on hearing."""
        if reply.exception() is not None or isinstance(reply.result(), (Payload, RankFailure)):
            read(reply)
        else:
            threading.Thread(target=read, args=(reply,), name="etude-fetch", daemon=True).start()

    def _spawn(self) -> Rendezvous:
        """Start every actor on its place, and wait until all of them say where they came to stand."""
        assert self._placed is not None
        deadline = time.monotonic() + self._config.timeout
        self._placed.wait(self._config.timeout, self._closing)
        env = {} if self._cluster.is_own else build_remote_rank_env()
        extra = {"runtime_env": {"env_vars": env}} if env else {}
        for handle in self._handles:
            handle.start(self._placed.options(self._role, handle.rank) | extra, self._object_store)
        requests = [handle.request_location() for handle in self._handles]
        locations: list[RankLocation] = self._get_answers(requests, deadline)
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in _ray.nodes()}
        one_machine = len({location.machine for location in locations}) == 1 and bool(locations[0].machine)
        for handle, location in zip(self._handles, locations, strict=True):
            handle.location, handle.address = location, addresses[location.node]
            handle.bind_address = LOOPBACK if one_machine else handle.address
        for node in dict.fromkeys(self.nodes):
            ranks = [str(handle.rank) for handle in self._handles if handle.location.node == node]
            get_logger("dispatch").info("Ranks of %s on node %s: %s.", self._role, addresses[node], ", ".join(ranks))
        host = self._handles[0].bind_address
        (rendezvous,) = self._get_answers([self._handles[0].request_rendezvous(host)], deadline)
        for handle in self._handles:
            handle.begin_work(min(1.0, self._config.heartbeat_timeout / 5))
        return Rendezvous(host, *rendezvous)

    def _get_answers(self, refs: list[Any], deadline: float) -> list[Any]:
        """What actors answer that are being started; each that cannot is named."""
        log, start, last_report = get_logger("dispatch"), time.monotonic(), time.monotonic()
        answers: dict[Any, Any] = {}
        while len(answers) < len(refs):
            for ref in ray.wait(refs, num_returns=len(refs), timeout=TICK)[0]:
                if ref not in answers:
                    answers[ref] = self._answered(ref, refs.index(ref))
            now = time.monotonic()
            if len(answers) < len(refs) and (now > deadline or self._closing.is_set()):
                raise CrewError(
                    f"Ray did not start {len(refs) - len(answers)} of {len(refs)} ranks of {self._role} within "
                    f"`crew.timeout` = {self._config.timeout:g} s. Its own logs say more: {self._cluster.logs}"
                )
            if now - last_report > REPORT_INTERVAL:
                last_report = now
                log.info("After %s: Ray is starting %s.", format_seconds(now - start), self._role)
        return [answers[ref] for ref in refs]

    def _answered(self, ref: Any, rank: int) -> Any:
        """What one of them answered that is being started."""
        try:
            return _ray.get(ref)
        except RayError as error:
            raise CrewError(f"Ray could not start rank {rank} of {self._role}: {_describe_ray_error(error)}") from error


class RayRankHandle(RankHandle):
    """A rank that is a Ray actor."""

    def __init__(self, rank: int, role: str, log: Path, on_log: Callable[[RankHandle, RankLogRecord], None]) -> None:
        super().__init__(rank, log, on_log)
        self._role = role
        self._actor: Any = None
        self.location = RankLocation(0, "", "")
        """Where it came to stand."""
        self.address = ""
        """Of its node."""
        self.bind_address = ""
        """By which of its node's addresses it speaks to the other ranks."""
        self._killed = threading.Event()
        self._work_ref: Any = None
        self._exit_reason = "it was ended"

    def __str__(self) -> str:
        where = f" (process {self.location.pid} on node {self.address})" if self.location.pid else ""
        return f"Rank {self.rank} of {self._role}{where}"

    @property
    def pid(self) -> int:
        """Of its process, on its node."""
        return self.location.pid

    def start(self, options: dict[str, Any], object_store: RayObjectStore) -> None:
        """Have Ray start it."""
        actor_class = _ray.remote(concurrency_groups=_GROUPS)(_RayRankActor)
        self._actor = actor_class.options(max_restarts=0, **options).remote(self.log, sys.path, object_store)

    def request_location(self) -> Any:
        """Where it stands, once that is known."""
        return self._actor.location.remote()

    def request_rendezvous(self, host: str) -> Any:
        """Where it will wait for the others."""
        return self._actor.bind_rendezvous.remote(host)

    def begin_work(self, interval: float) -> None:
        """Have it begin, and hear what it says from now on."""
        self._work_ref = self._actor.serve.options(concurrency_group="serve").remote(self.bind_address)
        threading.Thread(target=self._receive, args=(interval,), name=f"etude-rank-{self.rank}", daemon=True).start()

    def send(self, message: object) -> None:
        """Send a message, without waiting. An actor that has died gets nothing: that is noticed elsewhere."""
        with suppress(RayError):
            self._actor.deliver.options(concurrency_group="deliver").remote(message)

    def dump_stacks(self) -> None:
        """Have it write to its log where each of its threads stands, whatever they are at."""
        self._run_on_node(_signal, self.pid, signal.SIGUSR1)

    def kill(self) -> None:
        """End it now, also one that is stopped and cannot notice."""
        if self._actor is None or self._killed.is_set():
            return
        with suppress(RayError):
            ray.kill(self._actor)
        if self.pid and not self.closed.is_set():
            self._run_on_node(_signal, self.pid, signal.SIGKILL)
        self._killed.set()

    def wait(self) -> None:
        """Until it is gone."""
        if self._work_ref is not None:
            self.closed.wait(EXIT_TIMEOUT)

    @property
    def has_exited(self) -> bool:
        """Whether the actor has died, or nothing comes from it any more."""
        return self.closed.is_set()

    def exit_reason(self) -> str:
        """How it ended, as Ray tells it."""
        return self._exit_reason

    def state(self) -> str:
        """What the system says of it, where it stands on this machine."""
        return super().state() if self._is_here else ""

    def log_tail(self) -> str:
        """The last lines of its log, as a sentence; a log on another node is read there."""
        if self._is_here or self.log.exists():
            return super().log_tail()
        tail: str | None = self._run_on_node(read_log_tail, self.log)
        return tail or f"Its log, {self.log}, is on node {self.address}, which does not answer."

    @property
    def _is_here(self) -> bool:
        return bool(self.location.machine) and self.location.machine == machine_id()

    def _run_on_node(self, function: Callable[..., Any], *args: Any) -> Any:
        """Do this on its node: here, if that is this machine; None where nobody does it in time."""
        if self._is_here:
            return function(*args)
        strategy = NodeAffinitySchedulingStrategy(self.location.node, soft=False)
        with suppress(RayError, GetTimeoutError):
            task: Any = ray.remote(function)
            return ray.get(task.options(num_cpus=0, scheduling_strategy=strategy).remote(*args), timeout=EXIT_TIMEOUT)
        return None

    def _receive(self, interval: float) -> None:
        """Come for what it says, until it says nothing more; on a thread of its own."""
        take_messages = self._actor.take_messages.options(concurrency_group="take_messages")
        try:
            pending = take_messages.remote(interval)
            while True:
                if not ray.wait([pending], timeout=POLL_SECONDS)[0]:
                    if self._killed.is_set():
                        break
                    continue
                messages: Sequence[object] = ray.get(pending)
                pending = take_messages.remote(interval)
                self.on_message()
                for message in messages:
                    self.on_message(message)
        except Exception as error:  # whatever Ray raises, nothing more comes from there
            self._exit_reason = _describe_ray_error(error)
        self.closed.set()


class _RayRankActor(RankActor):
    """What stands in the actor, told by Ray where that is."""

    def __init__(self, log: Path, path: Sequence[str], object_store: RayObjectStore) -> None:
        context = ray.get_runtime_context()
        super().__init__(log, path, object_store, context.get_node_id())


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _describe_ray_error(error: Exception) -> str:
    """What Ray says of an end, without what it says each time."""
    text = str(error)
    _, marker, detail = text.partition("Worker exit detail: ")
    detail = detail.partition("Some common causes")[0].partition("There are some potential root causes")[0]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    reason = detail if marker else lines[-1] if lines else type(error).__name__
    reason = " ".join(reason.split())[:400].rstrip(".")
    return f"its process is gone, as Ray tells: {reason}" if marker else reason


def _log_prefix(role: str) -> str:
    """What the log files of a role begin with, where it is not the only one."""
    return "" if role == "policy" else f"{role}-"
