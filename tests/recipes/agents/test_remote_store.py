"""A run whose rollouts are kept by another store: three processes, and one journal of the run that holds everything."""

from __future__ import annotations

import asyncio
import shutil
import signal
from collections.abc import Awaitable, Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from etude.cli import main
from etude.errors import ConfigError, IllegalTransitionError
from etude.images import ImageSpan
from etude.recipes.agents import remote_store as joining
from etude.recipes.agents.remote_store import MirroredRolloutQueue
from etude.records import Outcome, Task
from etude.store import (
    Journal,
    Phase,
    RolloutQueued,
    RolloutsAdmitted,
    RolloutState,
    Status,
    TaskDropped,
    TaskIssued,
    open_store,
)
from etude.store.http.forms import encode_as
from etude.store.http.request_limits import check_json_size
from etude.store.http.server import serve
from etude.store.journal.event_records import encode
from etude.store.journal.json_values import to_json
from etude.store.queue.keys import Keyring
from etude.store.queue.local_queue import LocalRolloutQueue
from etude.store.queue.rollout_queue import AttemptId, AttemptReport, QueueOwner, RolloutQuery, RolloutRequest
from tests.contracts.rollout_queues import claim, wanted
from tests.data.test_task_images import png
from tests.joined import LOOKER, made, started
from tests.store.made import turn


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return made(tmp_path_factory.mktemp("world"))


def seen(journal: Journal) -> dict[int, tuple[str, float | None, int]]:
    """Return the journal's record of each rollout: its status, its reward, the number of tokens of its turns."""
    ids = [state.id for state in journal.iter_states(RolloutState, None)]
    result = {}
    for id in ids:
        state, turns = journal.rollout(id), journal.turns(id)
        last = state.last
        tokens = sum(len(turn.prompt) + len(turn.completion.ids) for turn in turns)
        result[id] = state.status.value, None if last is None else last.total, tokens
    return result


# -- the rollout queue of a joined run --------------------------------------------------------------------------------

RUN = QueueOwner("run", "/runs/mine")
Story = Callable[[MirroredRolloutQueue, LocalRolloutQueue], Awaitable[None]]


def joined(story: Story, mine: Journal, theirs: Journal | None = None, max_body_bytes: int = 2**20) -> None:
    """Run a test with a store and the rollout queue of a run that has joined it."""
    ring = Keyring("a-secret-of-sixteen-bytes-or-more")

    async def whole() -> None:
        store_queue = LocalRolloutQueue(theirs or open_store(), ring)
        serving = serve(store_queue, ring, max_body_bytes=max_body_bytes)
        far = MirroredRolloutQueue(serving.url, ring.admin, mine, await store_queue.acquire_lease(RUN))
        try:
            await asyncio.wait_for(story(far, store_queue), 60)
        finally:
            await far.close()
            await asyncio.to_thread(serving.stop)
            await store_queue.close()

    asyncio.run(whole())


def attempt_records(journal: Journal, rollout: int) -> list[tuple[str, str, bytes]]:
    """Return all records of a rollout after it was queued."""
    events = [event for _, event in journal.read(rollout=rollout) if not isinstance(event, RolloutQueued)]
    return [(encode(event).kind, encode(event).body, encode(event).payload) for event in events]


def test_an_ended_rollout_is_copied_completely_at_once() -> None:
    mine, theirs = open_store(), open_store()

    async def story(far: MirroredRolloutQueue, store_queue: LocalRolloutQueue) -> None:
        await far.enqueue(wanted(0, 3))
        first, second = await claim(store_queue, 2)
        await store_queue.record_turn(first.attempt_id, turn(seed=1))
        await store_queue.record_note(first.attempt_id, "span", {"name": "search", "took": 0.5})
        await store_queue.record_reward(first.attempt_id, {"right": 0.5, "short": -0.25}, turn=0)
        await store_queue.finish(first.attempt_id, AttemptReport(Outcome.FAILED, "no"))
        await store_queue.finish(second.attempt_id, AttemptReport(Outcome.SUCCEEDED, reward={"right": 1.0}))
        await far.cancel([0, 2], "the step is full")
        _, ended = await far.wait(0, 10)
        assert [state.id for state in ended] == [1, 0, 2]
        for id in range(3):
            assert attempt_records(mine, id) == attempt_records(theirs, id) and mine.rollout(id).sealed
        assert [mine.rollout(id).status for id in range(3)] == [Status.CANCELLED, Status.SUCCEEDED, Status.CANCELLED]
        with pytest.raises(IllegalTransitionError, match="Rollout 1 is sealed, since its run has read it"):
            await store_queue.record_reward(second.attempt_id, 0.5, turn=0)
        await store_queue.record_note(first.attempt_id, "afterwards", None)
        (copied,) = await far.turns(0, 0)
        assert copied.reward == 0.25
        assert await far.seal([0, 1, 2]) == mine.rollouts()
        assert [state.id for state in (await far.wait(0, 10))[1]] == [1, 0, 2], "returned again, and not written again"

    joined(story, mine, theirs)


