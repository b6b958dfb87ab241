"""Data: the rows of files as tasks, their order, and their rollouts as rows and micro-batches for a trainer.

    files.py       files, directories and iterables → rows, in Arrow memory
    prepare/       published data sets → files that a run reads
    prompts.py     checked prompts
    table.py       the rows of several files, without those left out
    dataset.py     rows → tasks
    batch_columns.py  numbers of tasks that a batch carries
    sampler.py     the order of the rows
    samples.py     turns → rows to train on
    pack.py        a batch → micro-batches within a budget, and the tree with each shared prompt once
    partition.py   rollouts → the ranks that train on them

Code for samples and batches is imported from its own file, because `pack` loads torch.
"""

from __future__ import annotations

from etude.data.config import DataConfig, DataFiles
from etude.data.dataset import Dataset, DatasetColumns
from etude.data.sampler import SAMPLERS, RowOrder, Sampler

__all__ = [
    "SAMPLERS",
    "DataConfig",
    "DataFiles",
    "Dataset",
    "DatasetColumns",
    "RowOrder",
    "Sampler",
]
