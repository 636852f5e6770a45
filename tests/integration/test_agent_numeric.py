"""The numbers of a tensor: the kernel's, those of torch's operations, and the float64 definitions, all the same."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import math
import os
import threading
from pathlib import Path

import pytest
import torch
import xxhash
from torch import nn

from hookd import Plugin, Summary, hookimpl, parameters_of
from hookd.target.boot import bootstrap
from hookd.target.entry import c_entry
from hookd.target.tensors import kernel, layout, statistics
from tests.support.agent import running
from tests.support.native import build

NAN, INF = math.nan, math.inf
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
SIZES = (1, 2, 33, 100, 2047, 2048, 2049, 9001)
LARGE = {torch.float32: 1e38, torch.bfloat16: 1e38, torch.float16: 2e4, torch.float64: 1e150}


def sprinkled(x):
    x[torch.rand(len(x)) < 0.3] = NAN
    x[torch.rand(len(x)) < 0.2] = INF
    x[torch.rand(len(x)) < 0.2] = -INF
    return x


KINDS = {
    "normal": lambda x, dtype: x,
    "mean 1000, std 1": lambda x, dtype: x + 1000,
    "constant": lambda x, dtype: torch.full_like(x, 0.1),
    "relu": lambda x, dtype: x.relu(),
    "with NaN and infinities": lambda x, dtype: sprinkled(x),
    "nothing finite": lambda x, dtype: x * INF,
    "small": lambda x, dtype: x * 1e-6,
    "very small": lambda x, dtype: x * 1e-22,
    "tiny": lambda x, dtype: x * 1e-30,
    "huge": lambda x, dtype: x * LARGE[dtype],
    "drifting": lambda x, dtype: torch.arange(len(x)).clamp(max=60000),
    "one far off": lambda x, dtype: x + 1e4 * (torch.arange(len(x)) == 0),
    "a jump": lambda x, dtype: x + 1000 * (torch.arange(len(x)) >= 2048),
    "minus zero": lambda x, dtype: -0.0 * torch.ones_like(x),
}
VIEWS = {
    "transposed": lambda: torch.randn(300, 200).t(),
    "permuted": lambda: torch.randn(3, 4, 5, 6, 7).permute(4, 1, 0, 3, 2),
    "channels last": lambda: torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last),
    "every other": lambda: torch.randn(50, 60, 70)[::2, 3:, ::3],
    "one column": lambda: torch.randn(40, 50)[:, 0],
    "permuted with gaps": lambda: torch.randn(3, 4, 5, 6, 7).permute(4, 1, 0, 3, 2)[1::2],
    "expanded": lambda: torch.randn(9).expand(5, 9),
    "a scalar": lambda: torch.tensor(3.0),
    "of many dimensions": lambda: torch.randn([1] * 20 + [2] * 10)[..., ::2],
}


TENSORS = {
    "normal": lambda: torch.randn(1000),
    "one element": lambda: torch.tensor([3.0]),
    "a scalar": lambda: torch.tensor(3.0),
    "constant": lambda: torch.full((100,), 0.1),
    "relu": lambda: torch.randn(50, 40).relu(),
    "mean 1000, std 1": lambda: torch.randn(200_000) + 1000,
    "mean 1e4, std 0.01": lambda: torch.randn(200_000, dtype=torch.float64) * 0.01 + 1e4,
    "several chunks": lambda: torch.randn(3 * statistics.CHUNK + 17),
    "drifting": lambda: torch.arange(4 * statistics.CHUNK, dtype=torch.float32),
    "huge": lambda: torch.randn(1000) * 1e30,
    "tiny": lambda: torch.randn(1000) * 1e-30,
    "bfloat16": lambda: (torch.randn(100_000) + 3).to(torch.bfloat16),
    "float16": lambda: (torch.randn(100_000) * 100).to(torch.half),
    "transposed": lambda: torch.randn(100, 200).t(),
    "permuted": lambda: torch.randn(4, 5, 6, 7).permute(2, 0, 3, 1),
    "channels last": lambda: torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last),
    "with gaps": lambda: torch.randn(100, 10)[:, ::3],
    "expanded": lambda: torch.randn(10, 1).expand(10, 20),
}


@pytest.fixture(scope="session")
def image(tmp_path_factory):
    """Return the kernel as this source makes it."""
    return build(tmp_path_factory.mktemp("kernel")).read_bytes()


@pytest.fixture(params=["plain", "AVX2", "AVX-512", "torch", "device"])
def sums(request):
    """Yield each way to the [9] sums: the kernel by each set of instructions, and torch's operations."""
    if request.param == "torch":
        yield statistics.host_sums
    elif request.param == "device":
        yield lambda tensor: statistics.device_sums(tensor).tolist()
    else:
        level = ["plain", "AVX2", "AVX-512"].index(request.param)
        with at_level(request.getfixturevalue("image"), level) as made:
            yield made.sums


