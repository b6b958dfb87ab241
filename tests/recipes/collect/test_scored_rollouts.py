"""What the controller knows of a step without its tokens is what the tokens say; and those do not stay with it."""

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
from etude.data.collate import collate
from etude.data.partition import partition_rollouts
from etude.data.samples import build_samples
from etude.dispatch import CrewConfig, LocalCrew, crew_of
from etude.dispatch.remote_batch import RemoteBatch, compose_remote_batch, load_batch
from etude.errors import BatchError, CrewError, RewardError
from etude.observe import Metrics
from etude.protocols import Crew, Ids
from etude.recipes.collect.rollouts import ScoredRollout, StepGroups
from etude.recipes.collect.step_batch import build_step_batch
from etude.recipes.run.build import build
from etude.recipes.run.loop import run_loop
from etude.records import Completion, Rollout, Sample, SamplingParams, Turn
from etude.store import RolloutState, Status, open_store
from tests.batches import same
from tests.dispatch.workers import Reader
from tests.processes import heap_rise_of
from tests.recipes.collect.test_sources import Scripted, sourced
from tests.recipes.runs import run_of

TOKENS = 50_000
"""Of an answer that is large."""
BYTES = 17
"""Of each, as it is trained on: the token, its log-prob, its version, its turn, and whether the model said it."""


