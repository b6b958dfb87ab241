"""Workers for crews: each rank creates one, here or in another process."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from etude.batch import Batch
from etude.errors import ConfigError, TrainingError
from etude.observe import Last, Max, Mean, Metrics, Sum, get_logger
from etude.protocols import Gather, Split, dispatch_mode


def total(values: Tensor) -> Tensor:
    """Return the sum over ranks, which waits for all of them."""
    if dist.is_initialized():
        dist.all_reduce(values)
    return values


class CountingWorker:
    """A worker that counts, marks and measures, and fails in every way."""

    def __init__(self, start: int = 0) -> None:
        self.count = start

    @property
    def rank(self) -> int:
        """The rank of this worker."""
        return dist.get_rank() if dist.is_initialized() else 0

    @dispatch_mode()
    def add(self, amount: int, *, twice: bool = False) -> int:
        """Add to the count; check that every rank has the same count."""
        self.count += amount * (2 if twice else 1)
        return self.count

    @dispatch_mode(gather=Gather.ALL)
    def everyone(self) -> list[int]:
        """Return one entry a rank: its process."""
        return os.getpid()  # type: ignore[return-value]

    @dispatch_mode(gather=Gather.ALL)
    def given(self, *names: str) -> list[dict[str, str]]:
        """Return the values of these environment variables in each rank."""
        return {name: os.environ[name] for name in names if name in os.environ}  # type: ignore[return-value]

    @dispatch_mode(gather=Gather.ALL)
    def recite(self, size: int) -> list[Tensor]:
        """Return a long answer from each rank."""
        return torch.arange(size) + self.rank  # type: ignore[return-value]

    @dispatch_mode(gather=Gather.ALL)
    def threads(self) -> list[int]:
        """Return the number of threads of each rank."""
        return torch.get_num_threads()  # type: ignore[return-value]

    @dispatch_mode(Split.GROUPS, Gather.CONCAT)
    def centre(self, batch: Batch) -> Batch:
        """Return rewards minus the mean of their group, which is right only for whole groups."""
        reward = batch.require("reward")
        total = torch.zeros(batch.num_groups, dtype=reward.dtype).index_add(0, batch.group, reward)
        count = torch.zeros_like(total).index_add(0, batch.group, torch.ones_like(reward))
        return batch.replace(reward=reward - (total / count)[batch.group])

    @dispatch_mode(Split.ROLLOUTS, Gather.CONCAT)
    def double(self, batch: Batch, by: int = 2) -> Batch:
        """Return twice the reward."""
        return batch.replace(reward=batch.require("reward") * by)

    @dispatch_mode(Split.ROLLOUTS, Gather.CONCAT)
    def read_images(self, batch: Batch) -> Batch:
        """Return the batch. Its reward is the number of image bytes that each rollout's rank can read."""
        readable = sum(len(image.read()) for image in batch.images)
        return batch.replace(reward=torch.full((batch.num_rollouts,), float(readable), dtype=torch.float64))

    @dispatch_mode(Split.GROUPS, Gather.METRICS)
    def measure(self, parts: list[Batch], factor: float) -> Metrics:
        """Return metrics of several batches, each of which is divided over ranks."""
        metrics = Metrics()
        for part in parts:
            reward = part.require("reward")
            metrics.merge({"mean": Mean.over(reward.sum() * factor, len(reward)), "tokens": Sum.of(part.num_tokens)})
            if len(reward):
                metrics.add("highest", Max.of(reward.max()))
            metrics.merge({"whole": Sum.of(total(reward.sum())), "factor": Last.of(factor)})
        return metrics

    @dispatch_mode(gather=Gather.ALL)
    def exchange(self, size: int) -> list[Tensor]:
        """Return the values that each rank receives from the others."""
        return total(torch.arange(size) + 10 * self.rank)  # type: ignore[return-value]

    @dispatch_mode()
    def refuse(self, rank: int | None = None) -> None:
        """Raise an error of Etude, on one rank or on all."""
        if rank in (None, self.rank):
            raise TrainingError("The gradient is not finite.")

    @dispatch_mode()
    def stumble(self, rank: int) -> None:
        """Raise another error on one rank; the others wait for it."""
        if self.rank == rank:
            raise ZeroDivisionError("a slip")
        total(torch.ones(1))

    @dispatch_mode()
    def end(self, rank: int, how: str) -> None:
        """End or stop one rank; the others wait for it in an exchange."""
        if self.rank == rank:
            sys.stderr.write("these are its last words\n")
            sys.stderr.flush()
            if how == "exit":
                os._exit(3)
            os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "crash": signal.SIGSEGV}[how])
        total(torch.ones(1))

    @dispatch_mode()
    def work(self, seconds: float) -> None:
        """Compute for a while."""
        time.sleep(seconds)

    @dispatch_mode()
    def hang(self, *ranks: int) -> None:
        """Hang in some ranks, with a heartbeat; the others have nothing to do."""
        if self.rank in ranks:
            time.sleep(600)

    @dispatch_mode()
    def stop_here(self) -> None:
        """Wait for a debugger, on the first rank."""
        if self.rank == 0:
            breakpoint()

    @dispatch_mode()
    def late(self, rank: int) -> None:
        """Let the others wait in an exchange for a rank that never comes."""
        if self.rank == rank:
            time.sleep(600)
        total(torch.ones(1))

    @dispatch_mode()
    def warn(self) -> None:
        """Log a warning."""
        get_logger("train").warning("the weather is bad")
        get_logger("train").warning("and here it is rank %d", self.rank)

    async def wonder(self, seconds: float, *, on_start: Callable[[], None]) -> tuple[int, int]:
        """Take some time, beside other calls."""
        on_start()
        if seconds < 0:
            raise ConfigError("Time goes on.")
        await asyncio.sleep(seconds)
        return self.rank, os.getpid()

    def secret(self) -> int:
        """An undeclared method."""
        return self.count

    @dispatch_mode()
    def generator(self) -> Any:
        """Return a generator, which cannot be pickled."""
        return (number for number in range(3))