@contextlib.contextmanager
def at_level(image, level):
    """Yield the kernel with a set of instructions; one that is not given back would be found by its name again."""
    with contextlib.closing(kernel.load_image(image)) as made:
        if level > made.level:
            pytest.skip("this processor has no such instructions")
        yield kernel.Kernel(made.library, level)


def definitions(tensor):
    """Return what each field is by definition, in float64."""
    x = tensor.double().flatten()
    finite = x[x.isfinite()]
    none = not finite.numel()
    return Summary(
        x.numel(),
        NAN if none else finite.mean().item(),
        NAN if none else finite.std(correction=0).item(),
        NAN if none else finite.min().item(),
        NAN if none else finite.max().item(),
        NAN if none else finite.abs().max().item(),
        finite.norm().item(),
        int((x == 0).sum()),
        int(x.isnan().sum()),
        int(x.isinf().sum()),
        int((x == -INF).sum()),
    )


def assert_right(got: Summary, tensor: torch.Tensor) -> None:
    want = definitions(tensor)
    for name in ("count", "min", "max", "absmax", "zeros", "nans", "infs", "negative_infs"):
        assert getattr(got, name) == pytest.approx(getattr(want, name), rel=0, abs=0, nan_ok=True), name
    # A mean near 0 of numbers that are not is known as well as the numbers are.
    slack = 0 if math.isnan(want.std) else 2e-7 * want.absmax
    assert got.mean == pytest.approx(want.mean, rel=1e-5, abs=slack, nan_ok=True)
    assert got.std == pytest.approx(want.std, rel=1e-4, abs=slack, nan_ok=True)
    assert got.norm == pytest.approx(want.norm, rel=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_the_sums_are_those_of_float64(sums, kind, dtype):
    for size in SIZES:
        torch.manual_seed(size)
        tensor = KINDS[kind](torch.randn(size, dtype=torch.float64), dtype).to(dtype)
        assert_right(Summary.of_sums(sums(tensor)), tensor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("view", VIEWS)
def test_any_layout_in_memory_gives_the_same(sums, view, dtype):
    torch.manual_seed(0)
    like = VIEWS[view]()
    tensor = like.to(dtype)
    if 0 not in like.stride():
        tensor = torch.empty_strided(like.shape, like.stride(), dtype=dtype).copy_(like)
    assert_right(Summary.of_sums(sums(tensor)), tensor)


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_as_modules_put_them_out(sums, name):
    torch.manual_seed(0)
    tensor = TENSORS[name]()
    copy = tensor.clone()
    assert_right(Summary.of_sums(sums(tensor)), tensor)
    assert torch.equal(tensor, copy)


@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_gate_lets_only_finite_numbers_pass_and_knows_masks(image, dtype, level):
    with at_level(image, level) as made:
        check_gate(made.gate, dtype)


def check_gate(gate, dtype):
    largest = torch.finfo(dtype).max
    for size in SIZES:
        for at in {0, size // 2, size - 1}:
            for value, want in ((largest, 0), (-largest, 0), (-0.0, 0), (-INF, 1), (INF, 2), (NAN, 2), (-NAN, 2)):
                tensor = torch.full((size,), 1.0, dtype=dtype)
                tensor[at] = value
                assert gate(tensor) == want, (size, at, value)
                assert gate(torch.stack([tensor, tensor], 1)[:, 0]) == want, "with gaps"
        masked = torch.full((size + 3000,), -INF, dtype=dtype)
        masked[-1] = NAN
        assert (gate(masked[:-1]), gate(masked)) == (1, 2)


def fp8(x):
    if not hasattr(torch, "float8_e4m3fn"):
        pytest.skip("this torch has no float8")
    return x.to(torch.float8_e4m3fn)


class Subclass(torch.Tensor):
    pass


# What a kind of tensor has as numbers, by a way that is not the code's own; None: none.
KINDS_OF_TENSORS = {
    "a parameter": lambda x: (nn.Parameter(x), x),
    "one with a graph": lambda x: (nn.Parameter(x) * 2, 2 * x),
    "float8": lambda x: (fp8(x), fp8(x).float()),
    "complex": lambda x: (torch.complex(x, 2 * x), torch.cat([x, 2 * x])),
    "conjugated": lambda x: (torch.complex(x, 2 * x).conj(), torch.cat([x, -2 * x])),
    "negated by a view": lambda x: (torch.complex(x, 2 * x).conj().imag, -2 * x),
    "sparse COO": lambda x: (x.relu().to_sparse(), x[x > 0]),
    "sparse CSR": lambda x: (x.relu().reshape(10, -1).to_sparse_csr(), x[x > 0]),
    "a subclass": lambda x: (x.as_subclass(Subclass), x),
    "nested": lambda x: (torch.nested.nested_tensor([x[:30], x[30:]]), x),
    "jagged": lambda x: (torch.nested.nested_tensor([x[:30], x[30:]], layout=torch.jagged), x),
    "integers": lambda x: (x.long(), None),
    "booleans": lambda x: (x > 0, None),
    "empty": lambda x: (x[:0], None),
    "meta": lambda x: (x.to("meta"), None),
    "quantized": lambda x: (torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), None),
}


@pytest.mark.filterwarnings("ignore:.*")  # nested, sparse and quantized tensors warn of being beta, or going away
@pytest.mark.parametrize("with_kernel", [True, False], ids=["kernel", "torch"])
@pytest.mark.parametrize("name", KINDS_OF_TENSORS)
def test_every_kind_of_tensor_is_decided_in_one_place(name, with_kernel, image):
    torch.manual_seed(0)
    numbers = statistics.Numeric(lambda *_: None)
    numbers.close()
    numbers.kernel = kernel.load_image(image) if with_kernel else None
    with torch.no_grad():
        tensor, want = KINDS_OF_TENSORS[name](torch.randn(100))
        got = numbers.summary(None, tensor, None)
        assert numbers.is_finite(tensor, masks=False) is True
    if want is None:
        assert got is None
    else:
        assert_right(got, want.detach())
    numbers.close()


@pytest.mark.parametrize("with_kernel", [True, False], ids=["kernel", "torch"])
@pytest.mark.parametrize("value", [1.0, NAN, INF, -INF])
def test_both_gates_say_the_same(value, with_kernel, image):
    numbers = statistics.Numeric(lambda *_: None)
    numbers.close()
    numbers.kernel = kernel.load_image(image) if with_kernel else None
    tensor = torch.tensor([0.0, value])
    assert numbers.is_finite(tensor, masks=False) is math.isfinite(value)
    assert numbers.is_finite(tensor, masks=True) is (math.isfinite(value) or value == -INF)
    numbers.close()


@pytest.mark.parametrize("kind", ["normal", "with NaN and infinities", "nothing finite", "drifting", "a jump"])
def test_a_large_tensor_is_taken_in_parts_on_a_device(kind, monkeypatch):
    monkeypatch.setattr(statistics, "DEVICE_CHUNK", 1000)
    torch.manual_seed(0)
    tensor = KINDS[kind](torch.randn(7777, dtype=torch.float64), torch.float32).float()
    assert_right(Summary.of_sums(statistics.device_sums(tensor).tolist()), tensor)


# -- as plugins see it


SEEN: list[object] = []


class Looks(Plugin):
    name = "looks"

    @hookimpl
    def configure(self, context):
        SEEN.clear()
        self.context = context

    @hookimpl
    def forward(self, output):
        returned = self.context.summary(output, lambda summary: SEEN.append(("summary", summary)))
        SEEN.append(("returned", returned))
        finite = self.context.is_finite(output)
        if isinstance(finite, torch.Tensor):
            self.context.later([finite, output.sum()], lambda numbers: SEEN.append(("later", numbers)))
        else:
            SEEN.append(("finite", finite))

    @hookimpl
    def step_post(self):
        SEEN.append("step")


def one_step():
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    out = model(torch.ones(2, 3))
    out.sum().backward()
    optimizer.step()
    return out.detach()


def test_a_plugin_gets_the_summary_of_a_host_tensor_at_once():
    with running(Looks):
        out = one_step()
    (_, summary), returned, finite, step = SEEN
    assert returned == ("returned", summary)
    assert finite == ("finite", True)
    assert step == "step"
    assert_right(summary, out)


def test_what_is_on_a_device_comes_after_the_step_and_nothing_was_read_before(monkeypatch):
    monkeypatch.setattr(statistics, "on_host", lambda _tensor: False)
    monkeypatch.setattr(statistics, "LOOKS_IN_C", False)
    with running(Looks):
        out = one_step()
    returned, step, (_, summary), (_, (finite, total)) = SEEN
    assert returned == ("returned", None)
    assert step == "step"
    assert_right(summary, out)
    assert finite == 1.0
    assert total == pytest.approx(out.sum().item())


class Digests(Plugin):
    name = "digests"

    @hookimpl
    def configure(self, context):
        self.context = context
        SEEN.clear()

    @hookimpl
    def forward(self, module, inputs, output):
        SEEN.extend(map(self.context.digest, (*inputs, output, *parameters_of(module.torch()).values())))


def test_digests_of_plain_tensors_and_parameters_are_computed_by_the_entry(monkeypatch):
    model, given = nn.Linear(300, 3), torch.randn(2, 300)
    with running(Digests):
        monkeypatch.setattr(bootstrap._agent.parts.host.numeric.kernel, "digest", None)
        read = (given, model(given), model.weight, model.bias)
    assert [found.bits for found in SEEN] == [
        xxhash.xxh3_64_intdigest(ctypes.string_at(one.data_ptr(), 4 * one.numel())) for one in read
    ]
    assert [found.extent.max for found in SEEN] == [one.max().item() for one in read]


class Breaks(Plugin):
    name = "breaks"

    @hookimpl
    def configure(self, context):
        self.context = context

    @hookimpl
    def forward(self, output):
        self.context.later([output.sum()], self.fail)

    def fail(self, numbers):
        raise ValueError(numbers)


def test_what_a_plugin_raises_when_numbers_arrive_is_its_own_error():
    with running(Breaks) as agent:
        one_step()
        assert agent.values("hookd_plugin_errors") == {("breaks",): 1.0}


def test_numbers_for_a_plugin_that_is_gone_are_dropped():
    with running(Looks) as agent:
        model = nn.Linear(3, 1)
        context = agent.parts.registry.named("looks").context
        context.later([torch.ones(1)], SEEN.append)
        agent.parts.loading.unload("looks")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    assert SEEN == []


def test_a_request_for_numbers_that_cannot_be_read_is_answered_in_turn():
    with running(Looks) as agent:
        context = agent.parts.registry.named("looks").context
        arrived, values = [], [torch.full((1,), float(at)) for at in range(4)]
        for at, value in enumerate(values):
            context.later([value], arrived.append, None if at == 2 else lambda: arrived.append("lost"))
        for value in values[1:3]:
            value.untyped_storage().resize_(0)
        one_step()
    assert arrived == [[0.0], "lost", [3.0]]


@pytest.mark.filterwarnings("error")
def test_of_complex_numbers_a_plugin_gets_the_real_part_and_the_training_no_warning():
    with running(Looks) as agent:
        arrived = []
        context = agent.parts.registry.named("looks").context
        context.later([torch.full((2,), 3 + 4j), torch.ones(1)], arrived.append)
        one_step()
    assert arrived == [[3.0, 3.0, 1.0]]


def test_what_a_plugin_asks_for_when_numbers_arrive_comes_after_all_that_was_asked_before():
    with running(Looks) as agent:
        context = agent.parts.registry.named("looks").context
        arrived = []

        def ask_more(numbers):
            arrived.append(numbers)
            for _ in range(1024):
                context.later([torch.zeros(1)], arrived.append)

        context.later([torch.ones(1)], ask_more)
        context.later([torch.full((1,), 2.0)], arrived.append)
        one_step()
    assert arrived == [[1.0], [2.0], *[[0.0]] * 1024]


def test_a_validation_collects_numbers_between_its_calls_once_many_wait(monkeypatch):
    monkeypatch.setattr(statistics, "LOOKS_IN_C", False)
    with running(Looks) as agent, torch.no_grad():
        with torch.enable_grad():
            one_step()
        context = agent.parts.registry.named("looks").context
        model, arrived = nn.Linear(3, 1), []
        context.later([torch.ones(1)], arrived.append)
        model(torch.ones(2, 3))
        assert not arrived, "only at the end of the step"
        context.later([torch.ones(1)] * 1024, arrived.append)
        model(torch.ones(2, 3))
        assert [len(numbers) for numbers in arrived] == [1, 1024]


def test_code_that_makes_no_steps_does_not_fill_the_memory():
    with running(Looks) as agent:
        context = agent.parts.registry.named("looks").context
        arrived = []
        for _ in range(2000):
            context.later([torch.ones(1)], arrived.append)
        assert len(arrived) == 1024


# -- from memory


def maps() -> int:
    return Path("/proc/self/maps").read_text().count("hookd-kernel")


def test_the_kernel_needs_no_library_and_leaves_no_mapping_and_no_descriptor(image):
    before, descriptors = maps(), set(os.listdir("/proc/self/fd"))
    made = kernel.load_image(image)
    assert maps() > before
    assert set(os.listdir("/proc/self/fd")) == descriptors
    made.close()
    assert maps() == before


def test_other_threads_run_while_the_kernel_does(image):
    """A long call would hold up a thread that only counts, if it kept the interpreter's lock."""
    made = kernel.load_image(image)
    tensor = torch.zeros(1).expand(1 << 28)  # memory of one element, read 2^28 times
    counted, ended = [], threading.Event()

    def work():
        made.sums(tensor)
        ended.set()

    thread = threading.Thread(target=work)
    thread.start()
    while not ended.is_set():
        counted.append(len(counted))
    thread.join()
    made.close()
    assert len(counted) > 1000


@pytest.mark.parametrize("image_of", [b"", b"no such thing", b"\x7fELF\x02\x01\x01" + bytes(100)])
def test_what_is_no_kernel_is_refused(image_of):
    with pytest.raises(OSError):
        kernel.load_image(image_of)


def test_where_memory_files_are_refused_torch_takes_over(monkeypatch):
    def refused(*_):
        raise PermissionError(errno.EACCES, "memfd_noexec")

    monkeypatch.setattr("posix.memfd_create", refused)
    numbers = statistics.Numeric(lambda *_: None)
    assert numbers.kernel is None
    tensor = torch.randn(100)
    assert_right(numbers.summary(None, tensor, None), tensor)


@pytest.mark.parametrize("kinds", ["one", "several"])
def test_of_tensors_on_a_device_the_largest_of_each_is_given(monkeypatch, kinds):
    """Here the host's memory is in the part of the device's."""
    monkeypatch.setattr(statistics, "on_host", lambda _tensor: False)
    made = statistics.Numeric(lambda *_: None)
    tensors = [torch.tensor([1.0, -3.0]), torch.tensor([math.nan, 1.0]), torch.tensor([[-math.inf]]), torch.zeros(5)]
    if kinds == "several":
        tensors += [torch.tensor([2.0], dtype=torch.float64), torch.tensor([1]), torch.empty(0)]
    found = {
        at: value for one in made.largest_each(tensors) for at, value in zip(one.at, one.value.tolist(), strict=True)
    }
    assert repr(found) == repr({0: 3.0, 1: math.nan, 2: math.inf, 3: 0.0, **({4: 2.0} if kinds == "several" else {})})
    assert [bool(one.isnan()) for one in made.largest(tensors)] == [True, False][: len(made.largest(tensors))]
    made.close()


def test_a_tensor_whose_memory_is_gone_is_not_asked_with_the_others(monkeypatch):
    monkeypatch.setattr(statistics, "on_host", lambda _tensor: False)
    made = statistics.Numeric(lambda *_: None)
    tensors = [torch.ones(3), torch.ones(4)]
    tensors[0].untyped_storage().resize_(0)
    (found,) = made.largest_each(tensors)
    assert (list(found.at), found.value.tolist()) == ([1], [1.0])
    made.close()


@pytest.mark.usefixtures("either_way")
def test_the_gradients_of_an_optimizer_are_looked_at_together_where_they_are_plain():
    parameters = [nn.Parameter(torch.ones(size)) for size in (3, 5, 1 << 20, 1 << 20, (1 << 21) + 1, 2)]
    optimizer = torch.optim.SGD([{"params": parameters[:1]}, {"params": parameters[1:]}], lr=0.1)
    with running(Looks) as agent:
        context, is_entered = (
            agent.parts.registry.named("looks").context,
            agent.parts.models.counting.hidden is not None,
        )

        def is_reported(value: float, **more: int) -> bool:
            found = context.largest_gradient(optimizer, **more)
            return str(found) == str(value) if is_entered else found is None

        assert is_reported(0.0)
        parameters[0].grad = torch.tensor([1.0, -7.0, 2.0])
        assert is_reported(7.0)
        for number, one in enumerate(parameters[2:], start=8):
            one.grad = torch.zeros_like(one)
            one.grad[-1] = number
            assert is_reported(float(number)), "so many that the lock is let go between them, or while one is read"
        for one in parameters[2:]:
            one.grad[0] = math.nan
            assert is_reported(math.nan)
            one.grad[0] = 0.0
        parameters[1].grad = torch.full((5,), math.nan)
        assert is_reported(math.nan)
        assert is_reported(math.nan, most_elements=5)
        assert is_reported(11.0, most_elements=4), "of 3 and of 2 elements"
        parameters[1].grad = torch.ones(5).to_sparse()
        assert context.largest_gradient(optimizer) is None
        optimizer.param_groups[0]["params"][0] = nn.Parameter(torch.ones(2, dtype=torch.float64))
        parameters[1].grad = None
        optimizer.param_groups[0]["params"][0].grad = torch.ones(2, dtype=torch.float64)
        assert context.largest_gradient(optimizer) is None, "of two types"


def test_where_torch_has_what_of_a_tensor_is_found_each_time_and_is_the_same():
    """Other bytes of a tensor look like those by chance, in one try of 200."""
    kept, places = [], set()
    for size in range(400):
        kept.append(torch.empty(size % 97))  # so that each try finds other memory
        found = layout.find(c_entry._DTYPES)
        assert found is not None
        places.add(
            tuple(getattr(found, name) for name, _ in found._fields_ if name not in ("dtypes", "owner", "nothing"))
        )
    assert len(places) == 1
