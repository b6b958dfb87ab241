"""A crew of Ray actors: the placement of its ranks, the data that stays with them, and the faults of ranks."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from etude.batch import Batch
from etude.data.partition import partition_rollouts
from etude.dispatch import CrewConfig, crew_of
from etude.dispatch.messages import Payload
from etude.dispatch.resource_pool import ResourcePool
from etude.dispatch.split_call import split_call
from etude.errors import ConfigError, CrewError, TrainingError
from etude.protocols import get_dispatch_mode
from tests.batches import random_batch, same
from tests.dispatch.workers import WIDE, CountingWorker, Maker, counted, refusing
from tests.processes import gone, rise_of

if TYPE_CHECKING:
    from etude.dispatch.ray_crew import RayCrew

pytestmark = [pytest.mark.usefixtures("a_ray"), pytest.mark.xdist_group("ray")]

SILENCE = 5.0
SLOW = 120.0
"""Seconds within which Ray starts an actor on a busy machine."""


def ray_crew(logs: Path, make: Callable[..., object] = counted, *args: Any, ranks: int = 2, **more: Any) -> RayCrew:
    config = CrewConfig(heartbeat_timeout=more.pop("heartbeat_timeout", SLOW), timeout=more.pop("timeout", 2 * SLOW))
    made: RayCrew = crew_of("ray")(make, *args, ranks=ranks, share=partition_rollouts, logs=logs, config=config, **more)  # type: ignore[assignment]
    return made


@pytest.fixture(scope="module")
def crew(a_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCrew]:
    """A crew whose ranks no test ends."""
    with closing(ray_crew(tmp_path_factory.mktemp("ranks"), Maker)) as made:
        yield made


# -- data that stays with the ranks -----------------------------------------------------------------------------------


def heap() -> int:
    """Return the bytes of this process's unshared memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])


def wide(batch: Batch) -> Batch:
    return Maker().widen(batch)


def test_data_between_ranks_does_not_pass_through_the_controller(crew: RayCrew, tmp_path: Path) -> None:
    """The batch has tens of megabytes. It goes from rank to rank, and on to another crew that divides its rows anew."""
    batch = random_batch(0, (40, 30, 30))
    size = batch.num_tokens * WIDE * 8
    assert size > 2e7
    wanted = float(batch.ids.double().sum() * WIDE + batch.num_tokens * WIDE * (WIDE - 1) / 2)
    with closing(ray_crew(tmp_path, Maker, ranks=1, role="reader")) as reader:
        crews = (crew, reader)

        def handed_on(made: Batch) -> list[dict[str, float]]:
            assert (made.num_tokens, made.num_rollouts) == (batch.num_tokens, batch.num_rollouts)
            return [other_crew.call(Maker.weigh, made.split(3)).reduce() for other_crew in crews]

        handed_on(crew.call_for_ref(Maker.widen, batch))  # so that libraries are loaded before the measurement
        seen: list[dict[str, float]] = []
        risen = rise_of(lambda: seen.extend(handed_on(crew.call_for_ref(Maker.widen, batch))))
        through = rise_of(lambda: seen.extend(handed_on(crew.call(Maker.widen, batch))))
    assert [(result["sum"], result["bytes"]) for result in seen] == [(wanted, size)] * 4
    assert risen < size / 8 and through > size, (risen, through, size)


