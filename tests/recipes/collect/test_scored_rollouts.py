"""The controller's data of a step equals that of its tokens, which do not stay in the controller."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from weakref import ref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.batch import Batch, BatchMeta
from etude.data.partition import partition_rollouts
from etude.data.samples import build_samples
from etude.dispatch import CrewConfig, LocalCrew, crew_of
from etude.dispatch.remote_batch import RemoteBatch, compose_remote_batch, load_batch
from etude.errors import BatchError, CollectionError, CrewError, RewardError
from etude.images import ImageRef, ImageSpan, PromptImages, image_digest
from etude.observe import Metrics
from etude.protocols import Crew, Ids
from etude.recipes.collect.rollouts import ScoredRollout, StepGroups
from etude.recipes.run.builders.assemble import build
from etude.recipes.run.loop import run_loop
from etude.recipes.run.steps.components import Learners
from etude.records import Completion, Rollout, Sample, SamplingParams, Turn
from etude.store import RolloutState, Status, StoredImage, open_store
from tests.batches import same
from tests.dispatch.workers import Reader
from tests.processes import heap_rise_of
from tests.recipes.collect.test_sources import Scripted, sourced
from tests.recipes.runs import run_of

TOKENS = 50_000
"""The tokens of a large answer."""
BYTES = 17
"""The bytes of a trained token: its id, log-prob, version and turn, and the flag of an action."""


@st.composite
def played_records(draw: st.DrawFn) -> list[tuple[list[Sample], Rollout]]:
    """Draw rollouts of several turns or none. Some turns have no tokens, a reward, or a new prompt."""
    anchored = draw(st.booleans())
    greedy = draw(st.booleans())
    numbered = draw(st.booleans())
    result = []
    for id in range(draw(st.integers(1, 7))):
        turns: list[Turn] = []
        local_batch: list[int] = []
        for index in range(draw(st.integers(0, 4))):
            new_ids = draw(st.lists(st.integers(0, 9), min_size=1, max_size=4))
            answer_ids = draw(st.lists(st.integers(0, 9), max_size=4))
            prompt = new_ids if draw(st.booleans()) else local_batch + new_ids
            local_batch = prompt + answer_ids
            ids = np.array(answer_ids, np.int32)
            completion = Completion(ids, -0.5 * np.ones(len(ids)), np.zeros(len(ids), np.int32), "stop")
            reward = draw(st.sampled_from([None, 0.1, 0.2, 0.7]))
            turns.append(
                Turn(np.array(prompt, np.int32), completion, index, reward=reward, anchor=index if anchored else None)
            )
        rollout = Rollout(
            10 + id,
            task=0,
            group=id // 3,
            reward=draw(st.sampled_from([0.0, 0.3, 1.0])),
            parts={"a": 0.5},
            greedy_reward=0.25 if greedy else None,
            columns={"level": float(id)} if numbered else {},
        )
        result.append((build_samples(turns, rollout.id), rollout))
    return result


def step_batch(crew: Crew, rollouts: Sequence[ScoredRollout], version: int) -> Batch:
    """Return the batch of these rollouts, as a run with this crew builds it. Its algorithm needs no columns."""
    return Learners(crew, frozenset(), 1, "rollout").annotate(rollouts, version)


def scored(records: list[tuple[list[Sample], Rollout]]) -> list[ScoredRollout]:
    """Return the scored rollouts, whose samples are in this process."""
    return [ScoredRollout.from_samples(samples, rollout) for samples, rollout in records]


@given(played_records())
def test_the_data_of_scored_rollouts_equals_that_of_their_tokens(records: list[tuple[list[Sample], Rollout]]) -> None:
    rows, rollouts = scored(records), [rollout for _, rollout in records]
    batch = step_batch(LocalCrew(Reader()), rows, 5)
    assert same(
        batch.replace(trainer_version=None), Batch.from_records([s for each, _ in records for s in each], rollouts)
    )
    assert batch.require("trainer_version").tolist() == [5] * len(rollouts)
    meta = BatchMeta.from_batch(batch)
    assert meta.rollout_lengths.tolist() == [each.tokens for each in rows]
    assert meta.prompt_lengths.tolist() == [each.first_action for each in rows]
    assert batch.require("metric").tolist() == [each.trained_reward for each in rows]
    assert int(batch.action.sum()) == sum(each.answer_tokens for each in rows)
    assert int(batch.require("observation").sum()) == sum(each.observation_tokens for each in rows)


class LazyCrew(LocalCrew):
    """A crew of one that composes a batch only when it is read."""

    def build_batch(self, meta: BatchMeta, *how: Any) -> Batch:
        """Return a reference to the batch."""
        batch_ref: Any = compose_remote_batch(meta, *how)
        return batch_ref  # type: ignore[no-any-return]


@given(played_records(), st.integers(1, 4), st.randoms())
def test_a_share_equals_the_selection_from_the_whole_batch(
    records: list[tuple[list[Sample], Rollout]], ranks: int, rng: Any
) -> None:
    local_batch = step_batch(LocalCrew(Reader()), scored(records), 5)
    batch_ref: Any = step_batch(LazyCrew(Reader()), scored(records), 5)
    assert isinstance(batch_ref, RemoteBatch) and (batch_ref.num_rollouts, batch_ref.num_tokens) == (
        local_batch.num_rollouts,
        local_batch.num_tokens,
    )
    order = rng.sample(range(local_batch.num_rollouts), local_batch.num_rollouts)
    shares = [*partition_rollouts(local_batch, ranks), order, order[:1]]
    assert partition_rollouts(batch_ref.outline, ranks) == shares[:ranks]
    for places in shares:
        assert same(load_batch(batch_ref.select(places).to_ref(), list), local_batch.select(places))
    for one, other in zip(batch_ref.split(2, by="group"), local_batch.split(2, by="group"), strict=True):
        assert same(load_batch(one.to_ref(), list), other)


def test_the_images_of_a_step_are_read_and_stored_once() -> None:
    """A part that a rank builds has those of its own rollouts."""
    stored = {image_digest(content): content for content in (b"red", b"blue")}
    journal = {d: StoredImage(ImageRef(d, 1, 1), "image/png", content) for d, content in stored.items()}
    asked: list[str] = []

    def read(digests: Sequence[str]) -> dict[str, StoredImage]:
        asked.extend(digests)
        return {digest: journal[digest] for digest in digests if digest in journal}

    def showing(id: int, *digests: str) -> ScoredRollout:
        spans = tuple(ImageSpan(digest, place, place + 1) for place, digest in enumerate(digests))
        row = Sample([7] * 3, [False, False, True], [0.0] * 3, [0] * 3, [0] * 3, id, images=spans)
        return ScoredRollout.from_samples([row], Rollout(id, 0, 0, 1.0))

    red, blue = stored
    rows = [showing(0, red), showing(1, blue, blue), showing(2), showing(3, red)]
    crew = LazyCrew(Reader())
    batch: Any = Learners(crew, frozenset(), 1, "rollout", read_images=read).annotate(rows, 0)
    assert sorted(asked) == sorted(stored)
    shown = [
        [image.read() for image in load_batch(batch.select(places).to_ref(), list).images]
        for places in ([0, 1, 2, 3], [3, 2], [2])
    ]
    assert shown == [[b"red", b"blue"], [b"red"], []]
    with pytest.raises(CollectionError, match=f"Rollout 0 shows the image {'0' * 64}, which the journal does not"):
        Learners(crew, frozenset(), 1, "rollout", read_images=read).annotate([showing(0, "0" * 64)], 0)


def test_inconsistent_rollouts_are_refused_before_any_rank_is_called() -> None:
    def of(
        id: int, parts: Mapping[str, float] | None = None, columns: Mapping[str, float] | None = None, **more: Any
    ) -> ScoredRollout:
        rollout = Rollout(id, 0, 0, 1.0, parts=parts or {}, columns=columns or {})
        return ScoredRollout.from_samples([Sample([1], [True], [-0.5], [0], [0], id, **more)], rollout)

    crew = LazyCrew(Reader())
    with pytest.raises(BatchError, match=r"trains one model; these rows are of judge and policy"):
        step_batch(crew, [of(0), of(1, model="judge")], 0)
    with pytest.raises(BatchError, match=r"Of 2 rows 1 have `anchor`, and row 0 has none"):
        step_batch(crew, [of(0), of(1, anchor=[3])], 0)
    with pytest.raises(RewardError, match=r"Rollout 1 has reward parts \['b'\]"):
        step_batch(crew, [of(0, {"a": 1.0, "b": 0.0}), of(1, {"b": 1.0})], 0)
    with pytest.raises(BatchError, match=r"Rollout 1 brings the columns \[\]; others bring \['level'\]"):
        step_batch(crew, [of(0, columns={"level": 1.0}), of(1)], 0)


class Stored(list[Sample]):
    """Samples in an object store."""


def test_a_rollout_is_journaled_before_its_tokens_are_stored(tmp_path: Path) -> None:
    with closing(open_store(tmp_path / "journal.sqlite")) as store:
        result: list[RolloutState] = []

        def keep(rows: Sequence[Sample]) -> Stored:
            result.append(store.rollout(rows[0].rollout))
            return Stored(rows)

        with sourced(Scripted(), store, keep=keep) as source:
            assert {type(each.samples_ref) for each in source.next(1).scored} == {Stored}
        assert len(result) == 6 and {state.status for state in result} == {Status.SUCCEEDED}


def test_a_rollout_that_could_not_be_stored_is_not_sampled_again(tmp_path: Path) -> None:
    def full(rows: Sequence[Sample]) -> None:
        if rows[0].rollout == 3:
            raise CrewError("The object store is full.")

    with closing(open_store(tmp_path / "journal.sqlite")) as store:
        with sourced(Scripted(), store, keep=full) as source, pytest.raises(CrewError, match="is full"):
            source.next(1)
        written = {state.id for state in store.rollouts() if state.status is Status.SUCCEEDED}
        engine = Scripted()
        with sourced(engine, store, keep=Stored) as source:
            groups = source.next(1)
    assert 3 in written and len(engine.asked) == 6 - len(written) and len(groups.rollouts) == 6
    assert {type(each.samples_ref) for each in groups.scored} == {Stored}


def test_a_step_is_freed_before_the_next_is_collected(world: Path, tmp_path: Path) -> None:
    stored: dict[int, list[ref[Stored]]] = {}
    alive: dict[int, int] = {}
    with build(run_of(world, directory=tmp_path / "run", steps=2)) as parts:
        collect = parts.source.next

        def collected(step: int) -> StepGroups:
            gc.collect()
            alive[step] = sum(each() is not None for refs in stored.values() for each in refs)
            stored[step] = []

            def keep(rows: Sequence[Sample]) -> Stored:
                stored_samples = Stored(rows)
                stored[step].append(ref(stored_samples))
                return stored_samples

            parts.source._put_samples = keep
            return collect(step)

        parts.source.next = collected  # type: ignore[method-assign]
        run_loop(parts)
    assert alive == {1: 0, 2: 0} and all(len(refs) == 12 for refs in stored.values())


# -- over Ray ---------------------------------------------------------------------------------------------------------


def reader() -> Reader:
    """Return the worker of a rank."""
    return Reader()


@pytest.fixture(scope="module")
def crew(a_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Two ranks on Ray."""
    config = CrewConfig(heartbeat_timeout=120, timeout=240)
    logs = tmp_path_factory.mktemp("readers")
    with closing(crew_of("ray")(reader, ranks=2, share=partition_rollouts, logs=logs, config=config)) as made:
        yield made


