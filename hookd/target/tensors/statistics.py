"""Statistics of tensors, and the tensors that have any.

In host memory the kernel computes them in one pass; without a kernel torch's operations do, with the same results. On a
device torch's operations compute them there, and nothing waits for them.
"""

from __future__ import annotations

import math
import operator
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hookd.api.digest import MIX64, Digest, Extent
from hookd.api.passive import of_tensor
from hookd.api.summary import Largest, Summary
from hookd.target.tensors import kernel
from hookd.target.tensors.deferred import Later
from hookd.target.tensors.device_digest import PARTS, digest_of_parts, digest_parts
from hookd.target.tensors.fused import Fused
from hookd.target.tensors.host_memory import PLAIN, STRIDED, is_readable, locate_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from hookd.api.context import Context

INF = math.inf
norms: Any = getattr(torch, "_foreach_norm", None)  # torch 1.13+
_kind = operator.attrgetter("layout", "dtype")
_kind_and_place = operator.attrgetter("layout", "dtype", "device")
_is_nested = operator.attrgetter("is_nested") if hasattr(Tensor, "is_nested") else (lambda _: False)
_dtype, _is_cpu = operator.attrgetter("dtype"), operator.attrgetter("is_cpu")
_has_names = getattr(Tensor, "has_names", None) or (lambda _: False)
KINDS = frozenset((STRIDED, dtype) for dtype in kernel.DTYPES)
_NoFunctions = getattr(torch._C, "DisableTorchFunctionSubclass", None) or torch._C.DisableTorchFunction
COMPRESSED = frozenset(getattr(torch, f"sparse_{name}", None) for name in ("csr", "csc", "bsr", "bsc"))
_AWAY = frozenset(("cuda", "xpu", "cpu"))
"""Devices whose tensors have a storage with an address; "cpu" is among them for tests that use host memory as a device."""
LOOKS_IN_C = True
"""Whether the entry may call the kernel on the outputs of calls; not in tests that simulate a device."""
CHUNK = 1 << 16
"""Elements reduced at a time: their differences from the mean stay in the processor's cache."""
DEVICE_CHUNK = 1 << 23
"""Elements reduced at a time on a device; this takes about 110 MB of temporary memory."""
SAFE = (1e-15, 1e15)
"""Range of magnitudes whose squares float32 can sum without underflow or overflow."""


