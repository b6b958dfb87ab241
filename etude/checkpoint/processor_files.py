"""The files of an image processor beside an exported model, so that servers prepare images as training did."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from etude.images import read_processor

OWN, NESTED = "preprocessor_config.json", "processor_config.json"
"""transformers' file of an image processor, and the file of all processors of a model, which may have it too."""
FILES = (OWN, NESTED, "video_preprocessor_config.json")


@dataclass(frozen=True)
class ProcessorFiles:
    """The image processor of a model directory. A model of text has no such files, and then nothing is written."""

    directory: Path
    max_pixels: int | None = None
    """The most pixels that an image is resized to; None leaves the files as they are."""

    def write(self, to: Path) -> None:
        """Write the files into another directory."""
        for name in FILES:
            if (self.directory / name).is_file():
                shutil.copyfile(self.directory / name, to / name)
        settings = None if self.max_pixels is None else read_processor(self.directory, self.max_pixels)
        if settings is None:
            return
        (to / OWN).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        nested = json.loads((to / NESTED).read_text(encoding="utf-8")) if (to / NESTED).is_file() else {}
        if "image_processor" in nested:
            nested["image_processor"] = settings
            (to / NESTED).write_text(json.dumps(nested, indent=2) + "\n", encoding="utf-8")