def test_the_images_that_turns_show_are_copied_with_them() -> None:
    mine, theirs = open_store(), open_store()

    async def story(far: MirroredRolloutQueue, store_queue: LocalRolloutQueue) -> None:
        (ours,) = await far.put_images([png("red")])
        assert set(mine.image_refs([ours.digest])) == set(theirs.image_refs([ours.digest])) == {ours.digest}
        (shown,) = await store_queue.put_images([png("blue")])  # as the endpoint of another process does
        await far.enqueue(wanted(0, 1))
        (first,) = await claim(store_queue)
        await store_queue.record_turn(first.attempt_id, replace(turn(), images=(ImageSpan(shown.digest, 0, 2),)))
        await store_queue.finish(first.attempt_id, AttemptReport(Outcome.SUCCEEDED, reward=1.0))
        await far.wait(0, 10)
        assert mine.images([shown.digest])[shown.digest].content == png("blue")
        assert mine.turns(0)[0].images == (ImageSpan(shown.digest, 0, 2),)
        assert await far.get_images([ours.digest, shown.digest, "0" * 64]) == {
            ours.digest: png("red"),
            shown.digest: png("blue"),
        }

    joined(story, mine, theirs)


def test_what_a_stop_left_of_a_group_is_cancelled_there_and_here() -> None:
    mine, theirs = open_store(), open_store()

    async def story(far: MirroredRolloutQueue, store_queue: LocalRolloutQueue) -> None:
        await far.enqueue(wanted(0, 2))
        (first,) = await claim(store_queue)
        await store_queue.finish(first.attempt_id, AttemptReport(Outcome.SUCCEEDED, reward=1.0))
        await far.wait(0, 10)
        far = far.with_epoch(await store_queue.acquire_lease(RUN))  # the run has restarted
        await far.cancel([0, 1], "too old")
        await far.close()
        for journal in (mine, theirs):
            assert [state.status for state in journal.rollouts()] == [Status.SUCCEEDED, Status.CANCELLED]
        mine.append([TaskDropped(0, 1, "too old")])

    joined(story, mine, theirs)


def test_large_requests_are_sent_in_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "MOST_BYTES", 40_000)

    async def story(far: MirroredRolloutQueue, store_queue: LocalRolloutQueue) -> None:
        tasks = [Task(number, {"prompt": f"{number}" * 12_000}) for number in range(10)]
        requests = [RolloutRequest(task, sample, 8 * task.ordinal + sample) for task in tasks for sample in range(8)]
        assert await far.enqueue(requests) == list(range(80))
        assert [state.id for state in (await store_queue.find(RolloutQuery())).rollouts] == list(range(80))

    joined(story, open_store(), max_body_bytes=60_000)


def test_no_portion_holds_more_values_than_a_store_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [RolloutRequest(Task(number, {"prompt": "?", "of": [1, 2, 3]}), 0, number) for number in range(100)]
    for most in range(600, 640):  # more than the values of one rollout, so that some portions are filled to the last
        monkeypatch.setattr(joining, "VALUES", most)
        for some in joining._split_requests(requests):
            check_json_size(to_json({"wanted": [encode_as(RolloutRequest, one) for one in some]}).encode(), most)


