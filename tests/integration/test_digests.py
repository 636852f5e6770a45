"""Digests of tensors, held against another implementation of XXH3."""

from __future__ import annotations

import ctypes
import os
from types import SimpleNamespace

import pytest
import torch
import xxhash

from hookd.api.summary import Summary
from hookd.target.tensors.statistics import Numeric

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64,
    torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


@pytest.fixture(scope="module")
def numeric():
    made = Numeric(lambda _context, then, values: then(values))
    if made.kernel is None:
        pytest.skip("no native part")
    yield made
    made.close()


def bytes_of(tensor):
    return ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size()) if tensor.numel() else b""


def test_every_length_has_the_digest_of_xxh3_with_every_instruction_set(numeric):
    calls = numeric.kernel._brief
    data = torch.frombuffer(bytearray(os.urandom(1 << 17)), dtype=torch.uint8)
    for size in [*range(1300), 4095, 4096, 4097, 8191, 8192, 8193, 65536, 65537, 131071]:
        expected = xxhash.xxh3_64_intdigest(bytes_of(data[:size]))
        for level in range(numeric.kernel.level + 1):
            assert calls.digest(data.data_ptr(), size, level) == expected, (size, level)


def random_tensor(rng):
    """A tensor of a random dtype and layout, among them transposed, strided, expanded, negated and empty ones."""
    dtype = DTYPES[rng.randrange(len(DTYPES))]
    shape = [rng.randrange(1, 9) for _ in range(rng.randrange(4))]
    if rng.random() < 0.1:
        shape = [rng.randrange(3000)]
    raw = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8)
    made = (raw[..., 0] > 127) if dtype is torch.bool else raw.view(dtype).reshape(shape)
    how = rng.randrange(6)
    if how == 1 and made.dim() > 1:
        made = made.transpose(0, -1)
    if how == 2 and made.dim():
        made = made[:: rng.randrange(1, 4)]
    if how == 3:
        made = made.expand(2, *made.shape)
    if how == 4 and made.is_complex():
        made = made.conj()
    if how == 5 and made.dim():
        made = made[rng.randrange(made.shape[0]) :]
    return made


def test_ten_thousand_tensors_have_the_digest_of_a_contiguous_copy_and_their_summary(numeric):
    import random

    rng = random.Random(0)
    torch.manual_seed(0)
    context = SimpleNamespace()
    for _ in range(10_000):
        tensor = random_tensor(rng)
        copied = tensor.resolve_conj().contiguous()
        digest = numeric.digest(tensor)
        assert digest.bits == xxhash.xxh3_64_intdigest(bytes_of(copied)), (tensor.dtype, tensor.shape, tensor.stride())
        if digest.summary is not None:
            known = numeric.summary(context, copied, None)
            assert isinstance(digest.summary, Summary)
            assert repr(digest.summary) == repr(known)


def test_a_digest_changes_nothing_and_is_none_where_there_are_no_elements(numeric):
    tensor = torch.randn(33, 17, requires_grad=True) * 2
    before = tensor._version, tensor.detach().clone()
    numeric.digest(tensor)
    assert tensor._version == before[0]
    assert torch.equal(tensor, before[1])
    assert numeric.digest(torch.randn(3, 3).to_sparse()) is None
    assert numeric.digest(torch.empty(3, device="meta")) is None
    freed = torch.randn(5)
    freed.untyped_storage().resize_(0)
    assert numeric.digest(freed) is None


def test_two_tensors_that_differ_in_one_bit_never_have_one_digest(numeric):
    calls, level = numeric.kernel._brief, numeric.kernel.level
    data = torch.zeros(4096, dtype=torch.uint8)
    seen = {calls.digest(data.data_ptr(), 4096, level)}
    for bit in range(0, 4096 * 8, 3):
        data[bit // 8] = 1 << bit % 8
        seen.add(calls.digest(data.data_ptr(), 4096, level))
        data[bit // 8] = 0
    assert len(seen) == 1 + len(range(0, 4096 * 8, 3))
