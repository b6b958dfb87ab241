"""The contract of every crew, on threads, processes or Ray."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
import torch

from etude.data.partition import partition_rollouts
from etude.dispatch import CrewConfig, LocalCrew, crew_of
from etude.errors import TrainingError
from etude.protocols import Crew
from tests.batches import random_batch, same, with_extras
from tests.dispatch.workers import CountingWorker, counted

RANKS = {"local": 1, "processes": 2, "ray": 2}
KINDS = ["local", "processes", pytest.param("ray", marks=pytest.mark.xdist_group("ray"))]

PATIENT = CrewConfig(timeout=240, heartbeat_timeout=120)


@pytest.fixture(scope="module", params=KINDS)
def crew(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    if request.param == "local":
        yield LocalCrew(counted())
        return
    if request.param == "ray":
        request.getfixturevalue("a_ray")
    start = crew_of("ray" if request.param == "ray" else "local")
    logs = tmp_path_factory.mktemp("ranks")
    with closing(
        start(counted, ranks=RANKS[request.param], share=partition_rollouts, logs=logs, config=PATIENT)
    ) as made:
        yield made


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> int:
    return RANKS[request.node.callspec.params["crew"]]


def test_workers_keep_their_state_from_call_to_call(crew: Crew) -> None:
    before = crew.call(CountingWorker.add, 0)
    assert crew.call(CountingWorker.add, 2) == before + 2
    assert crew.call(CountingWorker.add, 3, twice=True) == before + 8


def test_answers_of_all_ranks_come_as_a_list(crew: Crew, ranks: int) -> None:
    answers = crew.call(CountingWorker.everyone)
    assert len(set(answers)) == len(answers) == ranks


@pytest.mark.parametrize("sizes", [(3, 1, 4), (2,), (1, 1, 1, 1, 1), (1, 7)], ids=str)
def test_a_batch_comes_back_in_its_order(crew: Crew, sizes: tuple[int, ...]) -> None:
    """There may be fewer groups than ranks: a rank may get none."""
    batch = with_extras(random_batch(0, sizes))
    assert same(crew.call(CountingWorker.double, batch, by=3), batch.replace(reward=3 * batch.require("reward")))
    assert same(crew.call(CountingWorker.centre, batch), CountingWorker().centre(batch))


def test_groups_that_are_not_adjacent_stay_whole(crew: Crew) -> None:
    batch = random_batch(1, (3, 3, 2))
    mixed = batch.select([0, 3, 6, 1, 4, 7, 2, 5])
    assert same(crew.call(CountingWorker.centre, mixed), CountingWorker().centre(mixed))


def test_metrics_are_merged_by_their_own_reduction(crew: Crew, ranks: int) -> None:
    parts = [random_batch(2, (4, 1, 2)), random_batch(3, (2,))]
    metrics = crew.call(CountingWorker.measure, parts, 0.5).reduce()
    wanted = CountingWorker().measure(parts, 0.5).reduce()
    assert metrics.pop("whole") == pytest.approx(ranks * wanted.pop("whole"))
    assert metrics == pytest.approx(wanted)


def test_ranks_exchange_values(crew: Crew, ranks: int) -> None:
    wanted = sum(torch.arange(3) + 10 * rank for rank in range(ranks))
    assert all(torch.equal(received, wanted) for received in crew.call(CountingWorker.exchange, 3))


def test_an_error_on_all_ranks_is_raised_unchanged_and_the_crew_continues(crew: Crew) -> None:
    before = crew.call(CountingWorker.add, 0)
    with pytest.raises(TrainingError) as raised:
        crew.call(CountingWorker.refuse)
    assert str(raised.value) == "The gradient is not finite."
    assert crew.call(CountingWorker.add, 1) == before + 1


def test_an_undeclared_method_is_refused(crew: Crew) -> None:
    with pytest.raises(AssertionError, match="has no dispatch mode"):
        crew.call(CountingWorker.secret)
