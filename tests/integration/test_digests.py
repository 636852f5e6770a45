"""Digests of tensors, compared with other implementations of XXH3 and mix64."""

from __future__ import annotations

import ctypes
import math
import os
import random
from itertools import combinations, product
from types import SimpleNamespace

import pytest
import torch
import xxhash

from hookd.api.digest import Extent
from hookd.target.tensors import device_digest, kernel, statistics
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


def assert_agree(extent, summary, dtype):
    """Compare an extent with all statistics of the same elements."""
    got = (extent.finite, extent.min, extent.max, extent.nonfinite)
    want = (summary.finite, summary.min, summary.max, summary.nonfinite)
    assert got == pytest.approx(want, rel=0, abs=0, nan_ok=True)
    if dtype not in (torch.float64, torch.complex128):  # their squares overflow
        assert extent.norm == pytest.approx(summary.norm, rel=1e-5)


def test_ten_thousand_tensors_have_the_digest_of_a_contiguous_copy_and_their_extent(numeric):
    rng = random.Random(0)
    torch.manual_seed(0)
    context = SimpleNamespace()
    for _ in range(10_000):
        tensor = random_tensor(rng)
        copied = tensor.resolve_conj().contiguous()
        digest = numeric.digest(None, tensor, None, None)
        assert digest.bits == xxhash.xxh3_64_intdigest(bytes_of(copied)), (tensor.dtype, tensor.shape, tensor.stride())
        if digest.extent is not None:
            assert_agree(digest.extent, numeric.summary(context, copied, None), tensor.dtype)


def test_large_tensors_have_their_extent_with_every_instruction_set(numeric):
    torch.manual_seed(0)
    calls = numeric.kernel._brief
    for dtype, (size, odd) in product(
        kernel.DTYPES, [(2048, ()), (6147, ()), (8200, (0, 2047, 5000)), (100_001, (100_000,))]
    ):
        tensor = (torch.randn(size) * 3 + 1).to(dtype)
        tensor[list(odd)] = torch.tensor([math.nan, math.inf, -math.inf][: len(odd)], dtype=dtype)
        tensor[3] = torch.finfo(dtype).tiny
        summary = numeric.summary(None, tensor, None)
        for level in range(numeric.kernel.level + 1):
            sums = kernel._Ends()
            calls.digest_extent(tensor.data_ptr(), size, kernel.DTYPES[dtype], level, ctypes.addressof(sums))
            assert_agree(Extent.of_sums(sums), summary, torch.float32)


def freed():
    tensor = torch.randn(5)
    tensor.untyped_storage().resize_(0)
    return tensor


def test_a_digest_changes_nothing_and_is_lost_where_there_are_no_elements(numeric, place):
    tensor = torch.randn(33, 17, requires_grad=True) * 2
    before = tensor._version, tensor.detach().clone()
    seen = []
    numeric.digest(None, tensor, lambda digest: seen.append(digest.extent.finite), None)
    for missing in (torch.randn(3, 3).to_sparse(), torch.empty(3, device="meta"), freed()):
        assert numeric.digest(None, missing, seen.append, lambda: seen.append("lost")) is None
    numeric.later.end_step()
    assert sorted(seen, key=str) == [33 * 17, "lost", "lost", "lost"]
    assert tensor._version == before[0]
    assert torch.equal(tensor, before[1])


@pytest.fixture(params=["host", "device"])
def place(request, monkeypatch):
    """Where tensors seem to be."""
    if request.param == "device":
        monkeypatch.setattr(statistics, "on_host", lambda _tensor: False)
    return request.param


