"""A batch crosses a process boundary as plain bytes, and arrives bit for bit, without a copy."""

from __future__ import annotations

import multiprocessing
from multiprocessing.shared_memory import SharedMemory

import pytest
import torch
from hypothesis import given

from etude.batch import Batch, from_bytes, to_bytes
from etude.errors import BatchError
from tests.batches import batches, random_batch, same, with_extras


@given(batches)
def test_what_arrives_is_what_was_sent(batch: Batch) -> None:
    for sent in (batch, with_extras(batch)):
        assert same(from_bytes(to_bytes(sent)), sent)


def test_no_pickle_travels() -> None:
    wire = bytes(to_bytes(with_extras(random_batch(1))))
    assert b"torch" not in wire and b"numpy" not in wire and b"\x80\x04" not in wire[:512]


def test_the_columns_look_into_the_buffer() -> None:
    wire = to_bytes(random_batch(1))
    batch = from_bytes(wire)
    before = int(batch.ids[0])
    at = wire.index(batch.ids.numpy().tobytes())
    wire[at : at + 4] = (before + 1).to_bytes(4, "little")
    assert int(batch.ids[0]) == before + 1


def test_a_buffer_of_something_else_is_refused() -> None:
    with pytest.raises(BatchError, match="does not hold a batch"):
        from_bytes(bytearray(b"PK\x03\x04 and so on"))


def _double_rewards(name: str, size: int) -> None:
    memory = SharedMemory(name=name)
    batch = from_bytes(memory.buf[:size])
    batch.need("reward").mul_(2)
    del batch
    memory.close()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_another_process_reads_and_writes_the_same_memory() -> None:
    batch = with_extras(random_batch(5))
    wire = to_bytes(batch)
    memory = SharedMemory(create=True, size=len(wire))
    try:
        memory.buf[: len(wire)] = wire
        worker = multiprocessing.get_context("spawn").Process(target=_double_rewards, args=(memory.name, len(wire)))
        worker.start()
        worker.join(60)
        assert worker.exitcode == 0
        back = from_bytes(bytearray(memory.buf[: len(wire)]))
    finally:
        memory.close()
        memory.unlink()
    assert torch.equal(back.need("reward"), 2 * batch.need("reward"))
    assert torch.equal(back.ids, batch.ids)
