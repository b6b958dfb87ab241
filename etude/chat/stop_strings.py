"""Stop strings in a text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopStringFilter:
    """Returns text as soon as no stop string can begin in it. The stop string itself is never returned."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.stopped = False

    def push(self, text: str, can_stop: bool = True) -> str:
        """Add text, and return the text that is certain. After a stop string this is always empty.

        Only a stop string that ends in this text is searched for, and only if `can_stop`.
        """
        if self.stopped:
            return ""
        num_held = len(self._held)
        text = self._held + text
        found = [
            position for stop in self._stops if (position := text.find(stop, max(0, num_held - len(stop) + 1))) >= 0
        ]
        if found and can_stop:
            self.stopped = True
            self._held = ""
            return text[: min(found)]
        partial_start = self._partial_start(text)
        self._held = text[partial_start:]
        return text[:partial_start]

    def finish(self) -> str:
        """Return the text that was held back for a stop string that did not come."""
        held = self._held
        self._held = ""
        return held

    def _partial_start(self, text: str) -> int:
        """Return the start of the longest suffix of the text that may begin a stop string."""
        max_length = max((len(stop) for stop in self._stops), default=1) - 1
        for position in range(max(0, len(text) - max_length), len(text)):
            if any(stop.startswith(text[position:]) for stop in self._stops):
                return position
        return len(text)
