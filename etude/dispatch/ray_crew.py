"""A crew whose ranks are Ray actors, on one node or on many.

                       ┌─ calls ─ actor, rank 0   worker ─┐
    controller ── Ray ─┤                                  ├─ gloo or NCCL, from node to node
                       └─ calls ─ actor, rank 1   worker ─┘

Each rank has a bundle of its pool, which Ray reserves before any rank starts. Large parts of a call or a reply are in
Ray's object store, from which they are read without a copy.

Ray reports an actor that has died, but not one that is stopped. So the controller fetches each rank's messages all the
time. A reply, even without a message, is the rank's sign of life.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from etude.batch import Batch, BatchMeta, StoredBytes
from etude.child_process import read_log_tail
from etude.config.env import build_remote_rank_env
from etude.dispatch.machine import machine_id
from etude.dispatch.messages import BatchFactory, BatchRef, Payload, PayloadRef, RankLogRecord, deserialize, serialize
from etude.dispatch.multi_rank_crew import REPORT_INTERVAL, RESTART_HINT, TICK, MultiRankCrew, Rendezvous
from etude.dispatch.rank_handle import EXIT_TIMEOUT, RankFailure, RankHandle
from etude.dispatch.ray_cluster import RayCluster
from etude.dispatch.ray_rank import RankActor, RankLocation, RayBytes, get_payload, store_payload, to_bytes_ref
from etude.dispatch.ray_reservation import PoolReservation
from etude.dispatch.remote_batch import RemoteBatch, compose_remote_batch, gather_remote_batch, load_batch, to_batch_ref
from etude.dispatch.resource_pool import ResourcePool
from etude.dispatch.split_call import split_call
from etude.errors import CrewError
from etude.observe import format_seconds, get_logger
from etude.protocols import get_dispatch_mode

R = TypeVar("R")

LOOPBACK = "127.0.0.1"
"""The rendezvous address of ranks that are all on one machine."""
POLL_SECONDS = 1.0
"""Seconds between two checks if the crew has ended, while a rank is waited for."""
_ray: Any = ray
"""Ray's functions whose types are missing or wrong."""
_GROUPS = {"serve": 1, "deliver": 1, "take_messages": 1}


