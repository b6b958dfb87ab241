"""The objects that exist when a run's agents start."""

from __future__ import annotations

import gc
import weakref

from etude.recipes.agents.services import freeze_gc


class Knot:
    """An object with a reference cycle, so that only the collector frees it."""

    def __init__(self) -> None:
        self.me = self


def test_existing_objects_are_left_out_of_garbage_collections_until_the_end() -> None:
    before, knot = gc.get_freeze_count(), Knot()
    seen = weakref.ref(knot)
    with freeze_gc():
        assert gc.get_freeze_count() > before
        del knot
        gc.collect()
        assert seen() is not None
        new = weakref.ref(Knot())
        gc.collect()
        assert new() is None
    gc.collect()
    assert seen() is None and gc.get_freeze_count() == 0