class Numeric:
    """The arithmetic of `Context`; one object per agent.

    Attributes:
        kernel: the kernel; None: torch's operations take its place.
        later: numbers requested from a device.
        at_once: returns the largest magnitude in plain tensors of one type, or in the gradients of parameters, in those with at
            most so many elements: NaN if there is one, None for any other tensors.
        number_at_once: returns the only element of a plain tensor; None for any other tensor.
        digest_at_once: returns the digest of a plain tensor, followed by the [5] sums of `Extent.of_sums`; None for any other tensor.
    """

    def __init__(self, deliver: Callable[[Context, Callable[[list[float]], None], list[float]], None]) -> None:
        self.kernel = kernel.load()
        self.later = Later(deliver)
        self._fused = Fused()
        self.ask = self.later.ask  # of `Context.later`
        self.at_once: Callable[[list[Tensor], bool, int], float | None] = _not_at_once
        self.number_at_once: Callable[[Tensor], float | None] = _not_at_once
        self.digest_at_once: Callable[[Tensor], tuple[Any, ...] | None] = _not_at_once

    def summary(self, context: Context, tensor: Tensor, then: Callable[[Summary], None] | None) -> Summary | None:
        """Implement `Context.summary`."""
        numbers = tensor if self._is_common(tensor) else real(_whole(tensor))
        if numbers is None:
            return None
        if not on_host(numbers):
            if then is not None:
                act = then
                self.later.ask(context, [self._sums_there(context, numbers)], lambda sums: act(Summary.of_sums(sums)))
            return None
        made = self.kernel
        sums = host_sums(numbers) if made is None else made.sums(numbers)
        if sums is None:
            return None
        summary = Summary.of_sums(sums)
        if then is not None:
            then(summary)
        return summary

    def _sums_there(self, context: Context, numbers: Tensor) -> Tensor:
        """Return the [9] sums of `Summary.of_sums` on a device, by the kernel of Triton where it is wanted and works."""
        fused = self._fused.run(context, numbers, has_sums=True) if numbers.is_contiguous() else None
        return device_sums(numbers) if fused is None or fused[1] is None else _combined(fused[1])

    def digest(
        self,
        context: Context,
        tensor: Tensor,
        then: Callable[[Digest], None] | None,
        lost: Callable[[], None] | None,
    ) -> Digest | None:
        """Implement `Context.digest`."""
        if (at_once := self.digest_at_once(tensor)) is not None:
            digest = Digest(at_once[0], Extent.of_sums(at_once[1:]))
            if then is not None:
                then(digest)
            return digest
        plain = tensor if self._is_common(tensor) and not _is_nested(tensor) else _contiguous(tensor)
        if plain is not None and not on_host(plain):
            if then is not None:
                self._digest_later(context, plain, then, lost)
            return None
        made = self.kernel
        found = None if made is None or plain is None else made.digest(plain)
        if found is None:
            if lost is not None:
                lost()
            return None
        bits, sums = found
        digest = Digest(bits, None if sums is None else Extent.of_sums(sums))
        if then is not None:
            then(digest)
        return digest

    def _digest_later(
        self, context: Context, block: Tensor, then: Callable[[Digest], None], lost: Callable[[], None] | None
    ) -> None:
        """Request a digest of a contiguous tensor on a device."""
        size = block.numel() * block.element_size()
        has_sums = size > 0 and block.dtype in kernel.DTYPES
        try:
            fused = self._fused.run(context, block, has_sums=has_sums) if size else None
            if fused is not None:
                parts, rows = fused
                sums = None if rows is None else _extent_of(_combined(rows))
            else:
                parts, sums = digest_parts(block), device_extent(block) if has_sums else None
        except RuntimeError:  # the device's memory is full, or it lacks one of the operations
            if lost is not None:
                lost()
            return

        def arrive(numbers: list[float]) -> None:
            extent = Extent.of_sums(numbers[:-PARTS]) if has_sums else None
            then(Digest(digest_of_parts(numbers[-PARTS:], size), extent, MIX64))

        self.later.ask(context, [parts] if sums is None else [sums, parts], arrive, lost)

    def is_finite(self, tensor: Tensor, *, masks: bool) -> bool | Tensor:
        """Implement `Context.is_finite`."""
        if self.is_surely_finite(tensor):
            return True
        numbers = real(tensor)
        if numbers is None:
            return True
        made = self.kernel
        if made is not None and on_host(numbers):
            return made.gate(numbers) <= (kernel.MASKED if masks else kernel.FINITE)
        low, high = _ends(numbers)
        if on_host(numbers):
            return high.item() < INF and (low.item() > -INF or masks)
        return high < INF if masks else (high < INF) & (low > -INF)

    def is_surely_finite(self, tensor: Tensor) -> bool:
        """Whether the kernel finds all numbers finite; False if it does not take the tensor as it is."""
        if (at_once := self.at_once([tensor], False, sys.maxsize)) is not None:
            return at_once < INF
        return self._is_common(tensor) and self.kernel.is_finite(tensor)  # type: ignore[union-attr]  # see `_is_common`

    def extremes(self, tensor: Tensor) -> tuple[Tensor, Tensor] | None:
        """Implement `Context.extremes`."""
        numbers = real(tensor)
        return None if numbers is None else _ends(numbers)

    def largest(self, tensors: Iterable[Tensor]) -> list[float | Tensor]:
        """Implement `Context.largest`."""
        values = [one.value for one in self.largest_each(tensors)]
        return [value if isinstance(value, float) else value.max() for value in values]

    def largest_each(self, tensors: Iterable[Tensor]) -> list[Largest]:
        """Implement `Context.largest_each`."""
        tensors = list(tensors)
        if tensors and (at_once := self.at_once(tensors, False, sys.maxsize)) is not None:
            return [Largest(at_once, range(len(tensors)))]
        made = self.kernel
        if made is not None and _is_one_kind(tensors) and on_host(tensors[0]):
            of_all = made.largest(tensors)
            if of_all is not None:
                return [Largest(of_all, range(len(tensors)))]
        elif _is_one_kind_away(tensors):
            return [Largest(largest_ends(tensors), range(len(tensors)))]
        groups: dict[tuple[bool, Any], dict[int, Tensor]] = {}
        for at, tensor in enumerate(tensors):
            if self._is_common(tensor):
                groups.setdefault((True, tensor.dtype), {})[at] = tensor
            elif (found := real(tensor)) is not None:
                groups.setdefault((False, (found.device, found.dtype)), {})[at] = found
        host: list[float] = []
        places: list[int] = []
        away = []
        for (is_common, _), group in groups.items():
            of_group = list(group.values())
            if is_common and made is not None:
                most = _largest_there(made, of_group)
            else:
                ends = largest_ends(of_group)
                if not on_host(ends):
                    away.append(Largest(ends, list(group)))
                    continue
                most = ends.max().item()
            if most is not None:
                host.append(most)
                places += group
        return [Largest(_max(host), sorted(places)), *away] if host else away

    def is_readable(self, tensor: Tensor) -> bool:
        """Implement `Context.is_readable`."""
        return is_readable(tensor)

    def number(self, tensor: Tensor) -> float | None:
        """Implement `Context.number`."""
        if (at_once := self.number_at_once(tensor)) is not None:
            return at_once
        if not is_readable(tensor) or not on_host(tensor) or tensor.numel() != 1 or tensor.is_complex():
            return None
        return float(tensor.item())

    def _is_common(self, tensor: Tensor) -> bool:
        """Whether the kernel takes the tensor as it is, as it does nearly all; False without a kernel."""
        return (
            type(tensor) in PLAIN
            and on_host(tensor)
            and _kind(tensor) in KINDS
            and self.kernel is not None
            and tensor.is_contiguous()
        )

    def ask_again(self) -> None:
        """Stop using the entry's functions for tensors: the entry is about to be removed."""
        self.at_once = self.number_at_once = self.digest_at_once = _not_at_once

    def looks_in_c(self) -> bool:
        """Whether the entry may call the kernel."""
        return self.kernel is not None and LOOKS_IN_C

    def addresses(self) -> tuple[int | None, ...]:
        """Return the [4] addresses of `Kernel.addresses`, None where C must not call them, and the instruction set."""
        made = self.kernel
        return (*[None] * 4, 0) if made is None or not LOOKS_IN_C else (*made.addresses(), made.level)

    def close(self) -> None:
        """Release the kernel and all buffers; no thread may be inside."""
        self.later.clear()
        made, self.kernel = self.kernel, None
        if made is not None:
            made.close()


