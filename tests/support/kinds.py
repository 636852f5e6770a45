"""Tensors of every kind that torch has, made at random and shown to the numeric kernel: it reads no memory that is not there.

    python -m tests.support.kinds [--tensors 1000000] [--seed N] [--sanitized]

Ends with the number of tensors of each kind, of those in which there were numbers to read, and of those that the entry has read
without asking them. What goes wrong ends the
process: a signal, or a report of the sanitizers (`--sanitized`: the kernel is compiled with AddressSanitizer and
UndefinedBehaviorSanitizer, and torch's memory comes from their allocator).
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import ctypes
import math
import os
import random
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hookd.target.boot import native
from hookd.target.entry import c_entry
from hookd.target.tensors import kernel, layout, torch_state
from hookd.target.tensors.statistics import Numeric
from tests.support import sanitizers

if TYPE_CHECKING:
    from collections.abc import Iterator

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.int64,
    torch.int8, torch.bool,
    *(getattr(torch, name) for name in ("float8_e4m3fn", "float8_e5m2") if hasattr(torch, name)),
]  # fmt: skip
FLOATS = DTYPES[:4]
COMMON = torch.float32
LARGE = 1 << 17
"""Elements of the largest: more than the kernel reads with the interpreter's lock kept."""

Kind = Any  # Callable[[random.Random], Tensor | contextlib.AbstractContextManager[Tensor]]
KINDS: dict[str, Kind] = {}


def kind(make: Kind) -> Kind:
    """Add a function that makes a tensor of a kind; the kind has its name."""
    KINDS[make.__name__] = make
    return make


# -- what all are made of