def test_a_journal_restored_from_a_backup_is_completed() -> None:
    theirs = open_store()

    async def before(far: MirroredRolloutQueue, store_queue: LocalRolloutQueue) -> None:
        await far.enqueue(wanted(0, 2))
        (got,) = await claim(store_queue)
        await store_queue.finish(got.attempt_id, AttemptReport(Outcome.SUCCEEDED, reward=1.0))
        await far.wait(0, 10)

    mine = open_store()

    async def after(far: MirroredRolloutQueue, store_queue: LocalRolloutQueue) -> None:
        page = await far.find(RolloutQuery(ids=(0, 1)))
        assert [state.status for state in page.rollouts] == [Status.SUCCEEDED, Status.QUEUED]
        await far.enqueue(wanted(0, 2))
        assert attempt_records(mine, 0) == attempt_records(theirs, 0) and mine.rollout(1).status is Status.QUEUED
        assert [got.attempt_id for got in await claim(store_queue)] == [AttemptId(1, 0)]
        passed = store_queue.journal.position
        assert [state.id for state in (await far.wait(passed, 10))[1]] == [0], "told, though the cursor is past it"
        assert not (await far.wait(passed)).rollouts

    joined(before, open_store(), theirs)
    joined(after, mine, theirs)


def test_a_superseded_trainer_is_refused_at_its_next_call() -> None:
    async def story(far: MirroredRolloutQueue, store_queue: LocalRolloutQueue) -> None:
        await far.enqueue(wanted(0))
        waits = asyncio.create_task(far.wait(0, 20))
        await asyncio.sleep(0.1)
        assert await store_queue.acquire_lease(RUN) == 2
        for word in (far.enqueue(wanted(1)), far.wait(0, 0)):
            with pytest.raises(
                IllegalTransitionError, match=r"from epoch 1 .* resumed in /runs/mine since, which began epoch 2"
            ):
                await word
        waits.cancel()

    joined(story, open_store())


# -- runs -------------------------------------------------------------------------------------------------------------


def test_a_run_joins_a_store_and_its_journal_holds_what_the_store_has(options: list[str], tmp_path: Path) -> None:
    store_directory, run = tmp_path / "store", tmp_path / "run"
    with started(["store", str(store_directory), "--listen", "127.0.0.1:0"], tmp_path / "store.log") as store:
        url = store.says(r"is served at (http://\S+?)\. ")[1]
        store.says("A trainer:")
        admin, key = (store_directory / "admin.key").read_text(), (store_directory / "runner.key").read_text()
        assert store.said.count(admin) == 1 and key not in store.said, "shown once; the other lies in a file"
        words = ["train", *options, f"directory={run}", f"agent.store={url}", "agent.runners=0"]
        joins = ["runner", LOOKER, "--url", url]
        with (
            started(joins, tmp_path / "runner.log", ETUDE_STORE_KEY=key) as runner,
            started(words, tmp_path / "train.log", ETUDE_STORE_KEY=admin) as train,
        ):
            assert train.ends() == 0, train.said
            runner.send_signal(signal.SIGTERM)
            assert runner.ends() == 0, runner.said
        another = ["train", *options, f"directory={tmp_path / 'other'}", f"agent.store={url}"]
        with started(another, tmp_path / "other.log", ETUDE_STORE_KEY=admin) as other:
            assert other.ends() == 2 and "holds the rollouts of another run" in other.said, other.said
        store.send_signal(signal.SIGTERM)
        assert store.ends() == 0 and "Stopped." in store.said and "Traceback" not in store.said
    with (
        closing(open_store(run / "journal.sqlite")) as mine,
        closing(open_store(store_directory / "journal.sqlite")) as theirs,
    ):
        in_store = seen(theirs)
        assert seen(mine) == in_store and len(in_store) == 2 * 2 * 2 + 2 * 3
        assert {status for status, _, _ in in_store.values()} == {Outcome.SUCCEEDED.value}
        assert sum(1 for _ in mine.read(kinds=(RolloutsAdmitted,))) == 2


@pytest.mark.soak
def test_a_killed_trainer_resumes_with_the_rollouts_of_the_store(options: list[str], tmp_path: Path) -> None:
    store_directory, run = tmp_path / "store", tmp_path / "run"
    with started(["store", str(store_directory), "--listen", "127.0.0.1:0"], tmp_path / "store.log") as store:
        url = store.says(r"is served at (http://\S+?)\. ")[1]
        store.says("A trainer:")
        admin = (store_directory / "admin.key").read_text()
        words = ["train", *options, "steps=4", f"directory={run}", f"agent.store={url}", "agent.runners=1"]
        with started(words, tmp_path / "train.log", ETUDE_STORE_KEY=admin) as train:
            train.says("step 2/4")
            train.send_signal(signal.SIGKILL)
            train.ends()
        with started(["train", "--resume", str(run)], tmp_path / "again.log", ETUDE_STORE_KEY=admin) as again:
            assert again.ends() == 0, again.said
    with closing(open_store(run / "journal.sqlite")) as mine:
        admitted = [
            event.rollouts for _, event in mine.read(kinds=(RolloutsAdmitted,)) if isinstance(event, RolloutsAdmitted)
        ]
        assert [id for ids in admitted for id in ids] == list(range(4 * 2 * 2)), "each once, and in order"


