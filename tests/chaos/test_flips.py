"""A damaged file of a run has no effect on training, or an error names it."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from etude.checkpoint import CheckpointManager
from etude.store import Phase, open_store
from tests.chaos.flips import Resuming, copied, damages, killed, kind_of
from tests.chaos.scenario import make_world

pytestmark = [pytest.mark.xdist_group("kills"), pytest.mark.slow]
KINDS = {
    *("best.json", "facts.json", "inputs.json", "journal.sqlite", "journal.sqlite-wal", "metrics.jsonl"),
    *("rank-0.tensors", "run.yaml", "tensors.json"),
}


def swept(place: Path, flips: int, cuts: int) -> Counter[str]:
    """Count how often each kind of file was damaged, and check the results."""
    world = make_world(place / "world")
    directories = killed(place, world)
    done: Counter[str] = Counter()
    wrong = []
    with ExitStack() as stack:
        resuming = Resuming(world, stack)
        with copied(directories[0], place) as whole:
            wanted = resuming.weights(whole)
        for base, damage in damages(directories, flips, cuts):
            result = resuming.outcome(base, damage, wanted, place)
            done[kind_of(damage.file)] += 1
            wrong += [] if result in ("refused", "no effect") else [f"{damage}: {result}"]
    assert not wrong
    with closing(open_store(directories[0] / "journal.sqlite", read_only=True)) as store:
        newest = CheckpointManager(directories[0] / "checkpoints").newest()
        assert newest is not None and store.position > newest.facts["position"], "nothing was there to be taken up"
        assert store.rollouts(Phase.FINISHED, Phase.RUNNING) or max(store.admitted()) > newest.step
    return done


def test_some_damage_to_every_kind_of_file(tmp_path: Path) -> None:
    assert swept(tmp_path, 50, 10).keys() >= KINDS


@pytest.mark.soak
@pytest.mark.integration
def test_thousands_of_damages_to_every_kind_of_file(tmp_path: Path) -> None:
    done = swept(tmp_path, 2100, 200)
    assert done.keys() >= KINDS and min(done[kind] for kind in KINDS) > 40
