"""What a run's agents find when they begin."""

from __future__ import annotations

import gc
import weakref

from etude.recipes.agents.services import freeze_gc


class Knot:
    """Holds itself, so that only the collector lets go of it."""

    def __init__(self) -> None:
        self.me = self


def test_what_is_there_is_left_out_of_collections_and_let_go_of_afterwards() -> None:
    before, there = gc.get_freeze_count(), Knot()
    seen = weakref.ref(there)
    with freeze_gc():
        assert gc.get_freeze_count() > before
        del there
        gc.collect()
        assert seen() is not None
        new = weakref.ref(Knot())
        gc.collect()
        assert new() is None
    gc.collect()
    assert seen() is None and gc.get_freeze_count() == 0