@pytest.mark.soak
def test_a_copy_of_a_run_cannot_join_as_a_second_trainer(options: list[str], tmp_path: Path) -> None:
    store_directory, run, copied = tmp_path / "store", tmp_path / "run", tmp_path / "copied"
    serve = ["store", str(store_directory), "--listen", "127.0.0.1:0"]
    with started(serve, tmp_path / "store.log") as store:
        url = store.says(r"is served at (http://\S+?)\. ")[1]
        store.says("A trainer:")
        admin = (store_directory / "admin.key").read_text()
        words = ["train", *options, "steps=1", f"directory={run}", f"agent.store={url}", "agent.runners=1"]
        with started(words, tmp_path / "train.log", ETUDE_STORE_KEY=admin) as train:
            assert train.ends() == 0, train.said
        shutil.copytree(run, copied)
        again = ["train", "--resume", str(copied), "steps=2"]
        with started(again, tmp_path / "copied.log", ETUDE_STORE_KEY=admin) as second:
            assert second.ends() == 2 and f"active in {run}, and was started in {copied}" in second.said, second.said
        store.send_signal(signal.SIGTERM)
        assert store.ends() == 0
    with started([*serve, "--give-over"], tmp_path / "over.log") as store:
        url = store.says(r"is served at (http://\S+?)\. ")[1]
        store.says("A trainer:")
        moved = [*again, f"agent.store={url}"]
        with started(moved, tmp_path / "moved.log", ETUDE_STORE_KEY=admin) as second:
            assert second.ends() == 0, second.said
    with (
        closing(open_store(copied / "journal.sqlite")) as mine,
        closing(open_store(store_directory / "journal.sqlite")) as theirs,
    ):
        assert seen(mine) == seen(theirs) and not mine.rollouts(Phase.QUEUED, Phase.RUNNING)
        assert sum(1 for _ in mine.read(kinds=(RolloutsAdmitted,))) == 2


def test_a_sweep_cannot_share_a_store(options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "--multirun", *options, f"directory={tmp_path / 'sweep'}", "agent.store=http://127.0.0.1:9"]
    assert main([*words, "seed=0,1"]) == 2
    assert "is given to 2 of these" in capsys.readouterr().err and not (tmp_path / "sweep").exists()


def test_a_store_is_joined_by_its_key_and_only_while_it_is_there(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ETUDE_STORE_KEY", raising=False)
    words = ["train", *options, f"directory={tmp_path / 'run'}", "agent.store=http://127.0.0.1:9"]
    assert main(words) == 2
    assert "ETUDE_STORE_KEY is not set" in capsys.readouterr().err


def test_a_run_with_open_rollouts_in_a_store_does_not_resume_without_it(tmp_path: Path) -> None:
    with closing(open_store(tmp_path / "journal.sqlite")) as mine:
        joining.check_store_not_left(tmp_path, mine)  # it never joined a store
        joining.load_owner(tmp_path, mine)
        joining.check_store_not_left(tmp_path, mine)  # none of its rollouts is open
        mine.append([TaskIssued(0, 0, "", {}), RolloutQueued(0, 0, 0)])
        with pytest.raises(ConfigError, match=r"continue with the `agent\.store` that it had"):
            joining.check_store_not_left(tmp_path, mine)
    with closing(open_store()) as mine:
        mine.append([TaskIssued(0, 0, "", {}), RolloutQueued(0, 0, 0)])
        with pytest.raises(ConfigError, match="kept its rollouts itself so far"):
            joining.load_owner(tmp_path / "elsewhere", mine)


def test_the_page_gives_the_lease_of_a_run() -> None:
    page = " ".join((Path(__file__).parents[3] / "docs" / "guides/runners.md").read_text(encoding="utf-8").split())
    attempt_records = (
        f"renews its lease every {joining.RENEW_S:g} seconds. {joining.LEASE_S:g} seconds after the last renewal"
    )
    assert attempt_records in page
