"""The language demo's model: its tokenizer, its random weights, and its warm-up on an unreliable teacher.

The warm-up is supervised training with the same trainer that RL uses afterwards. Its number of steps is fixed; held-out
problems play no part in it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from etude.algorithms.losses.supervised import SFT
from etude.batch import Batch
from etude.chat import ChatRenderer, Tokenizer
from etude.data.tokenization import tokenize_completion
from etude.demo.sorting_task import ALPHABET, problems, prompt_of, teacher_answer
from etude.images.pixel_cache import PixelCache
from etude.models import Model, create, save, tiny_config
from etude.recipes.supervised.examples import batch_of
from etude.recipes.workers.policy_worker import LossObjective
from etude.train import Learner, TrainConfig
from etude.train.optim import PRECISIONS

PAD, END = "<pad>", "<end>"
SIZES: dict[str, Any] = {"layers": 2, "hidden": 96, "heads": 4, "kv_heads": 2, "intermediate": 256, "context": 32}
HEAD_DIM = 24
STEPS, BATCH = 300, 128
TRAINING = TrainConfig(
    precision="fp32", learning_rate=3e-3, lr_scheduler="cosine", warmup_steps=30, weight_decay=0.01, betas=(0.9, 0.95)
)


def make_tokenizer(directory: Path) -> Tokenizer:
    """Write a tokenizer with one token a character."""
    return write_tokenizer(directory, (PAD, END), ALPHABET)


def write_tokenizer(
    directory: Path, special: Sequence[str], others: Iterable[str], pieces: Sequence[str] = ()
) -> Tokenizer:
    """Write a tokenizer in the Hugging Face format, and read it. pieces: tokens of several characters."""
    directory.mkdir(parents=True, exist_ok=True)
    vocabulary = {token: i for i, token in enumerate([*special, *pieces, *others])}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(special))
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in pieces])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"pad_token": PAD, "eos_token": END, "tokenizer_class": "PreTrainedTokenizerFast"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
    return Tokenizer.load(directory)


def new_model(tokenizer: Tokenizer, seed: int, head_dim: int = HEAD_DIM) -> Model:
    """Create a small transformer with random weights."""
    config = tiny_config(tokenizer.vocab_size, head_dim=head_dim, **SIZES)
    return create(config, seed=seed, dtype=PRECISIONS[TRAINING.precision])


def warm_up(directory: Path, seed: int, advance: Callable[[], None], *, head_dim: int = HEAD_DIM) -> Model:
    """Train a new model on the teacher's answers for `STEPS` steps, and write it; `advance` is called after each
    step."""
    tokenizer = make_tokenizer(directory)
    model = new_model(tokenizer, seed, head_dim)
    imitate(model, TRAINING, islice(demonstrations(tokenizer, seed), STEPS), advance)
    save(model, directory)
    return model


def imitate(
    model: Model,
    training: TrainConfig,
    batches: Iterable[Batch],
    advance: Callable[[], None],
    *,
    steps: int | None = None,
    pixels: PixelCache | None = None,
) -> None:
    """Train a model on batches of demonstrations, `steps` of them; by default `STEPS`. pixels: of their images."""
    learner = Learner(model, training, steps=STEPS if steps is None else steps, pixels=pixels)
    objective = LossObjective(SFT())
    for batch in batches:
        learner.update(batch, objective)
        advance()


def demonstrations(tokenizer: Tokenizer, seed: int) -> Iterator[Batch]:
    """Iterate over batches of the teacher's answers, to new problems."""
    generator = random.Random(seed)
    source = problems(seed, held_out=False)
    chat = ChatRenderer(tokenizer)
    while True:
        examples = ((prompt_of(problem), teacher_answer(problem, generator)) for problem in islice(source, BATCH))
        yield batch_of([(tokenize_completion(chat, *example),) for example in examples])