def _not_at_once(*_: object) -> None:
    """Stand in for the entry's functions while there is no entry."""


def _is_one_kind(tensors: list[Tensor]) -> bool:
    """Whether the kernel may take all of them at once, as nearly always."""
    # `map` and no loops: this runs no Python code per tensor.
    if not set(map(type, tensors)) <= PLAIN:
        return False
    dtypes = set(map(_dtype, tensors))
    if len(dtypes) != 1 or not dtypes <= kernel.DTYPES.keys() or not all(map(_is_cpu, tensors)):
        return False
    try:
        return all(map(Tensor.is_contiguous, tensors))
    except RuntimeError:  # a compressed layout; others that are not strided have no storage, see `locate_all`
        return False


def _is_one_kind_away(tensors: list[Tensor]) -> bool:
    """Whether torch's operations may take all of them at once, on one device other than the host."""
    if not tensors or not set(map(type, tensors)) <= PLAIN or any(map(on_host, tensors)):
        return False
    kinds = set(map(_kind_and_place, tensors))
    if len(kinds) != 1 or any(map(_is_nested, tensors)) or any(map(_has_names, tensors)):
        return False
    layout, dtype, device = kinds.pop()
    if (layout, dtype) not in KINDS or device.type not in _AWAY or any(map(Tensor.is_neg, tensors)):
        return False
    located = locate_all(tensors, tensors[0].element_size()) if all(map(Tensor.is_contiguous, tensors)) else None
    return located is not None and all(located[2])