@st.composite
def played(draw: st.DrawFn) -> list[tuple[list[Sample], Rollout]]:
    """Rollouts of several turns, some of which say nothing, are paid, or begin anew; some have no turn at all."""
    anchored, greedy = draw(st.booleans()), draw(st.booleans())
    result = []
    for id in range(draw(st.integers(1, 7))):
        turns: list[Turn] = []
        whole: list[int] = []
        for index in range(draw(st.integers(0, 4))):
            new_ids = draw(st.lists(st.integers(0, 9), min_size=1, max_size=4))
            answer_ids = draw(st.lists(st.integers(0, 9), max_size=4))
            prompt = new_ids if draw(st.booleans()) else whole + new_ids
            whole = prompt + answer_ids
            ids = np.array(answer_ids, np.int32)
            completion = Completion(ids, -0.5 * np.ones(len(ids)), np.zeros(len(ids), np.int32), "stop")
            reward = draw(st.sampled_from([None, 0.1, 0.2, 0.7]))
            turns.append(
                Turn(np.array(prompt, np.int32), completion, index, reward=reward, anchor=index if anchored else None)
            )
        rollout = Rollout(10 + id, 0, id // 3, draw(st.sampled_from([0.0, 0.3, 1.0])), parts={"a": 0.5})
        rollout = Rollout(10 + id, 0, id // 3, rollout.reward, parts={"a": 0.5}, greedy_reward=0.25 if greedy else None)
        result.append((build_samples(turns, rollout.id), rollout))
    return result


def scored(records: list[tuple[list[Sample], Rollout]]) -> list[ScoredRollout]:
    """Return the scored rollouts, whose samples are in this process."""
    return [ScoredRollout.from_samples(samples, rollout) for samples, rollout in records]


@given(played())
def test_what_is_known_without_the_tokens_is_what_they_say(told: list[tuple[list[Sample], Rollout]]) -> None:
    rows, rollouts = scored(told), [rollout for _, rollout in told]
    batch = build_step_batch(LocalCrew(Reader()), rows, 5)
    assert same(batch.replace(trainer_version=None), collate([s for each, _ in told for s in each], rollouts))
    assert batch.require("trainer_version").tolist() == [5] * len(rollouts)
    outline = BatchMeta.from_batch(batch)
    assert outline.rollout_lengths.tolist() == [each.tokens for each in rows]
    assert outline.prompt_lengths.tolist() == [each.first_action for each in rows]
    assert batch.require("metric").tolist() == [each.trained_reward for each in rows]
    assert int(batch.action.sum()) == sum(each.answer_tokens for each in rows)
    assert int(batch.require("observation").sum()) == sum(each.observation_tokens for each in rows)


class Lending(LocalCrew):
    """A crew of one that makes nothing before somebody looks at it."""

    def build_batch(self, outline: BatchMeta, *how: Any) -> Batch:
        """What stands for the batch."""
        lent: Any = compose_remote_batch(outline, *how)
        return lent  # type: ignore[no-any-return]


@given(played(), st.integers(1, 4), st.randoms())
def test_a_share_is_made_as_if_it_was_cut_from_the_whole(
    told: list[tuple[list[Sample], Rollout]], ranks: int, chance: Any
) -> None:
    whole = build_step_batch(LocalCrew(Reader()), scored(told), 5)
    lent: Any = build_step_batch(Lending(Reader()), scored(told), 5)
    assert isinstance(lent, RemoteBatch) and (lent.num_rollouts, lent.num_tokens) == (
        whole.num_rollouts,
        whole.num_tokens,
    )
    order = chance.sample(range(whole.num_rollouts), whole.num_rollouts)
    cuts = [*partition_rollouts(whole, ranks), order, order[:1]]
    assert partition_rollouts(lent.outline, ranks) == cuts[:ranks]
    for places in cuts:
        assert same(load_batch(lent.select(places).to_ref(), list), whole.select(places))
    for one, other in zip(lent.split(2, by="group"), whole.split(2, by="group"), strict=True):
        assert same(load_batch(one.to_ref(), list), other)


def test_what_does_not_go_together_is_refused_before_any_rank_is_asked() -> None:
    def of(id: int, parts: Mapping[str, float] | None = None, **more: Any) -> ScoredRollout:
        rollout = Rollout(id, 0, 0, 1.0, parts=parts or {})
        return ScoredRollout.from_samples([Sample([1], [True], [-0.5], [0], [0], id, **more)], rollout)

    crew = Lending(Reader())
    with pytest.raises(BatchError, match=r"trains one model; these rows are of judge and policy"):
        build_step_batch(crew, [of(0), of(1, model="judge")], 0)
    with pytest.raises(BatchError, match=r"Of 2 rows 1 have `anchor`, and row 0 has none"):
        build_step_batch(crew, [of(0), of(1, anchor=[3])], 0)
    with pytest.raises(RewardError, match=r"Rollout 1 has reward parts \['b'\]"):
        build_step_batch(crew, [of(0, {"a": 1.0, "b": 0.0}), of(1, {"b": 1.0})], 0)


class Laid(list[Sample]):
    """Rows that were laid down, as somebody holds them."""


def test_a_rollout_is_written_down_before_its_tokens_are_laid(tmp_path: Path) -> None:
    with closing(open_store(tmp_path / "journal.sqlite")) as store:
        result: list[RolloutState] = []

        def keep(rows: Sequence[Sample]) -> Laid:
            result.append(store.rollout(rows[0].rollout))
            return Laid(rows)

        with sourced(Scripted(), store, keep=keep) as source:
            assert {type(each.samples_ref) for each in source.next(1).scored} == {Laid}
        assert len(result) == 6 and {state.status for state in result} == {Status.SUCCEEDED}


def test_what_could_not_be_laid_down_is_not_drawn_again(tmp_path: Path) -> None:
    def full(rows: Sequence[Sample]) -> None:
        if rows[0].rollout == 3:
            raise CrewError("The object store is full.")

    with closing(open_store(tmp_path / "journal.sqlite")) as store:
        with sourced(Scripted(), store, keep=full) as source, pytest.raises(CrewError, match="is full"):
            source.next(1)
        written = {state.id for state in store.rollouts() if state.status is Status.SUCCEEDED}
        engine = Scripted()
        with sourced(engine, store, keep=Laid) as source:
            groups = source.next(1)
    assert 3 in written and len(engine.asked) == 6 - len(written) and len(groups.rollouts) == 6
    assert {type(each.samples_ref) for each in groups.scored} == {Laid}


def test_a_step_is_let_go_of_before_the_next_is_collected(world: Path, tmp_path: Path) -> None:
    laid: dict[int, list[ref[Laid]]] = {}
    left: dict[int, int] = {}
    with build(run_of(world, directory=tmp_path / "run", steps=2)) as parts:
        collect = parts.source.next

        def collected(step: int) -> StepGroups:
            gc.collect()
            left[step] = sum(each() is not None for refs in laid.values() for each in refs)
            laid[step] = []

            def keep(rows: Sequence[Sample]) -> Laid:
                kept = Laid(rows)
                laid[step].append(ref(kept))
                return kept

            parts.source._put_samples = keep
            return collect(step)

        parts.source.next = collected  # type: ignore[method-assign]
        run_loop(parts)
    assert left == {1: 0, 2: 0} and all(len(refs) == 12 for refs in laid.values())


# -- over Ray ---------------------------------------------------------------------------------------------------------


def reader() -> Reader:
    """The worker of a rank."""
    return Reader()


@pytest.fixture(scope="module")
def crew(a_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Two ranks on Ray."""
    config = CrewConfig(heartbeat_timeout=120, timeout=240)
    logs = tmp_path_factory.mktemp("readers")
    with closing(crew_of("ray")(reader, ranks=2, share=partition_rollouts, logs=logs, config=config)) as made:
        yield made


class Steady(Scripted):
    """An engine that draws an answer when those before it were looked at, but for a few."""

    laid = 0

    async def generate(
        self, prompt: Ids, sampling: SamplingParams, *, on_start: Callable[[], None] | None = None
    ) -> Completion:
        """A large answer."""
        while len(self.asked) > self.laid + 3:
            await asyncio.sleep(0.001)
        return await super().generate(prompt, sampling, on_start=on_start)


def collect(crew: Crew, journal: Path, tasks: int = 8) -> tuple[StepGroups, Metrics, Metrics]:
    """Groups of eight large answers as a step collects them, a few at a time, and lays them where this crew looks at
    them; and what its ranks see there, before and after they have added to them."""
    engine = Steady(tokens=TOKENS)

    def keep(rows: Sequence[Sample]) -> Any:
        engine.laid += 1
        return crew.put(rows)

    asked: dict[str, Any] = {"tasks": tasks, "group_size": 8, "max_concurrency": 2, "keep": keep}
    with closing(open_store(journal)) as store, sourced(engine, store, **asked) as source:
        groups = source.next(1)
        batch = build_step_batch(crew, groups.scored, 7)
        return groups, crew.call(Reader.look, batch), crew.call(Reader.look, crew.call_for_ref(Reader.mark, batch))


@pytest.mark.xdist_group("ray")
def test_the_tokens_of_a_step_do_not_stay_in_the_controller(crew: Any, tmp_path: Path) -> None:
    """Each answer is judged and written down by it, and laid into the object store; ranks read them there."""
    here: list[tuple[StepGroups, Metrics, Metrics]] = []
    there: list[tuple[StepGroups, Metrics, Metrics]] = []
    collect(crew, tmp_path / "first.sqlite", tasks=1)  # whatever is loaded at the first time, and what few answers take
    local = LocalCrew(Reader())
    risen = heap_rise_of(lambda: there.append(collect(crew, tmp_path / "there.sqlite")))
    whole = heap_rise_of(lambda: here.append(collect(local, tmp_path / "here.sqlite")))
    ((ours, seen, again),), ((theirs, read, reread),) = here, there
    assert ours.rollouts == theirs.rollouts
    assert seen.reduce() == again.reduce() == read.reduce() == reread.reduce()
    size = BYTES * int(seen.reduce()["tokens"])
    assert whole > size and risen < size / 8, (size, whole, risen)


@pytest.mark.xdist_group("ray")
def test_what_was_held_can_be_had_to_be_looked_at(crew: Any, tmp_path: Path) -> None:
    with closing(open_store(tmp_path / "j.sqlite")) as store, sourced(Scripted(), store, keep=crew.put) as source:
        groups = source.next(1)
    with closing(open_store(tmp_path / "k.sqlite")) as store, sourced(Scripted(), store) as source:
        wanted = build_step_batch(LocalCrew(Reader()), source.next(1).scored, 3)
    lent = build_step_batch(crew, groups.scored, 3)
    assert same(crew.fetch(lent), wanted)
    marked = Reader().mark(wanted)
    assert same(crew.fetch(crew.call_for_ref(Reader.mark, lent)), marked) and same(crew.fetch(marked), marked)
