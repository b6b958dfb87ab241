"""The use of the servers' slots: what a step reports of it, and what the log says."""

from __future__ import annotations

import logging

import pytest

from etude.observe import Metrics
from etude.rollout import SglangConfig, VllmConfig
from etude.rollout.failover_router import FailoverRouter
from etude.rollout.server_engine import ModelShape, ServerEngine
from etude.rollout.server_load import ServerLoad, SlotUsage


class Clock:
    """A clock that is set by hand."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_share_of_slots_in_use_counts_only_while_requests_run() -> None:
    clock = Clock()
    usage = SlotUsage(clock)
    for now, running, slots in ((10.0, 2, 8), (12.0, 6, 8), (16.0, 6, 4), (18.0, 0, 4)):
        clock.now = now
        usage.count(running, slots)
    clock.now = 100.0
    share = Metrics(usage.pop_metrics(9)).reduce()["engine/slot_usage"]
    assert share == pytest.approx((2 * 2 + 4 * 6 + 2 * 6) / (2 * 8 + 4 * 8 + 2 * 6)), "no more slots than requests"
    assert "engine/slot_usage" not in usage.pop_metrics(9), "nothing ran since"


def test_free_slots_and_a_full_queue_are_logged_once_a_report(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "etude")
    clock = Clock()
    usage = SlotUsage(clock)
    reports = []
    for running in (2, 2, 7, 2):
        usage.count(running, 8)
        clock.now += 5.0
        usage.refused = 3 * (running == 7)
        caplog.clear()
        usage.pop_metrics(9)
        reports.append([record.getMessage() for record in caplog.records])
    assert reports[0][0].startswith("2 of the servers' 8 slots were in use on average") and len(reports[0]) == 1
    assert reports[1] == [], "it was said the step before"
    assert reports[2] == ["3 requests were refused, because `rollout.max_waiting` = 9 others waited for a server."]
    assert reports[3] == reports[0]


def test_each_change_of_a_limit_is_logged_with_its_figures(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "etude")
    shape = ModelShape(vocab_size=64, context_length=64, kv_values_per_token=1)
    server = ServerEngine("http://127.0.0.1:1", VllmConfig().create_backend(), shape)
    router = FailoverRouter([server], max_num_seqs=None, max_waiting=4)
    for load in (ServerLoad(128, 0, 0.3, 0), ServerLoad(136, 0, 0.9, 0), ServerLoad(120, 16, 0.99, 5)):
        router.report_load(0, load)
    where = "The server at http://127.0.0.1:1 gets at most"
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("DEBUG", f"{where} 136 requests at once now, 128 before: 128 run, 0 wait, 30% of its cache is in use."),
        (
            "INFO",
            f"{where} 90 requests at once now, 136 before: 120 run, 5 were preempted, 16 wait, 99% of its cache is in "
            "use.",
        ),
    ]


def test_without_a_limit_no_more_requests_are_sent_than_may_wait() -> None:
    assert VllmConfig(max_num_seqs=None).max_concurrency(1) == 1024
    assert SglangConfig(max_num_seqs=None, replicas=8).max_concurrency(1) == 4096, "servers that go leave all waiting"
    assert VllmConfig(max_num_seqs=None, max_waiting=0, replicas=2).max_concurrency(1) == 2
    assert VllmConfig(replicas=2).max_concurrency(1) == 256
