"""The contract of every crew, on threads, processes or Ray."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch

from etude.batch import Batch, BatchMeta, BatchSchema
from etude.data.partition import partition_rollouts
from etude.dispatch import CrewConfig, LocalCrew, crew_of
from etude.errors import TrainingError
from etude.images import ImageSpan, image_digest
from etude.protocols import Crew
from etude.records import Rollout, Sample
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


def image_of(rollout: int) -> bytes:
    """Return the image of a rollout, which every third shares. The large ones are stored apart from batches."""
    return bytes([rollout % 3]) * (10, 5_000, 300_000)[rollout % 3]


def shown(rollout: int) -> Sample:
    """Return a row with an image and an answer; the last without an image."""
    none = np.zeros(4, np.int32)
    images = () if rollout == 7 else (ImageSpan(image_digest(image_of(rollout)), 0, 2),)
    return Sample(none, np.arange(4) > 2, np.zeros(4, np.float32), none, none, rollout, images=images)


def built(samples: Sequence[Sequence[Sample]], metadata: Sequence[tuple[Rollout, dict[str, Any]]]) -> Batch:
    """Return the batch of rollouts, each with the handles to its own images."""
    rollouts = [rollout for rollout, _ in metadata]
    form = BatchSchema.from_records(["policy"], [False], [Rollout(0, 0, 0, 0.0)], [0])
    images = {digest: handle for _, handles in metadata for digest, handle in handles.items()}
    return Batch.from_records([sample for each in samples for sample in each], rollouts, form, images)


def readable(batch: Batch, ranks: int) -> list[float]:
    """Return, for each rollout, the bytes of all images that its rank has: those of its own rollouts."""
    sizes = [0.0] * batch.num_rollouts
    for share in partition_rollouts(batch, ranks, "rollout"):
        images = {image_of(rollout) for rollout in share if rollout != 7}
        for rollout in share:
            sizes[rollout] = float(sum(map(len, images)))
    return sizes


def test_a_rank_reads_the_images_of_its_rollouts_where_they_were_stored(crew: Crew, ranks: int) -> None:
    """They stay readable in a batch that came back, or that stayed with the ranks, once all else is gone."""
    handles = {image_digest(image_of(i)): crew.put_bytes(image_of(i)) for i in range(3)}
    metadata = [
        (Rollout(i, i, i, 0.0), {span.digest: handles[span.digest] for span in shown(i).images}) for i in range(8)
    ]
    meta = BatchMeta(torch.full((8,), 4), torch.full((8,), 3), torch.arange(8))
    batch = crew.build_batch(meta, [crew.put([shown(i)]) for i in range(8)], built, metadata)
    del handles, metadata
    read = crew.call_for_ref(CountingWorker.read_images, batch)
    del batch
    doubled = crew.call_for_ref(CountingWorker.double, read, by=2)
    del read
    again = crew.call_for_ref(CountingWorker.read_images, doubled)
    first, second = crew.fetch(doubled), crew.fetch(again)
    wanted = readable(first, ranks)
    assert first.require("reward").tolist() == [2 * size for size in wanted]
    assert second.require("reward").tolist() == wanted
    assert second.image is not None and len(second.images) == 3
    shows = [None if place < 0 else second.images[place].read() for place in second.image[::4].tolist()]
    assert shows == [*map(image_of, range(7)), None]


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
