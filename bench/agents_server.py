"""What `bench.agents` speaks to, in a process of its own: a desk over a journal in a file, its server, and beside it
the model endpoint over an engine that takes no time.

    python -m bench.agents_server DIRECTORY ATTEMPTS [CORE]

The first line it says is where it is, its admin key and its runners', and the keys of so many attempts that run, by
which each calls the model and writes; `first` is the rollout of the first of them. Then it serves until its input ends,
or it is killed. CORE is the one that it runs on, where it is to have no more.
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
from etude.recipes.agents.services import freeze_gc
from etude.records import Completion, SamplingParams, Task
from etude.store import open_store
from etude.store.keys import Keyring
from etude.store.local_queue import LocalRolloutQueue
from etude.store.rollout_queue import Claim, RolloutLimits, RolloutRequest
from etude.store.server import serve

SAID = "It stands at the second gate from the left, where the road turns to the river and the old mill is."
"""Every answer."""
END = "<|im_end|>"
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CONTEXT = 32_768
"""Tokens of the model's longest sequence."""
PATIENT = RolloutLimits(timeout_s=None, unresponsive_s=3600.0)


def chat(directory: Path) -> ChatRenderer:
    """A small tokenizer of bytes, and the commonest of templates."""
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
    told = {"eos_token": END, "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(told))
    return ChatRenderer(Tokenizer.load(directory), "served")


@dataclass(frozen=True)
class _Gained:
    ids: Ids
    logp: np.ndarray
    version: Ids
    completion: Completion | None


class Null:
    """Says the same to everything, at once."""

    def __init__(self, chat: ChatRenderer) -> None:
        ids = chat.tokenizer.encode(SAID + END, add_special_tokens=True)
        count = len(ids)
        self._said = Completion(ids, np.full(count, -1.0), np.zeros(count, np.int32), "stop", SAID)

    async def generate(self, prompt: Ids, sampling: SamplingParams) -> Completion:  # noqa: ARG002
        """Say it."""
        return self._said

    async def stream(self, prompt: Ids, sampling: SamplingParams) -> AsyncGenerator[_Gained, None]:  # noqa: ARG002
        """Say it, in one piece."""
        yield _Gained(self._said.ids, self._said.logp, self._said.version, self._said)


async def begun(desk: LocalRolloutQueue, count: int) -> list[Claim]:
    """So many attempts that run."""
    claims: list[Claim] = []
    if count:
        await desk.enqueue([RolloutRequest(Task(n, {"n": n}), limits=PATIENT) for n in range(count)])
    while len(claims) < count:
        claims += await desk.claim("bench", count, 10.0)
    return claims


def main(directory: Path, attempts: int, core: int | None) -> None:
    """Serve."""
    if core is not None:
        os.sched_setaffinity(0, {core})
    keyring = Keyring(b"a secret of this benchmark alone")
    talk = chat(directory / "tokenizer")
    desk = LocalRolloutQueue(open_store(directory / "journal.sqlite"), keyring)
    endpoint = ModelEndpoint(desk, keyring, talk, Null(talk), context=CONTEXT)
    claims = asyncio.run(begun(desk, attempts))
    with (
        freeze_gc(),
        serve(desk, keyring, routers=[create_router(endpoint)], lifespans=[endpoint]) as serving,
    ):  # as a run does
        told = {
            "url": serving.url,
            "key": keyring.admin,
            "runner": keyring.runner,
            "keys": [claim.model_key for claim in claims],
            "rewards": [claim.reward_key for claim in claims],
            "first": claims[0].attempt_id.rollout if claims else 0,
        }
        print(json.dumps(told), flush=True)
        sys.stdin.read()
    asyncio.run(desk.close())
    desk.journal.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else None)