def _largest_there(made: kernel.Kernel, tensors: list[Tensor]) -> float | None:
    """Return the largest magnitude in the tensors whose memory is there; None if there are none."""
    magnitude = made.largest(tensors)
    if magnitude is None:
        there = list(filter(is_readable, tensors))
        magnitude = made.largest(there) if there else None
    return magnitude


def on_host(tensor: Tensor) -> bool:
    """Whether the tensor is in host memory, so that reading a value does not wait for a device."""
    return tensor.is_cpu


def real(tensor: Tensor) -> Tensor | None:
    """Return the real floating-point numbers of any tensor, in a dtype that the kernel takes; a view where possible.

    For a sparse or nested tensor these are the stored values, for a distributed one this rank's part, for a complex one the
    real and imaginary parts.

    Returns:
        None if there are none: for integers, for empty, meta and quantized tensors, for those whose memory is not there, and
        for kinds that only their class understands.
    """
    if type(tensor) not in PLAIN or tensor.layout is not STRIDED or of_tensor(tensor, "is_nested"):
        stored = _stored(tensor)
        if stored is None:
            return None
        tensor = stored
    if not (tensor.is_floating_point() or tensor.is_complex()) or not is_readable(tensor):
        return None
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    elif tensor.dtype not in kernel.DTYPES:
        tensor = tensor.float()  # float8 has no reductions
    if _has_names(tensor):
        # Before torch 2.13, named tensors lack some operations; torch 2.13 has neither names nor this method.
        tensor = tensor.rename(None)  # type: ignore[attr-defined]
    return tensor.resolve_neg() if tensor.is_neg() else tensor


def _contiguous(tensor: Tensor) -> Tensor | None:
    """Return a tensor as one block of real numbers or others, a copy if it has gaps; None if its elements are not there."""
    plain = tensor if type(tensor) in PLAIN else _stored(tensor)
    if plain is None or plain.layout is not STRIDED or of_tensor(plain, "is_nested"):
        return None
    if plain.is_meta or (plain.numel() and not is_readable(plain)):
        return None
    try:
        plain = plain.detach().resolve_conj().resolve_neg().contiguous()
    except RuntimeError:  # there is no memory for a copy
        return None
    return torch.view_as_real(plain) if plain.is_complex() else plain


def _max(numbers: list[float]) -> float:
    """Return the largest number, or NaN if there is one."""
    return next(filter(math.isnan, numbers), max(numbers))


def largest_ends(tensors: list[Tensor]) -> Tensor:
    """Return the largest magnitude in each of [n] non-empty tensors of one device and dtype, by torch's operations."""
    if norms is None:
        ends = [torch.maximum(high, -low) for low, high in map(_ends, tensors)]
    else:
        ends = list(norms(tensors, INF))
    return torch.stack(ends)