def shape(rng: random.Random, most: int = 4) -> list[int]:
    """Return a random shape; now and then an empty one, one without dimensions, or a large one."""
    if rng.random() < 0.002:
        return [rng.randrange(LARGE // 2, LARGE)]
    return [rng.choice((0, 1, 1, 2, 3, 5, 8, 17, 33)) if rng.random() < 0.9 else 64 for _ in range(rng.randrange(most))]


def numbers(rng: random.Random, sizes: list[int] | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Make a plain tensor whose memory is its own; some have a NaN or an infinity."""
    sizes = shape(rng) if sizes is None else sizes
    dtype = dtype or rng.choice(DTYPES)
    made = torch.full(sizes, rng.choice((0, 1, 2)), dtype=torch.float32)
    if made.numel() and rng.random() < 0.2:
        made.view(-1)[rng.randrange(made.numel())] = rng.choice((math.nan, math.inf, -math.inf))
        if not (dtype.is_floating_point or dtype.is_complex):
            made = made.isnan()
    return made.to(dtype)


def floats(rng: random.Random, sizes: list[int] | None = None) -> Tensor:
    return numbers(rng, sizes, rng.choice(FLOATS))


# -- tensors whose memory is there


@kind
def plain(rng: random.Random) -> Tensor:
    return numbers(rng)


@kind
def parameter(rng: random.Random) -> Tensor:
    return nn.Parameter(floats(rng))


@kind
def part(rng: random.Random) -> Tensor:
    found = floats(rng, [rng.randrange(1, 20), rng.randrange(1, 20)])
    rows, columns = (slice(rng.randrange(size), None, rng.randrange(1, 4)) for size in found.shape)
    return found[rows, columns] if rng.random() < 0.5 else found.t()[columns, rows]


@kind
def placed(rng: random.Random) -> Tensor:
    """Return a tensor with strides of any kind: overlapping, of 0, in any order."""
    base = floats(rng, [rng.randrange(1, 4096)])
    sizes, strides, room = [], [], base.numel() - 1
    for _ in range(rng.randrange(6)):
        stride = rng.randrange(room + 1)
        size = 1 + rng.randrange(min(8, room // stride if stride else 8) + 1)
        sizes.append(size)
        strides.append(stride)
        room -= (size - 1) * stride
    return base.as_strided(sizes, strides, rng.randrange(room + 1))


@kind
def expanded(rng: random.Random) -> Tensor:
    return floats(rng, [rng.randrange(1, 9), 1, 1]).expand(-1, rng.randrange(1, 9), rng.randrange(1, 9))


@kind
def many_dimensions(rng: random.Random) -> Tensor:
    return floats(rng, [1] * rng.randrange(20, 64)).transpose(0, rng.randrange(20))


@kind
def with_gradient(rng: random.Random) -> Tensor:
    return floats(rng).requires_grad_() * 1


@kind
def inference(rng: random.Random) -> Tensor:
    with torch.inference_mode():
        return numbers(rng)


@kind
def conjugate(rng: random.Random) -> Tensor:
    found = numbers(rng, dtype=rng.choice((torch.complex64, torch.complex128))).conj()
    return rng.choice((found, found.real, found.imag))  # an imaginary part of a conjugate has the negative bit


@kind
def misaligned(rng: random.Random) -> Tensor:
    dtype = rng.choice(DTYPES)
    memory = bytearray(dtype.itemsize * rng.randrange(1, 64) + 8)
    offset = rng.randrange(8)
    return torch.frombuffer(memory, dtype=dtype, offset=offset, count=(len(memory) - offset) // dtype.itemsize)


@kind
def named(rng: random.Random) -> Tensor:
    found: Any = floats(rng)
    if not found.dim() or not hasattr(found, "refine_names"):  # torch 2.13 has no named tensors
        return found
    return found.refine_names(*[f"d{n}" for n in range(found.dim())])


@kind
def shared(rng: random.Random) -> Tensor:
    return floats(rng, [rng.randrange(1, 99)]).share_memory_()


# -- those of other layouts


@kind
def sparse(rng: random.Random) -> Tensor:
    found = numbers(rng, [rng.randrange(1, 6), rng.randrange(1, 6)], rng.choice((torch.float32, torch.float64)))
    how = rng.choice(("sparse", "sparse_csr", "sparse_csc"))
    return getattr(found, f"to_{how}")()


@kind
def sparse_blocks(rng: random.Random) -> Tensor:
    found = numbers(rng, [4, 6], torch.float32)
    return found.to_sparse_bsr((2, 3)) if rng.random() < 0.5 else found.to_sparse_bsc((2, 3))


@kind
def quantized(rng: random.Random) -> Tensor:
    found = torch.nan_to_num(floats(rng, [rng.randrange(1, 9)]).float())
    return torch.quantize_per_tensor(found, 0.1, 0, rng.choice((torch.qint8, torch.quint8, torch.qint32)))


@kind
def mkldnn(rng: random.Random) -> Tensor:
    return floats(rng, [rng.randrange(1, 9), 4]).float().to_mkldnn()


@kind
def nested(rng: random.Random) -> Tensor:
    parts = [torch.ones(rng.randrange(1, 5), 3) for _ in range(rng.randrange(1, 4))]
    return torch.nested.nested_tensor(parts, layout=rng.choice((torch.strided, torch.jagged)))


# -- those without memory, and those that have lost theirs


@kind
def meta(rng: random.Random) -> Tensor:
    return numbers(rng).to("meta")


@kind
def fake(rng: random.Random) -> Tensor:
    return _fake_mode().from_tensor(floats(rng))


@kind
def zero(rng: random.Random) -> Tensor:
    return torch._efficientzerotensor(shape(rng), dtype=rng.choice(FLOATS))


@kind
def functional(rng: random.Random) -> Tensor:
    return torch._to_functional_tensor(floats(rng))


@kind
def uninitialized(rng: random.Random) -> Tensor:
    return nn.UninitializedParameter() if rng.random() < 0.5 else nn.UninitializedBuffer()


class Wrapper(Tensor):
    """A tensor without storage, the pattern of quantised and sharded parameters; no operation of it may run."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} ran")


@kind
def wrapper(rng: random.Random) -> Tensor:
    sizes = shape(rng)
    return Tensor._make_wrapper_subclass(Wrapper, sizes, dtype=rng.choice(DTYPES))  # type: ignore[attr-defined]


@kind
def as_parameter(rng: random.Random) -> Tensor:
    found = Tensor._make_wrapper_subclass(Wrapper, shape(rng), dtype=rng.choice(FLOATS))  # type: ignore[attr-defined]
    found.__class__ = type("Another", (Wrapper,), {})
    return found


class Subclass(Tensor):
    """Has a storage, and a function mode of its own that may not run."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} ran")


@kind
def subclass(rng: random.Random) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return floats(rng).as_subclass(Subclass)


@kind
def freed(rng: random.Random) -> Tensor:
    found = numbers(rng)
    view = found[rng.randrange(found.shape[0]) :] if found.dim() and found.shape[0] else found
    found.untyped_storage().resize_(0)
    return view


@kind
def cut(rng: random.Random) -> Tensor:
    found = numbers(rng, [rng.randrange(1, 2048)])
    begin = rng.randrange(len(found))
    view = found[begin : rng.randrange(begin, len(found)) + 1 : rng.randrange(1, 4)]
    storage = found.untyped_storage()
    storage.resize_(rng.randrange(storage.nbytes() + 1))
    return view


@kind
def freed_subclass(rng: random.Random) -> Tensor:
    found = freed(rng)
    with torch._C.DisableTorchFunctionSubclass():
        return found.as_subclass(Subclass)


@kind
@contextlib.contextmanager
def transformed(rng: random.Random) -> Iterator[Tensor]:
    """Inside vmap, grad or functionalize, where an address is nobody's to ask."""
    found, kept = floats(rng, [rng.randrange(1, 5), rng.randrange(1, 5)]).float(), []
    how: Any = rng.choice((torch.vmap, torch.func.functionalize, lambda f: torch.func.grad(lambda x: f(x).sum())))

    def keep(x: Tensor) -> Tensor:
        kept.append(x)
        look_at(x, rng)
        return x

    how(keep)(found)
    yield kept[0]  # and it is left behind


@kind
@contextlib.contextmanager
def mapped(rng: random.Random) -> Iterator[Tensor]:
    """Yield a tensor in a file; half of the files are truncated."""
    pages = rng.randrange(1, 5)
    with tempfile.TemporaryFile() as file:
        os.truncate(file.fileno(), 4096 * pages)
        path = f"/proc/self/fd/{file.fileno()}"
        found = torch.from_file(path, shared=rng.random() < 0.5, size=1024 * pages, dtype=torch.float32)
        if rng.random() < 0.5:
            os.truncate(file.fileno(), rng.randrange(4096 * pages))
        begin = rng.randrange(len(found))
        yield found[begin : begin + rng.randrange(len(found))]


_modes: list[Any] = []


def _fake_mode() -> Any:
    if not _modes:
        from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: PLC0415  # takes a second

        _modes.append(FakeTensorMode())
    return _modes[0]


# -- what is done with them

numeric = Numeric(lambda _context, then, values: then(values))
without = Numeric(lambda _context, then, values: then(values))
"""Without the kernel: torch's operations take its place."""
SEEN, MASKED, BAD, UNSEEN = range(4)
"""What entry.c says of the numbers of a tensor."""
_PLAIN = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
before: list[Tensor] = []
"""The tensors before this one, for what takes many at once; some have lost their memory since."""


@torch.no_grad()  # as the agent calls hooks
def look_at(tensor: Tensor, rng: random.Random) -> bool:
    """Hand a tensor to everything through which an address reaches C; returns whether it has numbers to be read."""
    has_memory = numeric.is_readable(tensor)
    for one in (without, numeric) if rng.random() < 0.2 else (numeric,):
        one.is_finite(tensor, masks=rng.random() < 0.5)
        summary = one.summary(None, tensor, None)  # type: ignore[arg-type]  # only for what lies on a device
        one.extremes(tensor)
        one.largest([tensor] if rng.random() < 0.5 else [tensor, *rng.sample(before, min(3, len(before)))])
    made = numeric.kernel
    if made is not None and type(tensor) in (Tensor, nn.Parameter) and tensor.is_cpu and tensor.dtype in kernel.DTYPES:
        directly(made, tensor)
    if summary is not None and has_memory and rng.random() < 0.1:
        assert_right(tensor, summary)
    return summary is not None


class Reader:
    """Reads tensors as entry.c does, without asking them.

    Args:
        image: of the entry.
        addresses: of a kernel's functions.
    """

    def __init__(self, image: bytes, addresses: tuple[int | None, ...]) -> None:
        library = native.load("hookd-entry", image, keeps_lock=True)
        found = layout.find(c_entry._DTYPES)
        assert found is not None, "nobody knows where torch has what of a tensor"
        gate, largest, _, digest, level = addresses
        host = c_entry._Host(
            tensor=torch.Tensor, parameter=nn.Parameter, gate=gate, largest=largest, digest=digest, level=level,
            modes=torch_state.function_modes, tracing=torch_state.tracing,
        )  # fmt: skip
        host.dtypes[:] = c_entry._DTYPES
        native.function(library, "hookd_entry_host", ctypes.c_void_p)(ctypes.addressof(host))
        native.function(library, "hookd_entry_layout", ctypes.c_void_p)(ctypes.addressof(found))
        there, place = ctypes.py_object, ctypes.c_void_p
        self._read = native.function(library, "hookd_entry_read", there, place)
        made = {one.__name__: one for one in native.objects(library, "hookd_entry_methods")}
        self._largest, self._number, self._digest = made["largest"], made["number"], made["digest"]
        self._library = library

    def read(self, tensor: Tensor) -> tuple[int, int, int] | None:
        """Return the version, the number of elements, and SEEN, MASKED, BAD or UNSEEN; None: it has to be asked."""
        into = (ctypes.c_int64 * 3)()
        return None if self._read(tensor, ctypes.addressof(into)) else (into[0], into[1], into[2])

    def largest(self, tensors: list[Tensor]) -> float | None:
        """Return the largest magnitude in them; None: they have to be asked."""
        found: float | None = self._largest(tensors, False, sys.maxsize)
        return found

    def gradient(self, parameters: list[nn.Parameter]) -> float | None:
        """Return the largest magnitude in their gradients, 0 if there are none; None: torch must be asked."""
        found: float | None = self._largest(parameters, True, sys.maxsize)
        return found

    def number(self, tensor: Tensor) -> float | None:
        """Return the only element of a tensor; None: it has to be asked, or has several."""
        found: float | None = self._number(tensor)
        return found

    def digest(self, tensor: Tensor) -> tuple[float, ...] | None:
        """Return its digest, and the sums of `Extent.of_sums`; None: it has to be asked."""
        found: tuple[float, ...] | None = self._digest(tensor)
        return found


def assert_read(reader: Reader, tensor: Tensor, name: str) -> bool:
    """Compare the values read from a tensor with its own answers; return whether it can be read."""
    with torch._C.DisableTorchFunctionSubclass():
        found, digest = reader.read(tensor), reader.digest(tensor)
        if digest is not None:
            bits, sums = numeric.kernel.digest(tensor.detach())
            assert digest == (bits, *sums), name
        if found is None:
            assert name not in ("plain", "with_gradient"), "these can be read"
            return False
        assert type(tensor) is Tensor, name
        assert tensor.device.type == "cpu", name
        assert tensor.layout is torch.strided, name
        assert not any((tensor.is_nested, tensor.is_neg(), tensor.is_inference())), name
        version, elements, numbers = found
        assert (version, elements) == (tensor._version, tensor.numel()), (name, found)
        if numbers != UNSEEN and tensor.dtype in _PLAIN and elements:
            is_good = bool((tensor.detach() < math.inf).all())
            assert (numbers <= MASKED) is is_good, (name, found)
            assert (numbers == SEEN) is bool(tensor.detach().isfinite().all()), (name, found)
            largest, true = reader.largest([tensor, tensor]), tensor.detach().abs().max().double()
            assert largest is not None, name
            assert (math.isnan(largest) and true.isnan()) or largest == true, (name, largest, true)
            having, without = nn.Parameter(torch.empty_like(tensor)), nn.Parameter(torch.empty(3))
            having.grad = tensor.detach()
            assert str(reader.gradient([without, having])) == str(largest), name
            number = reader.number(tensor)
            assert str(number) == (str(tensor.double().item()) if elements == 1 else "None"), (name, number)
            assert reader.digest(tensor) == reader.digest(nn.Parameter(tensor.detach())) is not None, name
        return numbers != UNSEEN


def directly(made: kernel.Kernel, tensor: Tensor) -> None:
    """Hand it to the kernel without what `Numeric` asks first of a tensor's kind."""
    if tensor.layout is not torch.strided or tensor.is_nested or not tensor.numel():
        return
    with contextlib.suppress(RuntimeError):  # transforms have no strides that could be asked
        made.sums(tensor)
        made.gate(tensor)
        if tensor.is_contiguous():
            made.is_finite(tensor)
            made.largest([tensor])


def assert_right(tensor: Tensor, summary: Any) -> None:
    """Compare the kernel's results with those of torch's operations."""
    found = tensor.detach()
    found = torch.view_as_real(found.resolve_conj()) if found.is_complex() else found
    found = found.to(torch.float64)
    found = found.rename(None) if hasattr(found, "rename") else found
    finite = found[found.isfinite()]
    assert summary.nans == int(found.isnan().sum()), (tensor, summary)
    assert summary.finite == finite.numel(), (tensor, summary)
    if finite.numel():
        assert (summary.min, summary.max) == (finite.min().item(), finite.max().item()), (tensor, summary)


def show(tensors: int, seed: int, reader: Reader) -> dict[str, list[int]]:
    """Make tensors of all kinds in turn, and look at each.

    Returns:
        How many there were of each, how many had numbers, and of how many entry.c has read them without asking.
    """
    rng = random.Random(seed)
    counts: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0, 0])
    kinds = list(KINDS.items())
    for n in range(tensors):
        name, make = kinds[n % len(kinds)]
        made = make(rng)
        with made if hasattr(made, "__enter__") else contextlib.nullcontext(made) as tensor:
            counts[name][0] += 1
            counts[name][1] += look_at(tensor, rng)
            counts[name][2] += assert_read(reader, tensor, name)
        if type(tensor) is Tensor and tensor.device.type == "cpu" and name not in ("transformed", "mapped", "named"):
            before.append(tensor)
            del before[:-50]
    return counts


