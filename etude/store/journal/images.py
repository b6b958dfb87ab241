"""The images of a run, which a journal stores once each, by the hash of their bytes.

Turns and messages name an image by this hash. So an image that a hundred prompts show takes its bytes once, and a run
without images stores nothing more. No image is ever removed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from etude.errors import NotFoundError, StoreError
from etude.images import ImageRef, image_digest
from etude.store.journal.event_records import checksum
from etude.store.journal.events import Event, TurnRecorded

IN_TURN = '"images":[['
"""The beginning of the images in the stored fields of a turn. No text within them can look so: its quotes are escaped.
"""


MAX_KNOWN = 2**16
"""The most digests that are remembered as stored. Others are looked up again."""


@dataclass(frozen=True, slots=True)
class StoredImage:
    """An image with its bytes. Other bytes than those of its hash are refused."""

    ref: ImageRef
    media_type: str
    """Such as `image/png`."""
    content: bytes

    def __post_init__(self) -> None:
        found = image_digest(self.content)
        if found != self.ref.digest:
            raise StoreError(
                f"The image {self.ref.digest} has {len(self.content)} bytes with the hash {found}: they are not those "
                "of this image. Store the image again, or continue from an intact copy."
            )


def image_checksum(digest: str, media_type: str, width: int, height: int) -> int:
    """Return the checksum of an image's stored form, without its bytes, which its digest covers."""
    return checksum(f"{digest} {media_type} {width} {height}".encode())


class ImageCheck:
    """Refuses turns that show images which are not stored."""

    def __init__(self, find: Callable[[Sequence[str]], Collection[str]]) -> None:
        """find: return those of some digests that are stored."""
        self._find = find
        self._stored: OrderedDict[str, None] = OrderedDict()
        """Digests that were found, the longest unused first."""

    def __call__(self, events: Sequence[Event]) -> None:
        """Raise `NotFoundError` for the first image of a turn that is not stored."""
        shown = {
            span.digest: event.rollout
            for event in events
            if isinstance(event, TurnRecorded)
            for span in event.turn.images
        }
        unknown = [digest for digest in shown if digest not in self._stored]
        if unknown:
            found = self._find(unknown)
            for digest in unknown:
                if digest not in found:
                    raise NotFoundError(
                        f"A turn of rollout {shown[digest]} shows the image {digest}, which the store does not have. "
                        "Store its bytes first, with `put_images`."
                    )
        for digest in shown:
            self._stored[digest] = None
            self._stored.move_to_end(digest)
        while len(self._stored) > MAX_KNOWN:
            self._stored.popitem(last=False)
