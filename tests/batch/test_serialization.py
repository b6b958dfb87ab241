"""A batch crosses a process boundary as plain bytes, and arrives bit for bit, without a copy."""

from __future__ import annotations

import multiprocessing
from multiprocessing.shared_memory import SharedMemory

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from etude.batch import Batch, Column, ColumnKind, from_bytes, to_bytes
from etude.errors import BatchError
from etude.records import Rollout
from tests.batches import batches, random_batch, same, with_extras


@given(batches)
def test_a_batch_arrives_unchanged(batch: Batch) -> None:
    for sent in (batch, with_extras(batch)):
        assert same(from_bytes(to_bytes(sent)), sent)


def test_no_pickle_travels() -> None:
    wire = bytes(to_bytes(with_extras(random_batch(1))))
    assert b"torch" not in wire and b"numpy" not in wire and b"\x80\x04" not in wire[:512]


def test_the_columns_are_views_of_the_buffer() -> None:
    wire = to_bytes(random_batch(1))
    batch = from_bytes(wire)
    before = int(batch.ids[0])
    at = wire.index(batch.ids.numpy().tobytes())
    wire[at : at + 4] = (before + 1).to_bytes(4, "little")
    assert int(batch.ids[0]) == before + 1


def test_other_bytes_are_refused() -> None:
    with pytest.raises(BatchError, match="does not hold a batch"):
        from_bytes(bytearray(b"PK\x03\x04 and so on"))


@given(batches, st.data())
def test_a_buffer_cut_anywhere_is_refused(batch: Batch, data: st.DataObject) -> None:
    wire = to_bytes(batch)
    length = data.draw(st.integers(0, len(wire) - 1))
    with pytest.raises(BatchError, match=r"was damaged on its way|does not hold a batch"):
        from_bytes(wire[:length])


@pytest.mark.parametrize(
    ("original", "forged"),
    [
        (b'"at": 0', b'"at": 8'),
        (b'"shape": [', b'"shape":[9'),
        (b'"int64"', b'"int63"'),
        (b'"kinds"', b'"kinbs"'),
        (b'"order": "little"', b'"order": "bigbig"'),
    ],
)
def test_a_forged_header_is_refused(original: bytes, forged: bytes) -> None:
    wire = to_bytes(random_batch(2))
    at = wire.index(original)
    wire[at : at + len(original)] = forged
    with pytest.raises(BatchError, match="was damaged on its way"):
        from_bytes(wire)


def test_a_read_only_buffer_is_refused() -> None:
    with pytest.raises(BatchError, match="read-only"):
        from_bytes(memoryview(bytes(to_bytes(random_batch(2)))))


def test_a_dtype_without_a_serialized_form_is_refused() -> None:
    batch = random_batch(2)
    odd = batch.replace(extra={"phase": Column(ColumnKind.TOKEN, torch.zeros(batch.num_tokens, dtype=torch.complex64))})
    with pytest.raises(BatchError, match="`phase` is complex64"):
        to_bytes(odd)


def test_rollouts_without_rows_and_another_model_are_serialized_too() -> None:
    bare = Batch.from_records([], [Rollout(id=3, task=0, group=0, reward=1.0)]).replace(model="critic")
    assert same(from_bytes(to_bytes(bare)), bare)


def _double_rewards(name: str, size: int) -> None:
    memory = SharedMemory(name=name)
    assert memory.buf is not None
    batch = from_bytes(memory.buf[:size])
    batch.require("reward").mul_(2)
    del batch
    memory.close()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_another_process_reads_and_writes_the_same_memory() -> None:
    batch = with_extras(random_batch(5))
    wire = to_bytes(batch)
    memory = SharedMemory(create=True, size=len(wire))
    assert memory.buf is not None
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
    assert torch.equal(back.require("reward"), 2 * batch.require("reward"))
    assert torch.equal(back.ids, batch.ids)