class RayCrew(MultiRankCrew["RayRankHandle"]):
    """Workers in Ray actors, called as one."""

    sees_every_gpu = False

    def __init__(
        self,
        factory: Callable[..., object],
        *args: object,
        ranks: int,
        logs: Path,
        role: str = "policy",
        placed: PoolReservation | None = None,
        **options: Any,
    ) -> None:
        """Start the ranks, each with `factory(*args)` as its worker, and return once all of them are ready.

        See `ProcessCrew`; `logs` is on each rank's own node. `role` is the role of this crew. `placed` has the bundles
        that it shares with other roles; by default it reserves its own.
        """
        prefix = "" if role == "policy" else f"{role}-"
        handles = [
            RayRankHandle(rank, role, logs / f"{prefix}rank-{rank}.log", self._forward_log) for rank in range(ranks)
        ]
        super().__init__(handles, **options)
        self._role = role
        self._placed = placed
        self._own = placed is None
        self._cluster = RayCluster(ranks * self._threads)
        try:
            if placed is None:
                pool = ResourcePool((role,), ranks, self._threads, float(self._device == "cuda"))
                self._placed = PoolReservation(pool, fixed_size=self._cluster.is_own)
            self._start(factory, *args)
        except BaseException:
            self.close()
            raise

    @property
    def nodes(self) -> list[str]:
        """The nodes of its ranks."""
        return [handle.location.node for handle in self._handles]

    def call_for_ref(self, method: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        """Do the same as `call`, but the batch stays with the ranks: the result is a `RemoteBatch`."""
        split = split_call(get_dispatch_mode(method), args, kwargs, self.ranks, self._share, self._repeats)
        assert split.batch_split is not None, "a batch that stays with the ranks was split from one"
        remote: Any = gather_remote_batch(
            *split.batch_split, self._call_ranks(method, split, keep=True)[:: self._repeats]
        )
        return remote  # type: ignore[no-any-return]

    def put(self, value: object) -> PayloadRef:
        return self._store(value, always=True)

    def put_bytes(self, content: bytes) -> bytes | StoredBytes:
        with self._storing():
            return RayBytes(content)

    def build_batch(
        self, meta: BatchMeta, refs: Sequence[PayloadRef], factory: BatchFactory, metadata: Sequence[Any]
    ) -> Batch:
        """Return a batch of stored values. Each rank builds it from the values of its share."""
        remote: Any = compose_remote_batch(meta, refs, factory, metadata)
        return remote  # type: ignore[no-any-return]

    def fetch(self, batch: Batch) -> Batch:
        remote: Any = batch
        if not isinstance(remote, RemoteBatch):
            return batch
        return load_batch(remote.to_ref(), lambda payload_refs: [self._deserialize(ref) for ref in payload_refs])

    def close(self) -> None:
        """Kill every rank, even one in the middle of a call; and stop Ray if it was started for this crew."""
        super().close()
        if self._own and self._placed is not None:
            with suppress(RayError):
                self._placed.close()
            self._placed = None
        self._cluster.close()

    def _serialize(self, value: object) -> PayloadRef:
        return self._store(value)

    def _store(self, value: object, *, always: bool = False) -> PayloadRef:
        with self._storing():
            return store_payload(serialize(value, _to_ref), always=always)

    @contextmanager
    def _storing(self) -> Iterator[None]:
        """Describe Ray's errors when a value is stored."""
        try:
            yield
        except RayError as error:
            raise CrewError(
                f"A value for the ranks of {self._role} could not be put into Ray's object store: "
                f"{_describe_ray_error(error)}. See Ray's logs: {self._cluster.logs}"
            ) from error

    def _deserialize(self, payload_ref: PayloadRef) -> Any:
        """Return the value that came from a rank. If the rank is lost, and the value with it, raise the watchdog's
        error."""
        deadline = time.monotonic() + self._config.timeout
        try:
            while not isinstance(payload_ref, Payload) and not ray.wait([payload_ref], timeout=POLL_SECONDS)[0]:
                if self._failure_announced.is_set() or time.monotonic() > deadline:
                    raise GetTimeoutError("it was not handed over in time")
            return deserialize(get_payload(payload_ref))
        except RayError as error:
            self._failure_announced.wait(EXIT_TIMEOUT)
            raise self._error or CrewError(
                f"A reply of a rank of {self._role} can no longer be read: {_describe_ray_error(error)}. {RESTART_HINT}"
            ) from error

    def _handle_reply(self, reply: Future[Any], read: Callable[[Future[Any]], None]) -> None:
        """Read a reply on another thread if it has to be fetched from the object store."""
        if reply.exception() is not None or isinstance(reply.result(), (Payload, RankFailure)):
            read(reply)
        else:
            threading.Thread(target=read, args=(reply,), name="etude-fetch", daemon=True).start()

    def _spawn(self) -> Rendezvous:
        """Start every actor on its bundle, and wait until each has reported its location."""
        assert self._placed is not None
        deadline = time.monotonic() + self._config.timeout
        self._placed.wait(self._config.timeout, self._closing)
        env = {} if self._cluster.is_own else build_remote_rank_env()
        extra = {"runtime_env": {"env_vars": env}} if env else {}
        for handle in self._handles:
            handle.start(self._placed.options(self._role, handle.rank) | extra)
        requests = [handle.request_location() for handle in self._handles]
        locations: list[RankLocation] = self._get_answers(requests, deadline)
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in _ray.nodes()}
        one_machine = len({location.machine for location in locations}) == 1 and bool(locations[0].machine)
        for handle, location in zip(self._handles, locations, strict=True):
            handle.location = location
            handle.address = addresses[location.node]
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
        """Return the replies of actors that are starting; raise if one fails or is late."""
        log = get_logger("dispatch")
        start = time.monotonic()
        last_report = time.monotonic()
        answers: dict[Any, Any] = {}
        while len(answers) < len(refs):
            for ref in ray.wait(refs, num_returns=len(refs), timeout=TICK)[0]:
                if ref not in answers:
                    answers[ref] = self._answered(ref, refs.index(ref))
            now = time.monotonic()
            if len(answers) < len(refs) and (now > deadline or self._closing.is_set()):
                raise CrewError(
                    f"Ray did not start {len(refs) - len(answers)} of {len(refs)} ranks of {self._role} within "
                    f"`crew.timeout` = {self._config.timeout:g} s. See Ray's logs: {self._cluster.logs}"
                )
            if now - last_report > REPORT_INTERVAL:
                last_report = now
                log.info("After %s: Ray is starting %s.", format_seconds(now - start), self._role)
        return [answers[ref] for ref in refs]

    def _answered(self, ref: Any, rank: int) -> Any:
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
        """The place where it runs."""
        self.address = ""
        """The address of its node."""
        self.bind_address = ""
        """The address of its node by which it reaches the other ranks."""
        self._killed = threading.Event()
        self._work_ref: Any = None
        self._exit_reason = "it was ended"

    def __str__(self) -> str:
        where = f" (process {self.location.pid} on node {self.address})" if self.location.pid else ""
        return f"Rank {self.rank} of {self._role}{where}"

    @property
    def pid(self) -> int:
        return self.location.pid

    def start(self, options: dict[str, Any]) -> None:
        """Have Ray start the actor."""
        actor_class = _ray.remote(concurrency_groups=_GROUPS)(RankActor)
        self._actor = actor_class.options(max_restarts=0, **options).remote(self.log, sys.path)

    def request_location(self) -> Any:
        """Ask for its location; return Ray's reference to the reply."""
        return self._actor.location.remote()

    def request_rendezvous(self, host: str) -> Any:
        """Ask for the address at which it will wait for the other ranks; return Ray's reference to the reply."""
        return self._actor.bind_rendezvous.remote(host)

    def begin_work(self, interval: float) -> None:
        """Start its main loop, and receive its messages from now on."""
        self._work_ref = self._actor.serve.options(concurrency_group="serve").remote(self.bind_address)
        threading.Thread(target=self._receive, args=(interval,), name=f"etude-rank-{self.rank}", daemon=True).start()

    def send(self, message: object) -> None:
        with suppress(RayError):
            self._actor.deliver.options(concurrency_group="deliver").remote(message)

    def dump_stacks(self) -> None:
        self._run_on_node(_signal, self.pid, signal.SIGUSR1)

    def kill(self) -> None:
        """Kill it now, even if it is stopped and cannot react."""
        if self._actor is None or self._killed.is_set():
            return
        with suppress(RayError):
            ray.kill(self._actor)
        if self.pid and not self.closed.is_set():
            self._run_on_node(_signal, self.pid, signal.SIGKILL)
        self._killed.set()

    def wait(self) -> None:
        if self._work_ref is not None:
            self.closed.wait(EXIT_TIMEOUT)

    @property
    def has_exited(self) -> bool:
        return self.closed.is_set()

    def exit_reason(self) -> str:
        return self._exit_reason

    def state(self) -> str:
        """Return the system's state of its process, if it is on this machine."""
        return super().state() if self._is_here else ""

    def log_tail(self) -> str:
        """Return the last lines of its log, as a sentence. A log on another node is read there."""
        if self._is_here or self.log.exists():
            return super().log_tail()
        tail: str | None = self._run_on_node(read_log_tail, self.log)
        return tail or f"Its log, {self.log}, is on node {self.address}, which does not answer."

    @property
    def _is_here(self) -> bool:
        return bool(self.location.machine) and self.location.machine == machine_id()

    def _run_on_node(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run this function on its node, or here if that is this machine; return None if it gets no reply in time."""
        if self._is_here:
            return function(*args)
        strategy = NodeAffinitySchedulingStrategy(self.location.node, soft=False)
        with suppress(RayError, GetTimeoutError):
            task: Any = ray.remote(function)
            return ray.get(task.options(num_cpus=0, scheduling_strategy=strategy).remote(*args), timeout=EXIT_TIMEOUT)
        return None

    def _receive(self, interval: float) -> None:
        """Fetch its messages until it ends, on a separate thread."""
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
        except Exception as error:  # any error of Ray's: no more messages will come
            self._exit_reason = _describe_ray_error(error)
        self.closed.set()


def _to_ref(value: object) -> BatchRef | RayBytes | None:
    """Return what Ray must see of a value in a message: a batch that stays with the ranks, or stored bytes."""
    return to_batch_ref(value) or to_bytes_ref(value)


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _describe_ray_error(error: Exception) -> str:
    """Return the specific part of Ray's message about an end."""
    text = str(error)
    _, marker, detail = text.partition("Worker exit detail: ")
    detail = detail.partition("Some common causes")[0].partition("There are some potential root causes")[0]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    reason = detail if marker else lines[-1] if lines else type(error).__name__
    reason = " ".join(reason.split())[:400].rstrip(".")
    return f"its process is gone, as Ray reports: {reason}" if marker else reason