def test_two_tensors_that_differ_in_one_bit_never_have_one_digest(numeric):
    calls, level = numeric.kernel._brief, numeric.kernel.level
    data = torch.zeros(4096, dtype=torch.uint8)
    seen = {calls.digest(data.data_ptr(), 4096, level)}
    for bit in range(0, 4096 * 8, 3):
        data[bit // 8] = 1 << bit % 8
        seen.add(calls.digest(data.data_ptr(), 4096, level))
        data[bit // 8] = 0
    assert len(seen) == 1 + len(range(0, 4096 * 8, 3))


def mixed(x):
    for factor in (0xD6E8FEB86659FD93, 0xD6E8FEB86659FD93, 1):
        x = (x ^ (x >> 32)) * factor % 2**64
    return x


def mix64(data):
    """The definition of mix64, in Python's integers."""
    words = [int.from_bytes(data[at : at + 8], "little") for at in range(0, len(data), 8)]
    terms = (mixed((word + 0x9E3779B97F4A7C15 * at) % 2**64) for at, word in enumerate(words, 1))
    return mixed((0x9E3779B97F4A7C15 * len(data) + sum(terms)) % 2**64)


@pytest.mark.parametrize("chunk", [device_digest.CHUNK, 64])
def test_on_a_device_each_tensor_has_the_digest_of_a_contiguous_copy_and_its_extent_a_step_later(
    numeric, monkeypatch, chunk
):
    monkeypatch.setattr(device_digest, "CHUNK", chunk)
    rng = random.Random(0)
    torch.manual_seed(0)
    expected = [(torch.arange(size, dtype=torch.uint8), None) for size in (0, 1, 7, 8, 9, 63, 64, 65)]
    found = []
    for _ in range(1000):
        tensor = random_tensor(rng)
        expected.append((tensor, numeric.digest(None, tensor, None, None).extent))
    monkeypatch.setattr(statistics, "on_host", lambda _tensor: False)
    for tensor, _ in expected:
        assert numeric.digest(None, tensor, found.append, lambda: found.append(None)) is None
    assert found == []
    numeric.later.end_step()
    for (tensor, extent), digest in zip(expected, found, strict=True):
        assert digest.algorithm == "mix64"
        assert digest.bits == mix64(bytes_of(tensor.resolve_conj().contiguous())), (tensor.dtype, tensor.shape)
        assert (digest.extent is None) == (extent is None)
        if extent is not None:
            is_wide = tensor.dtype in (torch.float64, torch.complex128)  # their squares overflow
            got, want = (one._replace(norm=0.0 if is_wide else one.norm) for one in (digest.extent, extent))
            assert got == pytest.approx(want, rel=1e-5, nan_ok=True)


def of_device(tensor):
    size = tensor.numel() * tensor.element_size()
    return device_digest.digest_of_parts(device_digest.digest_parts(tensor).tolist(), size)


def changed(tensor):
    """Yield copies of [n] float32 that differ where sums and checksums often do not notice it."""
    bits, half = tensor.view(torch.int32), len(tensor) // 2
    for at in range(64):
        yield bits ^ (torch.arange(len(bits)) == at).int()  # one ulp
    for pair in combinations(range(40), 2):
        flipped = bits.clone()
        flipped[list(pair)] ^= -(2**31)  # both signs
        yield flipped
        swapped = bits.clone()
        swapped[list(pair)] = bits[list(reversed(pair))]
        yield swapped
    yield torch.cat([bits[half:], bits[:half]])
    yield bits.flip(0)
    yield bits.roll(1)
    yield bits[:-1]
    yield torch.cat([bits, bits[:1] * 0])
    yield bits.neg()
    for _ in range(200):
        yield bits[torch.randperm(len(bits))]


@pytest.mark.parametrize("make", [torch.randn, torch.ones, torch.arange], ids=["random", "constant", "ascending"])
def test_changes_that_sums_do_not_notice_change_the_digest_on_a_device(make):
    torch.manual_seed(0)
    tensor = make(1000).float()
    other = {tuple(one.tolist()) for one in changed(tensor)} - {tuple(tensor.view(torch.int32).tolist())}
    digests = {of_device(torch.tensor(one, dtype=torch.int32)) for one in other}
    assert of_device(tensor) not in digests
    assert len(digests) == len(other)
