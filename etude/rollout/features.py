"""The features of images in the embedded engine: each image goes through the tower once for all that show it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from etude.errors import EngineError
from etude.models import Model
from etude.models.vision import Features, PassImages, place_features
from etude.rollout.prompt_pixels import PromptPixels
from etude.rollout.scheduler import ScheduledWork

MAX_FEATURES = 2**16
"""The most features that are kept, of all images together."""


class FeatureCache:
    """The features of the images that were used last. Only the engine's thread uses it.

    An image is always encoded alone, so that its features have the same bits beside any other images of a step.
    """

    def __init__(self, pixels: PromptPixels | None, max_features: int = MAX_FEATURES) -> None:
        """pixels: of the images of prompts, for a model that takes some."""
        self.encoded = 0
        """The number of times that an image went through the tower."""
        self._pixels = pixels
        self._max_features = max_features
        self._features: OrderedDict[str, Features] = OrderedDict()

    def clear(self) -> None:
        """Drop all features, since the tower's weights have changed or the memory is needed."""
        self._features.clear()

    def for_pass(self, works: Sequence[ScheduledWork], model: Model) -> PassImages | None:
        """Return the features that the tokens of a pass take, in the order of its works; None without image tokens."""
        if self._pixels is None or all(work.request.images is None for work in works):
            return None
        image: list[NDArray[np.int64]] = []
        feature: list[NDArray[np.int64]] = []
        places: dict[str, int] = {}
        parts: list[Features] = []
        for work in works:
            shown = work.request.images
            count = work.stop - work.start
            of_token = np.full(count, -1, np.int64)
            of_feature = np.zeros(count, np.int64)
            if shown is not None and work.start < work.request.prompt_length:
                own = shown.image[work.start : work.stop]
                of_feature[: len(own)] = shown.feature[work.start : work.stop]
                for index in np.unique(own[own >= 0]).tolist():
                    digest = shown.digests[index]
                    if digest not in places:
                        places[digest] = len(parts)
                        parts.append(self._find(digest, self._pixels, model))
                    of_token[: len(own)][own == index] = places[digest]
            image.append(of_token)
            feature.append(of_feature)
        if not parts:
            return None
        counts = [len(part.main) for part in parts]
        tokens, rows = place_features(np.concatenate(image), np.concatenate(feature), counts)
        device = parts[0].main.device
        return PassImages(
            Features.joined(parts), torch.from_numpy(tokens).to(device), torch.from_numpy(rows).to(device)
        )

    def _find(self, digest: str, pixels: PromptPixels, model: Model) -> Features:
        features = self._features.get(digest)
        if features is None:
            features = model.encode_images([pixels.compute(digest)])
            if not bool(torch.isfinite(features.main).all()):
                raise EngineError(
                    "The features of an image are not numbers. The tower's weights have diverged, or do not fit its "
                    "dtype."
                )
            self.encoded += 1
            self._features[digest] = features
            while len(self._features) > 1 and self._count() > self._max_features:
                self._features.popitem(last=False)
        self._features.move_to_end(digest)
        return features

    def _count(self) -> int:
        return sum(len(features.main) for features in self._features.values())