class Throttled(Scripted):
    """An engine that samples only a few answers more than were stored."""

    stored = 0

    async def generate(
        self,
        prompt: Ids,
        sampling: SamplingParams,
        *,
        images: PromptImages | None = None,
        on_start: Callable[[], None] | None = None,
    ) -> Completion:
        """Sample a large answer."""
        while len(self.asked) > self.stored + 3:
            await asyncio.sleep(0.001)
        return await super().generate(prompt, sampling, images=images, on_start=on_start)


def collect(crew: Crew, journal: Path, tasks: int = 8) -> tuple[StepGroups, Metrics, Metrics]:
    """Collect groups of eight large answers, a few at a time, and store them where this crew reads them.

    Also return the metrics that the ranks read there, before and after they have added columns.
    """
    engine = Throttled(tokens=TOKENS)

    def keep(rows: Sequence[Sample]) -> Any:
        engine.stored += 1
        return crew.put(rows)

    options: dict[str, Any] = {"tasks": tasks, "group_size": 8, "max_concurrency": 2, "keep": keep}
    with closing(open_store(journal)) as store, sourced(engine, store, **options) as source:
        groups = source.next(1)
        batch = step_batch(crew, groups.scored, 7)
        return groups, crew.call(Reader.look, batch), crew.call(Reader.look, crew.call_for_ref(Reader.mark, batch))