def test_a_result_of_all_ranks_together_is_stored_once(crew: RayCrew, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them returns it."""
    batch = random_batch(3, (3, 2))
    from etude.dispatch import ray_crew as module

    put, sent = module.store_payload, list[Payload]()  # type: ignore[attr-defined]

    def putting(body: Payload, **how: Any) -> Any:
        sent.append(body)
        return put(body, **how)

    monkeypatch.setattr(crew, "_repeats", 2)
    monkeypatch.setattr(module, "store_payload", putting)
    held = crew.call_for_ref(Maker.widen, batch)
    assert same(crew.call(Maker.narrow, held), Maker().narrow(wide(batch)))
    assert len(sent) == 2, "one for each call"
    first, second = crew._call_ranks(Maker.widen, _division(crew, batch, repeats=2), keep=True)
    assert first.outline.num_rollouts == batch.num_rollouts and crew._deserialize(second) is None


def test_a_stored_batch_is_the_same_for_any_split(crew: RayCrew) -> None:
    batch = random_batch(1, (3, 1, 4, 2))
    held = crew.call_for_ref(Maker.widen, batch)
    plain = wide(batch)
    assert same(crew.call(Maker.narrow, held), Maker().narrow(plain))
    for theirs, ours in zip(held.split(2, by="group"), plain.split(2, by="group"), strict=True):
        assert same(crew.call(Maker.narrow, theirs), Maker().narrow(ours))
    order = [4, 0, 7, 2]
    assert same(crew.call(Maker.narrow, held.select(order)), Maker().narrow(plain.select(order)))
    again = crew.call_for_ref(Maker.narrow, held)
    assert same(crew.call(Maker.widen, again), crew.call(Maker.widen, Maker().narrow(plain)))
    assert crew.call(Maker.weigh, [held, plain]).reduce()["parts"] == 4


def test_data_read_in_the_object_store_is_not_copied(crew: RayCrew) -> None:
    """A rank's answer lies in the object store, and the controller reads it there."""
    batch = random_batch(2, (8, 8))
    before = heap()
    refs = crew._call_ranks(Maker.widen, _division(crew, batch))
    pieces = [crew._deserialize(ref) for ref in refs]
    assert sum(piece.num_rollouts for piece in pieces) == 16
    assert heap() - before < 1e6 < pieces[0].require("teacher_topk_ids").nbytes
    assert torch.equal(pieces[0].require("teacher_topk_ids")[:, 0], pieces[0].ids.long())


def _division(crew: RayCrew, batch: Batch, repeats: int = 1) -> Any:
    return split_call(get_dispatch_mode(Maker.widen), [batch], {}, crew.ranks, partition_rollouts, repeats)


# -- placement --------------------------------------------------------------------------------------------------------


def test_the_shortage_of_a_cluster_is_reported(
    crew: RayCrew, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from etude.dispatch import ray_reservation

    monkeypatch.setattr(ray_reservation, "REPORT_INTERVAL", 0.2)
    began = time.perf_counter()
    with caplog.at_level(logging.INFO, "etude"), pytest.raises(CrewError) as raised:
        ray_crew(tmp_path, ranks=2, threads=2, timeout=1.0)
    assert time.perf_counter() - began < 30
    shortage = r"no room for 2 ranks of policy.* CPU: 2 × 2 are requested, the cluster has 4, of which 2 are free"
    assert re.search(shortage, str(raised.value)) and "`crew.timeout`" in str(raised.value)
    assert any(re.search(shortage, record.message) for record in caplog.records)


def test_resources_that_can_never_exist_are_refused_at_once(crew: RayCrew, tmp_path: Path) -> None:
    """This is a Ray of the run's own, which no other node joins."""
    began = time.perf_counter()
    with pytest.raises(CrewError) as raised:
        ray_crew(tmp_path, ranks=3, threads=2)
    assert time.perf_counter() - began < 30
    shortage = (
        r"has no room for 3 ranks of policy, and no other node joins it\. CPU: 3 × 2 are requested, the cluster has 4, "
    )
    assert re.match("The cluster " + shortage, str(raised.value)), str(raised.value)
    assert "its nodes would have room for 2. Lower `ranks` or `threads`" in str(raised.value)


STRANGER = """
import sys
from ray._raylet import GcsClient
print("answered", len(GcsClient(address=sys.argv[1]).internal_kv_keys(b"", None)))
"""


def test_a_private_ray_requires_its_token(crew: RayCrew, tmp_path: Path) -> None:
    """Its processes have the token, and no file has it."""
    import ray

    entries = Path(f"/proc/{crew.pids[0]}/environ").read_text().split("\0")
    token = next(entry for entry in entries if entry.startswith("RAY_AUTH_TOKEN=")).partition("=")[2]
    assert len(token) == 64 and not any(name.startswith("RAY_AUTH") for name in os.environ)
    command = [sys.executable, "-c", STRANGER, ray.get_runtime_context().gcs_address]
    for key, answered in ((None, False), ("0" * 64, False), (token, True)):
        guard = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": key} if key else {}
        env = {**os.environ, "HOME": str(tmp_path), **guard}
        listed = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
        assert ("answered" in listed.stdout) == answered, listed.stderr[-2000:]
        assert answered or "InvalidAuthToken" in listed.stderr, listed.stderr[-2000:]
    assert _session().parents[2].stat().st_mode & 0o777 == 0o700, "nor its sockets to others on this machine"
    for path in _session().rglob("*"):
        assert not (path.is_file() and token.encode() in path.read_bytes()), path
    for cmdline in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            assert token.encode() not in cmdline.read_bytes()


def _session() -> Path:
    """Return the log directory of the Ray that this process has joined."""
    import ray

    return Path(ray._private.worker._global_node.get_logs_dir_path())  # type: ignore[attr-defined]


@pytest.mark.soak
def test_two_roles_share_the_bundles_of_a_pool(crew: RayCrew, tmp_path: Path) -> None:
    from etude.dispatch.ray_reservation import PoolReservation

    with closing(PoolReservation(ResourcePool(("policy", "critic"), 2, 1))) as placed:
        crews = [ray_crew(tmp_path, role=role, placed=placed) for role in ("policy", "critic")]
        with closing(crews[0]), closing(crews[1]):
            assert crews[0].nodes == crews[1].nodes and not set(crews[0].pids) & set(crews[1].pids)
            assert [one.call(CountingWorker.add, 1) for one in crews] == [11, 11]
        assert sorted(path.name for path in tmp_path.glob("*.log")) == [
            *("critic-rank-0.log", "critic-rank-1.log", "rank-0.log", "rank-1.log")
        ]


@pytest.mark.soak
def test_a_worker_that_cannot_be_created_is_refused_with_its_own_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"No worker can be made of this\."):
        ray_crew(tmp_path, refusing, 1)


# -- faults of ranks --------------------------------------------------------------------------------------------------

HOW = [
    pytest.param("kill", r"ended while it was in CountingWorker\.end: its process is gone, as Ray reports: .+", 20),
    pytest.param(
        "exit",
        r"ended while it was in CountingWorker\.end: its process is gone, as Ray reports: .+",
        20,
        marks=pytest.mark.soak,
    ),
    pytest.param("stop", r"gave no sign of life for \d+\.\d s .*: it was stopped by a signal", SILENCE + 20),
]


@pytest.mark.parametrize(("how", "sentence", "within"), HOW)
def test_a_lost_rank_ends_the_call_soon_and_is_named(
    how: str, sentence: str, within: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The error has its role, its rank, its process and its node, and its last output."""
    with caplog.at_level(logging.INFO, "etude"):
        crew = ray_crew(tmp_path)
    pids, pending, node = crew.pids, crew.submit(0, CountingWorker.wonder, 600.0), crew._handles[1].address
    answers = crew._call_ranks(
        CountingWorker.recite, split_call(get_dispatch_mode(CountingWorker.recite), [10**6], {}, 2, partition_rollouts)
    )
    crew._config = CrewConfig(heartbeat_timeout=SILENCE, timeout=2 * SLOW)  # ranks may have taken longer to start
    with closing(crew):
        began = time.perf_counter()
        with pytest.raises(CrewError) as raised:
            crew.call(CountingWorker.end, 1, how)
        assert time.perf_counter() - began < within
        with pytest.raises(CrewError):
            pending.result(10)
        with pytest.raises(CrewError):
            crew.call(CountingWorker.add, 1)
    message = str(raised.value)
    assert message.startswith(f"Rank 1 of policy (process {pids[1]} on node {node}) "), message
    assert re.search(sentence, message), message
    assert "these are its last words" in message and str(tmp_path / "rank-1.log") in message
    assert str(lost(crew, answers[1])) == message, "what it had answered is lost with it"
    assert f"Ranks of policy on node {node}: 0, 1." in [record.message for record in caplog.records]
    assert all(gone(pid) for pid in pids)


@pytest.mark.soak
def test_an_answer_lost_before_it_is_read_is_reported_with_its_rank(tmp_path: Path) -> None:
    """The error is not Ray's, even if Ray notices the loss first."""
    with closing(ray_crew(tmp_path)) as crew:
        answers = crew._call_ranks(
            CountingWorker.recite,
            split_call(get_dispatch_mode(CountingWorker.recite), [10**6], {}, 2, partition_rollouts),
        )
        os.kill(crew.pids[1], signal.SIGKILL)
        message = r"Rank 1 of policy \(process \d+ on node .*\) ended while it was answering"
        assert re.match(message, str(lost(crew, answers[1])))


def lost(crew: RayCrew, sent: Any) -> CrewError:
    """Return the error of an answer whose rank is gone. It can be read until Ray has noticed the loss."""
    until = time.monotonic() + SLOW
    with pytest.raises(CrewError) as raised:
        while time.monotonic() < until:
            crew._deserialize(sent)
    return raised.value


@pytest.mark.soak
def test_an_error_on_one_rank_does_not_leave_the_others_waiting(tmp_path: Path) -> None:
    with closing(ray_crew(tmp_path)) as crew:
        with pytest.raises((CrewError, TrainingError), match=r"Rank 1 of policy .* ZeroDivisionError: a slip"):
            crew.call(CountingWorker.stumble, 1)
        pids = crew.pids
    assert all(gone(pid) for pid in pids)