# -- under the sanitizers


def under_sanitizers(arguments: list[str]) -> int:
    """Run this module again, with their runtime loaded first; return its exit status."""
    with tempfile.TemporaryDirectory() as directory:
        made, entry = (sanitizers.build(name, Path(directory)) for name in ("kernel", "entry"))
        command = [
            sys.executable,
            "-m",
            "tests.support.kinds",
            *arguments,
            "--kernel",
            str(made),
            "--entry",
            str(entry),
        ]
        return subprocess.run(command, env=sanitizers.preloaded(), check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tensors", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sanitized", action="store_true")
    parser.add_argument("--kernel", help="a shared object to be used instead")
    parser.add_argument("--entry", help="likewise")
    asked = parser.parse_args()
    if asked.sanitized:
        return under_sanitizers(["--tensors", str(asked.tensors), "--seed", str(asked.seed)])
    warnings.simplefilter("ignore")  # torch's own, of what is a prototype
    torch.set_num_threads(1)
    if asked.kernel:
        numeric.close()
        numeric.kernel = kernel.load_image(Path(asked.kernel).read_bytes())
    without.close()
    image = Path(asked.entry).read_bytes() if asked.entry else native.image_of("entry")
    counts = show(asked.tensors, asked.seed, Reader(image, numeric.addresses()))
    print(f"{'kind':18}{'tensors':>10}{'read':>10}{'unasked':>10}")
    for name, numbers in [*counts.items(), ("all", map(sum, zip(*counts.values(), strict=True)))]:
        print(f"{name:18}", *(f"{number:9}" for number in numbers))
    return 0


if __name__ == "__main__":
    sys.exit(main())