@pytest.mark.xdist_group("ray")
def test_the_tokens_of_a_step_do_not_stay_in_the_controller(crew: Any, tmp_path: Path) -> None:
    """The controller judges and journals each answer, and puts it into the object store, where ranks read it. So its
    memory rises by the few answers that are in work at a time, however many there are."""
    results: dict[str, tuple[StepGroups, Metrics, Metrics]] = {}

    def rise(crew: Crew, name: str, tasks: int) -> int:
        return heap_rise_of(lambda: results.update({name: collect(crew, tmp_path / f"{name}.sqlite", tasks)}))

    rise(crew, "first", 1)  # loads modules once
    few, remote = rise(crew, "few", 2), rise(crew, "remote", 8)
    local = rise(LocalCrew(Reader()), "local", 8)
    (ours, metrics, metrics_after), (theirs, read, reread) = results["local"], results["remote"]
    assert ours.rollouts == theirs.rollouts
    assert metrics.reduce() == metrics_after.reduce() == read.reduce() == reread.reduce()
    size = BYTES * int(metrics.reduce()["tokens"])
    assert local > size and remote - few < size / 8, (size, local, few, remote)


@pytest.mark.xdist_group("ray")
def test_stored_samples_can_be_fetched(crew: Any, tmp_path: Path) -> None:
    with closing(open_store(tmp_path / "j.sqlite")) as store, sourced(Scripted(), store, keep=crew.put) as source:
        groups = source.next(1)
    with closing(open_store(tmp_path / "k.sqlite")) as store, sourced(Scripted(), store) as source:
        expected = step_batch(LocalCrew(Reader()), source.next(1).scored, 3)
    batch_ref = step_batch(crew, groups.scored, 3)
    assert same(crew.fetch(batch_ref), expected)
    marked = Reader().mark(expected)
    assert same(crew.fetch(crew.call_for_ref(Reader.mark, batch_ref)), marked) and same(crew.fetch(marked), marked)
