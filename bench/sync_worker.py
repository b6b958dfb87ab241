"""An engine with nothing but weights, in a process of its own: it fetches parcels as a server does, and copies them
over its own. It is started by `bench.sync`, says a line when it is ready, and one for each parcel."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "plugins" / "vllm_weights"))

from etude_vllm_weights.fetching import Fetcher


def main(threads: int) -> None:
    """Answer lines until there are no more."""
    torch.set_num_threads(threads)
    fetcher, held = Fetcher(torch.device("cpu")), dict[str, Tensor]()
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        asked: dict[str, Any] = json.loads(line)
        if "group" in asked:
            fetcher.join(asked["group"])
        elif "kind" in asked:
            for name, tensor in fetcher.fetch(**asked):
                if name not in held:
                    held[name] = torch.empty_like(tensor)
                held[name].copy_(tensor)
        said = {name: float(held[name].double().sum()) for name in asked.get("sums", ())}
        print(json.dumps({"sums": said}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
