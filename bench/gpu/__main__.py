"""Measure what one GPU does with Etude, in ten minutes and one file.

    python -m bench.gpu --json FILE [--minutes 9] [--only decode train] [--device cpu --tiny]

The file is replaced after every item and readable at every moment. It needs no network, and of Etude's requirements
torch, transformers, numpy, safetensors, pydantic and rich. Yellow figures miss their goal. With `--device cpu --tiny`
the battery tries itself in seconds; then its figures mean nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from bench.common import default_device
from bench.gpu.battery import Battery, Place
from bench.gpu.items import ITEMS
from etude.observe import make_console


def main(argv: Sequence[str] | None = None) -> int:
    """Run the items, print their table, and return 1 if one failed."""
    names = [item.name for item in ITEMS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", required=True, help="the file of the figures")
    parser.add_argument("--minutes", type=float, default=9.0, help="time for all items; the rest is skipped")
    parser.add_argument("--only", nargs="+", default=names, choices=names, metavar="ITEM", help=", ".join(names))
    parser.add_argument("--device", default=str(default_device()), help="by default the GPU, if there is one")
    parser.add_argument("--tiny", action="store_true", help="sizes that a processor computes in seconds")
    given = parser.parse_args(argv)
    console = make_console()
    place = Place(torch.device(given.device), given.tiny, given.json.resolve().parent)
    battery = Battery([item for item in ITEMS if item.name in given.only], place, given.json, given.minutes)
    failed = battery.run(lambda line: console.print(line, highlight=False))
    console.print(battery.table())
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