def _ends(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return minimum and maximum: both are NaN if there is one, and unlike a sum they cannot overflow."""
    low, high = torch.aminmax(tensor if tensor.is_contiguous() else kernel.in_memory_order(tensor))
    return low, high


def _whole(tensor: Tensor) -> Tensor:
    """Return the tensor coalesced: an embedding's sparse gradient stores a row once per lookup."""
    if type(tensor) not in PLAIN or tensor.layout != torch.sparse_coo or tensor.is_coalesced():
        return tensor
    return tensor.detach().coalesce()


def _stored(tensor: Tensor) -> Tensor | None:
    """Return the strided tensor inside a tensor of another kind; None if there is none."""
    with _NoFunctions():  # no code of a class outside torch runs
        if type(tensor) not in PLAIN and not type(tensor).__module__.startswith("torch."):
            tensor = _as_plain(tensor)
        if getattr(tensor, "is_nested", False) or tensor.layout in COMPRESSED:
            try:
                tensor = tensor.values()
            except RuntimeError:  # a compressed one, inside a transform of torch.func
                return None
        if type(tensor) not in PLAIN:
            if hasattr(tensor, "to_local"):
                tensor = tensor.to_local()  # a DTensor: reducing it as a whole would talk to other ranks
            if type(tensor) not in PLAIN:
                if hasattr(type(tensor), "__tensor_flatten__"):
                    return None  # consists of other tensors, in a way that only its own class knows
                tensor = _as_plain(tensor)
        if tensor.layout == torch.sparse_coo:
            tensor = tensor._values()  # values() requires a coalesced tensor
    return tensor if tensor.layout is STRIDED else None


def _as_plain(tensor: Tensor) -> Tensor:
    """Return a subclass's tensor as a plain one, as torch stores it; a wrapper has no memory then."""
    with torch._C._DisableTorchDispatch():
        return tensor.as_subclass(Tensor)


# -- the kernel's work, by torch's operations


def host_sums(tensor: Tensor) -> list[float]:
    """Return the [9] sums of `Summary.of_sums` of a non-empty tensor in host memory."""
    flat = _flat(tensor)
    zeros = flat.numel() - int(flat.count_nonzero())
    low, high = (end.item() for end in torch.aminmax(flat))
    nans = infs = negative = 0
    if not (low > -INF and high < INF):  # false for NaN, too
        nans, infs, negative = (int(of.count_nonzero()) for of in (flat.isnan(), flat == INF, flat == -INF))
        flat = flat[flat.isfinite()]
        if not flat.numel():
            return [0, 0, 0, INF, -INF, zeros, nans, infs, negative]
        low, high = (end.item() for end in torch.aminmax(flat))
    mean, squares = (low, 0.0) if low == high else _moments(flat, max(-low, high))
    return [flat.numel(), mean, squares, low, high, zeros, nans, infs, negative]


def _flat(tensor: Tensor) -> Tensor:
    """Return all elements in one dimension, in any order; a copy only if the memory has gaps."""
    return (tensor if tensor.is_contiguous() else kernel.in_memory_order(tensor)).detach().reshape(-1)


def _moments(flat: Tensor, peak: float) -> tuple[float, float]:
    """Return the mean of finite elements, and the sum of their squared differences from it.

    Each chunk is reduced about its own mean, and the chunks are combined pairwise in float64: Chan, Golub, LeVeque,
    Updating Formulae and a Pairwise Algorithm for Computing Sample Variances, 1979, 2.1. `peak` is the largest magnitude.
    """
    wide = torch.float32 if flat.dtype != torch.float64 and SAFE[0] < peak < SAFE[1] else torch.float64
    n, mean, squares = 0, 0.0, 0.0
    for chunk in torch.split(flat, CHUNK):
        values, m = chunk.to(wide), chunk.numel()
        center = values.mean()
        deviation = values - center
        delta = center.item() - mean
        # Not `torch.dot`: the reference BLAS adds one number after the other, in float32.
        squares += deviation.square_().sum().item() + delta * delta * n * m / (n + m)
        mean += delta * m / (n + m)
        n += m
    return mean, squares


def device_sums(tensor: Tensor) -> Tensor:
    """Return the [9] sums of `Summary.of_sums` on the tensor's own device, without waiting for it.

    A large tensor is reduced in parts, so that the temporaries fit on a device that is nearly full.
    """
    return _combined(torch.stack([_part_sums(part) for part in torch.split(_flat(tensor), DEVICE_CHUNK)]))


def device_extent(tensor: Tensor) -> Tensor:
    """Return the [5] sums of `Extent.of_sums` on the tensor's own device, in the same way."""
    parts = [_part_extent(part) for part in torch.split(_flat(tensor), DEVICE_CHUNK)]
    if len(parts) == 1:
        return parts[0]
    finite, squares, low, high, odd = torch.stack(parts).unbind(1)
    return torch.stack([finite.sum(), squares.sum(), low.amin(), high.amax(), odd.sum()])


def _part_extent(flat: Tensor) -> Tensor:
    """Return these [5] sums of [n] elements, by as few operations as possible."""
    wide = flat if flat.dtype is torch.float64 else flat.float()
    long = torch.float32 if wide.device.type == "mps" else torch.float64  # Apple's GPUs have no float64
    is_odd = (wide * 0).ne(0)  # infinity * 0 is NaN, which equals nothing
    odd = is_odd.sum()
    # In float64 squares of float32 neither overflow nor underflow.
    norm = torch.linalg.vector_norm(wide.masked_fill(is_odd, 0.0), dtype=long)
    low, high = wide.masked_fill(is_odd, INF).amin(), wide.masked_fill(is_odd, -INF).amax()
    return torch.stack([one.to(long) for one in (wide.numel() - odd, norm * norm, low, high, odd)])


def _extent_of(sums: Tensor) -> Tensor:
    """Return the [5] sums of `Extent.of_sums`, given the [9] of `Summary.of_sums`."""
    squares = sums[2] + sums[0] * sums[1].square()
    return torch.stack([sums[0], squares, sums[3], sums[4], sums[6:].sum()])


def _combined(parts: Tensor) -> Tensor:
    """Return the [9] sums of a tensor, given the [n, 9] sums of its parts."""
    if len(parts) == 1:
        return parts[0]
    counts, means = parts[:, 0], parts[:, 1]
    count = counts.sum()
    mean = (counts * means).sum() / count.clamp(min=1)
    squares = parts[:, 2].sum() + (counts * (means - mean).square()).sum()
    ends = torch.stack([count, mean, squares, parts[:, 3].amin(), parts[:, 4].amax()])
    return torch.cat([ends, parts[:, 5:].sum(0)])


def _part_sums(flat: Tensor) -> Tensor:
    """Return these [9] sums of [n] elements.

    The elements are divided by a power of two near their largest magnitude, which is exact, so that squares neither overflow
    nor underflow.
    """
    wide = flat if flat.dtype is torch.float64 else flat.float()
    long = torch.float32 if wide.device.type == "mps" else torch.float64  # Apple's GPUs have no float64
    finite = wide.isfinite()
    count = finite.sum()
    low, high = torch.where(finite, wide, INF).amin(), torch.where(finite, wide, -INF).amax()
    peak = torch.maximum(high, -low)
    scale = torch.ldexp(torch.ones_like(peak), torch.frexp(torch.where(peak > 0, peak, 1.0)).exponent - 1)
    scaled = torch.where(finite, wide, 0.0) / scale
    divisor = count.clamp(min=1)
    mean = scaled.sum(dtype=long) / divisor
    squares = torch.where(finite, scaled - mean.to(wide.dtype), 0.0).square().sum(dtype=long)
    zeros, nans = wide.numel() - wide.count_nonzero(), wide.isnan().sum()
    infs, negative = (wide == INF).sum(), (wide == -INF).sum()
    width = scale.to(long)
    sums = (count, mean * width, squares * width * width, low, high, zeros, nans, infs, negative)
    return torch.stack([one.to(long) for one in sums])
