"""A bundle may come from anybody: whatever it contains, the answer is a result or an error, and none of its code runs."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import shutil
import struct
import subprocess
import sys

import pytest
from hookd_capture.bundle import tensorfile
from hookd_capture.bundle.replay import main
from hookd_capture.bundle.tensorfile import FormatError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.environment import tool_environment

MAKE = """
import sys, torch, hookd
from torch import nn
hookd.start([("capture", {"every": "1000", "directory": sys.argv[1]})])
model = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True, dropout=0.1, activation="gelu"))
model(torch.ones(2, 3, 8)).sum().backward()
torch.optim.SGD(model.parameters(), lr=0.1).step()
model[0].linear1.weight.data.fill_(3e38)
model(torch.ones(2, 3, 8))
hookd.stop()
"""


@pytest.fixture(scope="module")
def origin(tmp_path_factory):
    """A correct bundle, of a model with functions, flags and nested modules."""
    directory = tmp_path_factory.mktemp("bundles")
    subprocess.run([sys.executable, "-c", MAKE, directory], check=True, timeout=110, env=tool_environment())
    (bundle,) = directory.iterdir()
    return bundle


@pytest.fixture
def bundle(origin, tmp_path):
    return shutil.copytree(origin, tmp_path / "bundle")


def answer(bundle):
    """Return the answer of the process of a replay; an exception would show as a traceback."""
    request, answered = bundle.parent / "request", bundle.parent / "answer"
    request.write_text(json.dumps({"bundle": str(bundle), "allow": [], "source": None, "device": "cpu"}))
    main([str(request), str(answered)])
    return json.loads(answered.read_text())


def refused(bundle, *words):
    found = answer(bundle)
    assert found["exit_code"] == 2, found
    for word in words:
        assert word in found["error"]
    return found


def change(bundle, edit):
    path = bundle / "bundle.json"
    text = json.loads(path.read_text())
    edit(text)
    path.write_text(json.dumps(text))


def test_as_it_is_it_can_be_read(bundle):
    found = answer(bundle)
    assert found["is_reproduced"], found


# -- the file of tensors


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 100, -1, -100])
def test_a_file_that_is_cut_short(bundle, size):
    path = bundle / "tensors.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    refused(bundle, "tensors.safetensors")


def file_of(header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype="F32", shape=(1,), at=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(at)}


BROKEN = {
    "absurd length": file_of({}, length=1 << 62),
    "length of all": file_of({}, length=3),
    "no JSON": file_of(b"{nothing"),
    "no object": file_of([1]),
    "no text": file_of(b"\xff\xfe{}"),
    "nested": file_of(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "long number": file_of(b'{"a":' + b"9" * 10_000 + b"}"),
    "twice": file_of(b'{"a":%s,"a":%s}' % ((json.dumps(entry()).encode(),) * 2), b"1234"),
    "overlap": file_of({"a": entry(), "b": entry(at=(2, 6))}, b"123456"),
    "same place": file_of({"a": entry(), "b": entry()}, b"1234"),
    "gap": file_of({"a": entry(at=(4, 8))}, b"12345678"),
    "more": file_of({"a": entry()}, b"12345"),
    "less": file_of({"a": entry()}, b"123"),
    "backwards": file_of({"a": entry(at=(4, 0))}, b"1234"),
    "negative": file_of({"a": entry(at=(-4, 0))}, b"1234"),
    "negative shape": file_of({"a": entry(shape=(-1, -1))}, b"1234"),
    "true": file_of({"a": entry(shape=(True,))}, b"1234"),
    "float": file_of({"a": entry(shape=(1.0,))}, b"1234"),
    "wrong size": file_of({"a": entry(shape=(2,))}, b"1234"),
    "overflow": file_of({"a": entry(shape=(1 << 32, 1 << 32))}, b"1234"),
    "unknown type": file_of({"a": entry(dtype="PICKLE")}, b"1234"),
    "type of a list": file_of({"a": entry(dtype=["F32"])}, b"1234"),
    "no entry": file_of({"a": 3}),
    "no fields": file_of({"a": {}}),
    "three ends": file_of({"a": entry(at=(0, 4, 8))}, b"1234"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_breaks_the_format(name):
    with pytest.raises(FormatError):
        tensorfile.read(BROKEN[name])


@given(data=st.binary(max_size=200), at=st.integers(0, 400))
@settings(max_examples=300, deadline=None)
def test_bytes_of_any_kind_are_tensors_or_refused(data, at):
    whole = file_of({"a": entry(), "b": entry("BF16", (2, 3), (4, 16))}, bytes(16))
    changed = whole[: at % len(whole)] + data + whole[at % len(whole) + len(data) :]
    with contextlib.suppress(FormatError):
        assert all(one.numel() * one.element_size() <= len(changed) for one in tensorfile.read(changed).values())


# -- paths that are not files


def test_a_pipe_does_not_hang_it(bundle):
    (bundle / "bundle.json").unlink()
    os.mkfifo(bundle / "bundle.json")
    refused(bundle, "not a regular file")


def test_links_are_not_followed(bundle, tmp_path):
    (bundle / "tensors.safetensors").rename(tmp_path / "elsewhere")
    (bundle / "tensors.safetensors").symlink_to(tmp_path / "elsewhere")
    refused(bundle, "cannot be read")


def test_a_text_of_any_size_is_not_read(bundle):
    with (bundle / "bundle.json").open("r+b") as file:
        file.truncate(1 << 40)
    refused(bundle, "at most")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        '{"format": 3}',
        "[" * 200_000,
        '{"format": "hookd bundle", "version": 1}',
        '{"format": "hookd bundle", "version": 2}',
    ],
)
def test_a_text_that_is_none(bundle, text):
    (bundle / "bundle.json").write_text(text)
    refused(bundle, "bundle.json")


# -- content that would run code


@pytest.mark.parametrize(
    ("module", "qualname"),
    [
        ("os", "system"), ("torch.hub", "load"), ("torch.nn.modules.module", "torch.hub.load"), ("builtins", "eval"),
        ("torch.nn.functional", "relu"), ("torch.nn.modules.linear", "Tensor"), ("torch", "nn.Linear"),
        ("torch.nn..modules", "Linear"), ("torch.nn.modules.linear", ""), ("torch.nn.nothing", "Linear"),
        ("torch.jit", "ScriptModule"), ("torch.nn/../../evil", "Linear"), ("", ""), ("__main__", "Linear"),
    ],
)  # fmt: skip
def test_no_class_but_torch_nns_modules(bundle, module, qualname):
    change(bundle, lambda text: text["module"].update(module=module, qualname=qualname))
    assert refused(bundle)["reason"] == "import"


@pytest.mark.parametrize(
    "name",
    ["forward", "_call_impl", "__class__", "__dict__", "_forward_hooks", "training", "a b", "", "load_state_dict"],
)
def test_no_attribute_that_takes_the_place_of_torchs(bundle, name):
    change(bundle, lambda text: text["module"]["attributes"].update({name: 1}))
    refused(bundle, "attribute")


@pytest.mark.parametrize(
    "name",
    [
        "load",
        "os",
        "warnings",
        "importlib",
        "_verify_batch_size",
        "Callable",
        "torch",
        "handle_torch_function",
        "__import__",
        "Tensor",
    ],
)
def test_no_function_but_those_of_functional(bundle, name):
    change(bundle, lambda text: text["module"]["attributes"].update(activation={"$function": name}))
    refused(bundle, "function")


def test_names_of_a_tuple_are_not_made_code(bundle, tmp_path):
    evil = f"a, b=open({str(tmp_path / 'run')!r}, 'w')"
    change(bundle, lambda text: text["call"].update(inputs={"$tuple": [{"$named": {evil: 1}}]}))
    refused(bundle)
    assert not (tmp_path / "run").exists()


def test_a_module_that_contains_itself(bundle):
    change(bundle, lambda text: text["module"]["children"]["0"]["children"].update(self_attn={"$same": "module.0"}))
    assert "raised" in answer(bundle)
    change(bundle, lambda text: text["module"]["children"].update({"0": {"$same": "module"}}))
    assert answer(bundle)["raised"].startswith("RecursionError")


def test_strides_that_would_need_all_memory_are_not_kept(bundle):
    change(bundle, lambda text: text["tensors"]["inputs.0"].update(stride=[1 << 40, 1 << 20, 1]))
    assert "has another memory layout than in the training" in " ".join(answer(bundle)["notes"])


# -- anything else


def _places(text, path=()):
    yield path
    for key, one in text.items() if isinstance(text, dict) else enumerate(text) if isinstance(text, list) else ():
        yield from _places(one, (*path, key))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.just(10**30) | st.floats(-9, 9) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(["$tensor", "$tuple", "$dict", "$fields", "$named", "$float", "$dtype", "$device", "$size", "$slice",
                         "$ref", "$function", "$gone", "$other", "x"]), inner, max_size=2),
    max_leaves=4,
)  # fmt: skip


@given(data=st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.filterwarnings("ignore")
def test_a_text_with_anything_anywhere_gives_a_result_or_an_error(origin, tmp_path_factory, data):
    bundle = tmp_path_factory.mktemp("changed") / "bundle"
    bundle.mkdir()
    os.link(origin / "tensors.safetensors", bundle / "tensors.safetensors")
    text = copy.deepcopy(json.loads((origin / "bundle.json").read_text()))
    at = data.draw(st.sampled_from([path for path in _places(text) if path and path[0] != "incident"]))
    holder = text
    for key in at[:-1]:
        holder = holder[key]
    if data.draw(st.booleans()):
        holder[at[-1]] = data.draw(json_values)
    else:
        del holder[at[-1]]
    (bundle / "bundle.json").write_text(json.dumps(text))
    found = answer(bundle)
    assert found.get("exit_code") == 2 or "is_reproduced" in found
