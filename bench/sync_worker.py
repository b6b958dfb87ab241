"""The engine of `bench.sync`, in its own process, which has weights and nothing else.

It receives buckets like a server and copies them over its weights. It prints a line when it is ready, and one for each
bucket.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "plugins" / "vllm_weights"))

from etude_vllm_weights.fetching import Fetcher


def digest(weight: Tensor) -> str:
    """Return the hash of a weight's bytes."""
    return hashlib.blake2b(weight.contiguous().view(-1).view(torch.uint8).numpy().data, digest_size=16).hexdigest()


def main(threads: int) -> None:
    """Answer input lines until the input ends."""
    torch.set_num_threads(threads)
    fetcher, held = Fetcher(torch.device("cpu")), dict[str, Tensor]()
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        if "group" in request:
            fetcher.join(request["group"])
        elif "kind" in request:
            for name, tensor in fetcher.fetch(**request):
                if name not in held:
                    held[name] = torch.empty_like(tensor)
                held[name].copy_(tensor)
        elif "forget" in request:
            for tensor in held.values():
                tensor.zero_()
        digests = {name: digest(weight) for name, weight in held.items()} if "digests" in request else {}
        print(json.dumps({"digests": digests}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
