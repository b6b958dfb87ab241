"""The log-probs of the tokens of a prompt, which evaluations compare answers by. Nothing is sampled."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from etude.batch import Pack
from etude.errors import EngineError
from etude.models import Model, PackedAttention
from etude.records import PromptScores

Ids = NDArray[np.int32]
MAX_LOGITS = 2**26
"""The most logits at a time: 256 MiB in float32."""


def score_prompt(model: Model, ids: Ids, top: int) -> PromptScores:
    """Compute the log-probs of a prompt by one forward pass. top: the number of likeliest tokens at each place."""
    count = len(ids) - 1
    device = model.device
    pack = Pack(
        ids=torch.from_numpy(ids.astype(np.int32)).to(device),
        positions=torch.arange(count + 1, device=device),
        offsets=torch.tensor([0, count + 1]),
        parent=torch.tensor([-1]),
        source=torch.arange(-1, count, device=device),
    )
    hidden = model.hidden(pack.ids, pack.positions, PackedAttention(pack))
    following = pack.ids[1:].long()
    logp = np.empty(count, np.float32)
    top_ids = np.empty((count, top), np.int32)
    top_logp = np.empty((count, top), np.float32)
    rows = max(1, MAX_LOGITS // model.vocab_size)

    for start in range(0, count, rows):
        part = slice(start, min(start + rows, count))
        scores = model.logits(hidden[part]).log_softmax(-1)
        logp[part] = scores.gather(1, following[part, None])[:, 0].float().cpu().numpy()
        best = scores.topk(top, dim=-1)
        top_ids[part] = best.indices.cpu().numpy()
        top_logp[part] = best.values.float().cpu().numpy()

    if np.isnan(logp).any():
        raise EngineError("The model's logits are not numbers. Its weights have diverged, or do not fit its dtype.")
    return PromptScores(logp, top_ids, top_logp)
