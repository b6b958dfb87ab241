"""The receiving side in another process: the plug-in fetches buckets, without a server around it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

ROOT = Path(__file__).parents[2]
READER = """
import base64, json, pickle, sys, torch
import torch.multiprocessing.reductions
from etude_vllm_weights.fetching import Fetcher
fetcher = Fetcher(torch.device(sys.argv[1]))
rebuild = torch.multiprocessing.reductions.rebuild_cuda_tensor
def rebuild_on_the_only_gpu(*parts):
    return rebuild(*parts[:6], 0, *parts[7:])  # instead of the GPU's UUID, which SGLang translates
torch.multiprocessing.reductions.rebuild_cuda_tensor = rebuild_on_the_only_gpu
for line in sys.stdin:
    asked = json.loads(line)
    if "group" in asked:
        fetcher.join(asked["group"])
        found = {}
    elif "handles" in asked:
        found = dict(pickle.loads(base64.b64decode(asked["handles"])))
    else:
        found = dict(fetcher.fetch(**asked))
    said = {n: [str(t.dtype), list(t.shape), t.cpu().double().sum().item(), t.double().view(-1)[-1].item()]
            for n, t in found.items()}
    del found
    print(json.dumps(said), flush=True)
"""


class Reader:
    """A process that fetches buckets and returns checksums of the tensors."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def ask(self, request: dict[str, Any]) -> None:
        """Send a request."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Return the checksums of the fetched tensors."""
        assert self.process.stdout is not None
        reply: dict[str, Any] = json.loads(self.process.stdout.readline())
        return reply


def checksums(tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Return the checksums that a reader returns for these tensors."""
    return {
        name: [str(t.dtype), list(t.shape), t.double().sum().item(), t.double().reshape(-1)[-1].item()]
        for name, t in tensors.items()
    }


@contextmanager
def reader(device: str = "cpu") -> Iterator[Reader]:
    """Start a reader that fetches to this device."""
    path = str(ROOT / "plugins" / "vllm_weights")
    process = subprocess.Popen(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {path!r})\n{READER}", device],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield Reader(process)
    finally:
        process.kill()
        process.wait(10)
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()
