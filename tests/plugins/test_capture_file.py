"""The file of tensors of a bundle: bit for bit what safetensors reads, and never one that looks whole and is not."""

from __future__ import annotations

import json
import os
import signal
import sys

import pytest
import torch
from hookd_capture.bundle import tensorfile
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from tests.support.bundles import bits, replayed, text_of
from tests.support.environment import REPOSITORY, target_environment
from tests.support.processes import Process, wait_until

DTYPES = [
    getattr(torch, name)
    for name in (
        "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 bool complex64 complex128 complex32 uint16 uint32"
        " uint64 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu"
    ).split()
    if hasattr(torch, name)
]


class TestTheFile:
    @pytest.mark.filterwarnings("ignore:ComplexHalf support")
    @given(data=st.data())
    @settings(max_examples=60, deadline=None)
    def test_every_tensor_is_read_bit_for_bit_by_safetensors_and_by_us(self, tmp_path_factory, data):
        shapes = st.lists(st.integers(0, 4), max_size=4)
        wanted = data.draw(st.lists(st.tuples(st.sampled_from(DTYPES), shapes), max_size=6))
        made = {}
        for at, (dtype, shape) in enumerate(wanted):
            size = torch.empty(0, dtype=dtype).element_size() * torch.Size(shape).numel()
            raw = torch.randint(0, 2 if dtype is torch.bool else 256, (size,), dtype=torch.uint8)
            made[f"t.{at}"] = (raw.view(dtype) if size else torch.empty(0, dtype=dtype)).reshape(shape)
        path = tmp_path_factory.mktemp("file") / "tensors.safetensors"
        stored = {name: tensorfile.storable(one) for name, one in made.items()}
        with path.open("wb") as file:
            tensorfile.write(file, stored)
        theirs, ours = load_file(path), tensorfile.read(path.read_bytes())
        assert theirs.keys() == ours.keys() == made.keys()
        for name, one in made.items():
            for read in (theirs[name], ours[name]):
                assert read.dtype is stored[name].dtype
                assert read.shape == stored[name].shape
                assert bits(read) == bits(stored[name])
            back = tensorfile.restored(ours[name], one.dtype)
            assert (back.dtype, back.shape, bits(back)) == (one.dtype, one.shape, bits(one))

    def test_the_header_is_padded_and_tensors_are_aligned(self, tmp_path):
        tensors = {"a": torch.ones(3, dtype=torch.uint8), "b": torch.ones(2), "c": torch.ones(1, dtype=torch.float64)}
        with (tmp_path / "f").open("wb") as file:
            tensorfile.write(file, tensors)
        data = (tmp_path / "f").read_bytes()
        length = int.from_bytes(data[:8], "little")
        assert length % 8 == 0
        begins = {
            name: one["data_offsets"][0] for name, one in json.loads(data[8 : 8 + length]).items() if name in tensors
        }
        assert begins == {"c": 0, "b": 8, "a": 16}


WRITER = """
import sys, torch
from pathlib import Path
from hookd_capture.bundle.write import write
big = {f"t{n}": torch.zeros(8 << 20) for n in range(8)}
print("ready", flush=True)
for n in range(1000):
    write(Path(sys.argv[1]) / f"bundle{n}", {"format": "hookd bundle", "version": 1}, big)
"""


@pytest.mark.parametrize("attempt", [0, *(pytest.param(one, marks=pytest.mark.load) for one in (1, 2))])
def test_a_process_killed_while_it_writes_leaves_nothing_that_looks_whole(tmp_path, attempt):
    path = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "plugins")])
    command = [sys.executable, "-c", WRITER, tmp_path]
    with Process(command, env=target_environment(PYTHONPATH=path, OMP_NUM_THREADS="1")) as process:
        parts = wait_until(
            lambda: [p for p in tmp_path.glob(".*.part/tensors.safetensors") if p.stat().st_size > 1 << 20]
        )
        process.signal(signal.SIGKILL)
        process.wait()
    left = [one for one in tmp_path.iterdir() if not one.name.startswith(".")]
    for whole in left:
        assert len(tensorfile.read((whole / "tensors.safetensors").read_bytes())) == 8
        assert text_of(whole)["version"] == 1
    (part,) = tmp_path.glob(".*.part")
    assert part == parts[0].parent or left, "it was killed in the middle of a bundle"
    with pytest.raises(Exception, match="never finished"):
        replayed(part)