def refusing(_: int) -> CountingWorker:
    """Create a worker that raises."""
    raise ConfigError("No worker can be made of this.")


def stopping(rank: int) -> CountingWorker:
    """Create a worker that hangs on one of the ranks."""
    if dist.get_rank() == rank:
        time.sleep(600)
    return CountingWorker()


def counted() -> CountingWorker:
    """Create a worker that has counted already."""
    return CountingWorker(10)


WIDE = 4096


class Maker:
    """A worker that creates batches too large to copy often, and reads them."""

    @dispatch_mode(Split.GROUPS, Gather.CONCAT)
    def widen(self, batch: Batch) -> Batch:
        """Return the batch with many numbers for each token: the token itself, and those after it."""
        return batch.replace(teacher_topk_ids=batch.ids.long()[:, None] + torch.arange(WIDE))

    @dispatch_mode(Split.ROLLOUTS, Gather.METRICS)
    def weigh(self, parts: list[Batch]) -> Metrics:
        """Return the sum of all numbers, their count, and the bytes of address space that they took."""
        metrics = Metrics()
        for part in parts:
            wide = part.require("teacher_topk_ids")
            metrics.merge({"sum": Sum.of(float(wide.sum())), "bytes": Sum.of(wide.nbytes), "parts": Sum.of(1)})
        return metrics

    @dispatch_mode(Split.GROUPS, Gather.CONCAT)
    def narrow(self, batch: Batch) -> Batch:
        """Return the batch without them; each reward is the sum of the dropped numbers."""
        wide = batch.require("teacher_topk_ids").double().sum(1)
        units = torch.repeat_interleave(torch.arange(batch.num_rollouts), batch.rollout_token_offsets.diff())
        reward = torch.zeros(batch.num_rollouts, dtype=torch.float64).index_add(0, units, wide)
        return batch.replace(teacher_topk_ids=None, reward=reward)


class Reader:
    """A worker that reads batches and reports their content."""

    @dispatch_mode(Split.GROUPS, Gather.METRICS)
    def look(self, batch: Batch) -> Metrics:
        """Return the batch's size on all ranks, and its sum."""
        place = torch.arange(batch.num_tokens) - batch.rollout_token_offsets[:-1].repeat_interleave(
            batch.rollout_token_offsets.diff()
        )
        sums = {"ids": (batch.ids.double() * (place + 1)).sum(), "reward": batch.require("reward").sum()}
        sums["version"] = batch.require("trainer_version").sum()
        counts = {"tokens": float(batch.num_tokens), "rollouts": float(batch.num_rollouts)}
        counts |= {name: float(value) for name, value in sums.items()}
        return Metrics({name: Sum.of(value) for name, value in counts.items()})

    @dispatch_mode(Split.GROUPS, Gather.CONCAT)
    def mark(self, batch: Batch) -> Batch:
        """Return the batch with one more column."""
        return batch.replace(advantage=batch.ids.double())
