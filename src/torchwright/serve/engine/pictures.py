"""The embeddings of pictures that prompts show, each computed once while there is room for it."""

from __future__ import annotations

from collections import OrderedDict

from torchwright.models.decoder.shown import Embedded, EncodesPictures, Shown, joined
from torchwright.models.vision.record import Picture
from torchwright.serve.engine.request import Sequence

MOST_BYTES = 256 * 2**20
"""Two thousand pictures of 64 tokens at a width of 1024 in bfloat16: a conversation asks about the same few again."""


class EncodedPictures:
    """Embeddings by the pictures' digests; the least recently used go first."""

    def __init__(self, vision: EncodesPictures, most_bytes: int = MOST_BYTES) -> None:
        self._vision, self._most = vision, most_bytes
        self._known: OrderedDict[str, Embedded] = OrderedDict()
        self.bytes = 0

    def show(self, sequence: Sequence) -> None:
        """Give a sequence its pictures' embeddings where its next step may need them; take them from it later.

        Raises `ModelError` where they cannot be computed.
        """
        places = sequence.places
        if places is None:
            return
        if sequence.cache.length > places.places_N[-1]:
            sequence.shown = None
        elif sequence.shown is None:
            embedded = joined([self._embed(picture) for picture in sequence.submit.pictures])
            sequence.shown = Shown(places, embedded, sequence.cache.axes)

    def _embed(self, picture: Picture) -> Embedded:
        found = self._known.get(picture.digest)
        if found is None:
            found = self._known[picture.digest] = self._vision.embed(picture)
            self.bytes += found.bytes
        self._known.move_to_end(picture.digest)
        while self.bytes > self._most and len(self._known) > 1:
            self.bytes -= self._known.popitem(last=False)[1].bytes
        return found
