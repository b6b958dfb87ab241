"""The server of `bench.agents`, in its own process: a rollout queue over a journal file, and the model endpoint.

The engine behind the endpoint takes no time.

    python -m bench.agents_server DIRECTORY ATTEMPTS [CORE]

Its first output line has its address, its admin key, the runners' key, and the model and reward keys of ATTEMPTS
running attempts; `first` is the rollout of the first attempt. Then it serves until its input ends or it is killed. With
CORE it runs on that core only.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer as Inner
from tokenizers import decoders, models, pre_tokenizers, trainers

from etude.agents.proxy.app import create_router
from etude.agents.proxy.endpoint import ModelEndpoint
from etude.chat import ChatRenderer, Tokenizer
from etude.chat.tokenizer import Ids
from etude.images import PromptImages
from etude.recipes.agents.services import freeze_gc
from etude.records import Completion, SamplingParams, Task
from etude.store import open_store
from etude.store.http.server import serve
from etude.store.queue.keys import Keyring
from etude.store.queue.local_queue import LocalRolloutQueue
from etude.store.queue.rollout_queue import Claim, RolloutLimits, RolloutRequest

SAID = "It stands at the second gate from the left, where the road turns to the river and the old mill is."
"""The text of every answer."""
END = "<|im_end|>"
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CONTEXT = 32_768
"""Tokens of the model's longest sequence."""
PATIENT = RolloutLimits(timeout_s=None, unresponsive_s=3600.0)


def chat(directory: Path) -> ChatRenderer:
    """Write a small byte tokenizer with a common chat template."""
    inner = Inner(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    special = [END, "<|im_start|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator([SAID] * 3, trainer)
    directory.mkdir(parents=True, exist_ok=True)
    inner.save(str(directory / "tokenizer.json"))
    tokenizer_config = {"eos_token": END, "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    return ChatRenderer(Tokenizer.load(directory), "served")


@dataclass(frozen=True)
class _Gained:
    ids: Ids
    logp: np.ndarray
    version: Ids
    completion: Completion | None


class Null:
    """An engine that returns the same answer to every prompt, at once."""

    def __init__(self, chat: ChatRenderer) -> None:
        ids = chat.tokenizer.encode(SAID + END, add_special_tokens=True)
        count = len(ids)
        self._said = Completion(ids, np.full(count, -1.0), np.zeros(count, np.int32), "stop", SAID)

    async def generate(
        self,
        prompt: Ids,  # noqa: ARG002
        sampling: SamplingParams,  # noqa: ARG002
        *,
        images: PromptImages | None = None,  # noqa: ARG002
    ) -> Completion:
        """Return the answer."""
        return self._said

    async def stream(
        self,
        prompt: Ids,  # noqa: ARG002
        sampling: SamplingParams,  # noqa: ARG002
        *,
        images: PromptImages | None = None,  # noqa: ARG002
    ) -> AsyncGenerator[_Gained, None]:
        """Yield the answer in one piece."""
        yield _Gained(self._said.ids, self._said.logp, self._said.version, self._said)


async def start_attempts(queue: LocalRolloutQueue, count: int) -> list[Claim]:
    """Start this number of attempts."""
    claims: list[Claim] = []
    if count:
        await queue.enqueue([RolloutRequest(Task(n, {"n": n}), limits=PATIENT) for n in range(count)])
    while len(claims) < count:
        claims += await queue.claim("bench", count, 10.0)
    return claims


def main(directory: Path, attempts: int, core: int | None) -> None:
    """Serve."""
    if core is not None:
        os.sched_setaffinity(0, {core})
    keyring = Keyring("a-secret-of-this-benchmark-alone")
    talk = chat(directory / "tokenizer")
    queue = LocalRolloutQueue(open_store(directory / "journal.sqlite"), keyring)
    endpoint = ModelEndpoint(queue, keyring, talk, Null(talk), context=CONTEXT)
    claims = asyncio.run(start_attempts(queue, attempts))
    with (
        freeze_gc(),
        serve(queue, keyring, routers=[create_router(endpoint)], lifespans=[endpoint]) as serving,
    ):  # as a run does
        server_info = {
            "url": serving.url,
            "key": keyring.admin,
            "runner": keyring.runner,
            "keys": [claim.model_key for claim in claims],
            "rewards": [claim.reward_key for claim in claims],
            "first": claims[0].attempt_id.rollout if claims else 0,
        }
        print(json.dumps(server_info), flush=True)
        sys.stdin.read()
    asyncio.run(queue.close())
    queue.journal.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else None)
