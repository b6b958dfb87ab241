"""Stop strings in a text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["StopStringFilter"]


class StopStringFilter:
    """Passes text on as soon as it is certain that no stop string begins in it. The stop string itself never passes."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.stopped = False

    def push(self, text: str, can_stop: bool = True) -> str:
        """Take new text, return what may be shown. After a stop string nothing more is.

        Only a stop string that ends in this text is looked for; none where it does not count.
        """
        if self.stopped:
            return ""
        old = len(self._held)
        text = self._held + text
        found = [at for stop in self._stops if (at := text.find(stop, max(0, old - len(stop) + 1))) >= 0]
        if found and can_stop:
            self.stopped = True
            self._held = ""
            return text[: min(found)]
        begun = self._partial_start(text)
        self._held = text[begun:]
        return text[:begun]

    def finish(self) -> str:
        """What was held back for a stop string that did not come."""
        held, self._held = self._held, ""
        return held

    def _partial_start(self, text: str) -> int:
        """Where the longest beginning of a stop string at the end of the text begins."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for at in range(max(0, len(text) - longest), len(text)):
            if any(stop.startswith(text[at:]) for stop in self._stops):
                return at
        return len(text)
