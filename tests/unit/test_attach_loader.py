"""The loader that brings modules in from memory and takes them out again."""

from __future__ import annotations

import builtins
import gc
import inspect
import json
import linecache
import os
import sys
import threading
import traceback
import types
import weakref

import pytest

import hookd
from hookd.target.boot.loader import Loader
from hookd.target.boot.stub import codes, sleep

FILES = {
    "carried/__init__.py": b"from carried.part import value\n",
    "carried/part.py": b"value = 7\ndef fail():\n    raise ValueError('carried')\n",
    "single.py": b"import carried\nvalue = carried.value + 1\n",
}


@pytest.fixture
def loader():
    made = Loader(FILES, codes)
    yield made
    made.purge()


@pytest.fixture(autouse=True)
def _nothing_stays():
    before = dict(sys.modules), list(sys.meta_path), list(sys.path), dict(sys.path_importer_cache)
    yield
    assert list(sys.meta_path) == before[1]
    assert list(sys.path) == before[2]
    assert not {path for path in sys.path_importer_cache if "hookd-payload" in path}
    assert not {name for name in sys.modules if name.startswith("_hookd") and name not in before[0]}


def carried(files, *, gentle=False):
    """Make a loader of one module and of its imports; return the module `single` of it."""
    loader = Loader(files, codes, gentle=gentle)
    return loader, loader.module("single")


def test_modules_are_known_to_carried_code_alone(loader):
    single = loader.module("single")
    assert (single.value, single.__name__, single.__file__) == (8, "_hookd_single", "/hookd-payload/single.py")
    assert {name for name in sys.modules if "carried" in name} == {"_hookd_carried", "_hookd_carried.part"}
    assert loader.module("single") is single
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'carried'$"):
        __import__("carried")
    loader.purge()
    assert not {name for name in sys.modules if "carried" in name}


def test_modules_of_one_name_from_two_directories_are_two_and_import_themselves_by_it():
    package = {
        "__init__.py": b"import mine.part\nfrom mine.part import value\n",
        "part.py": b"import mine\nvalue = %d\n",
    }
    files = {
        f"mine@{tag}/{name}": text.replace(b"%d", str(at).encode())
        for at, tag in enumerate(("00000a", "00000b"))
        for name, text in package.items()
    }
    loader = Loader({**files, "mine.py": b"value = 2\n", "other.py": b"import mine\nvalue = mine.value\n"}, codes)
    assert [loader.module(name).value for name in ("mine@00000a", "mine@00000b", "mine", "other")] == [0, 1, 2, 2]
    assert loader.module("mine@00000b.part").mine is loader.module("mine@00000b")
    loader.purge()


def test_what_is_not_in_the_payload_is_not_sought_elsewhere(loader):
    for name in ("carried.absent", "hookd"):
        with pytest.raises(ModuleNotFoundError, match=f"{name}' in hookd's payload"):
            loader.module(name)


def test_modules_of_the_same_names_that_the_program_has_are_not_touched(monkeypatch):
    """Those of an installed hookd, of an installed plugin, and one that just has the name of a plugin's file."""
    theirs = {name: types.ModuleType(name) for name in ("hookd_mine", "hookd_mine.part", "single")}
    for name, module in theirs.items():
        monkeypatch.setitem(sys.modules, name, module)
    files = {
        "single.py": b"import hookd, hookd_mine.part as part\ndef late():\n    import hookd_mine\n    return hookd_mine\n",
        "hookd/__init__.py": b"__version__ = 'carried'\n",
        "hookd_mine/__init__.py": b"",
        "hookd_mine/part.py": b"value = 7\n",
    }
    loader, single = carried(files)
    try:
        assert (single.hookd.__version__, single.part.value) == ("carried", 7)
        assert single.late().part is single.part
        assert sys.modules["hookd"] is hookd
        assert all(sys.modules[name] is module for name, module in theirs.items())
    finally:
        loader.purge()
    assert all(sys.modules[name] is module for name, module in theirs.items())


FORMS = b"""
import carried
import carried.part
import carried.part as as_part
from carried import part as from_part, value
from carried import *
import os.path
import json as theirs
def late():
    from carried.later import value
    return value
"""


def test_every_form_of_import_finds_what_is_carried_and_leaves_the_others(monkeypatch):
    files = {
        **FILES, "single.py": FORMS, "carried/later.py": b"from . import part\nfrom .part import value as before\nvalue = part.value + before\n",
        "carried/__init__.py": b"__all__ = ['listed', 'value']\nfrom carried.part import value\n", "carried/listed.py": b"",
    }  # fmt: skip
    loader, single = carried(files)
    try:
        assert single.carried.part is single.as_part is single.from_part
        assert (single.value, single.listed.__name__) == (7, "_hookd_carried.listed")
        assert single.os is os
        assert single.theirs is json
        asked, plain = [], builtins.__import__
        monkeypatch.setattr(builtins, "__import__", lambda *given: asked.append(given[0]) or plain(*given))
        assert single.late() == 14
        assert asked == [], "what replaces `__import__` sees imports of the program's modules alone"
    finally:
        monkeypatch.undo()
        loader.purge()


def test_a_circular_import_finds_the_module_that_is_being_imported():
    files = {"single.py": b"import other\nvalue = other.late()\n",
             "other.py": b"import single\ndef late():\n    return single.__name__\n"}  # fmt: skip
    loader, single = carried(files)
    loader.purge()
    assert single.value == "_hookd_single"


def test_two_threads_import_a_module_once():
    slow = b"import sys\nsys.began.set()\nassert sys.goes_on.wait(60)\nmade = object()\n"
    loader = Loader({"slow.py": slow}, codes)
    sys.began, sys.goes_on = threading.Event(), threading.Event()
    found = []
    threads = [threading.Thread(target=lambda: found.append(loader.module("slow").made)) for _ in range(2)]
    try:
        threads[0].start()
        assert sys.began.wait(60)
        threads[1].start()
        sys.goes_on.set()
        for thread in threads:
            thread.join(60)
        assert found[0] is found[1]
    finally:
        del sys.began, sys.goes_on
        loader.purge()


def test_import_module_finds_what_lies_beside_it_by_its_relative_name():
    files = {**FILES, "single.py": b"import carried\n",
             "carried/__init__.py": b"import importlib\npart = importlib.import_module('.part', __package__)\n"}  # fmt: skip
    loader, single = carried(files)
    try:
        assert single.carried.part is loader.module("carried.part")
        assert single.carried.part.value == 7
    finally:
        loader.purge()


def test_what_looks_a_module_up_by_the_name_of_its_class_finds_it():
    text = b"""from __future__ import annotations
import dataclasses, pickle, typing
@dataclasses.dataclass
class Data:
    numbers: list[int]
    many: typing.ClassVar[int] = 3
class Named(typing.NamedTuple):
    data: Data
hints = typing.get_type_hints(Named)
again = pickle.loads(pickle.dumps(Data([1])))
"""
    loader, single = carried({"single.py": text})
    try:
        assert [field.name for field in single.dataclasses.fields(single.Data)] == ["numbers"]
        assert single.hints == {"data": single.Data}
        assert single.again == single.Data([1])
    finally:
        loader.purge()


def test_a_module_that_puts_an_object_in_its_place_leaves_with_it():
    lazy = b"import sys\nsys.modules[__name__] = {'a': 1}\n"
    loader, single = carried({"single.py": b"import lazy\n", "lazy.py": lazy})
    assert single.lazy == {"a": 1}
    loader.purge()


def test_a_module_that_fails_is_not_kept_and_may_be_imported_again():
    loader = Loader({"single.py": b"import sys\nif not hasattr(sys, 'later'):\n    raise ValueError('once')\n"}, codes)
    try:
        with pytest.raises(ValueError, match="once"):
            loader.module("single")
        assert "_hookd_single" not in sys.modules
        sys.later = True
        assert loader.module("single").__name__ == "_hookd_single"
    finally:
        del sys.later
        loader.purge()


def test_what_somebody_keeps_of_a_module_does_not_keep_the_payload():
    files = {"single.py": b"def kept():\n    return len('kept')\n"}
    loader, single = carried(files)
    kept, gone = single.kept, weakref.ref(loader)
    loader.purge()
    del loader, single
    gc.collect()
    assert gone() is None
    assert kept() == 4


def test_a_module_that_somebody_replaced_is_not_removed(loader):
    loader.module("single")
    replaced = sys.modules["_hookd_single"] = types.ModuleType("single")
    loader.purge()
    assert sys.modules.pop("_hookd_single") is replaced


def test_sources_can_be_added_later(loader):
    loader.add({"later.py": "value = 9\n"})
    assert loader.module("later").value == 9


IN_PIECES = b"""from __future__ import annotations
first: Absent = 1
\f\f\fdef line():
    raise ValueError(first)
\f\f\fdef late(argument: Absent): ...
"""


@pytest.mark.parametrize("gentle", [False, True])
def test_a_module_that_comes_in_pieces_is_as_if_it_came_whole(gentle):
    loader = Loader({"single.py": IN_PIECES}, codes, gentle=gentle)
    try:
        single = loader.module("single")
        with pytest.raises(ValueError, match="1") as caught:
            single.line()
        assert caught.traceback[-1].lineno + 1 == 4
        assert single.late.__annotations__ == {"argument": "Absent"}  # the first piece's __future__ holds
    finally:
        loader.purge()


def test_a_gentle_loader_leaves_the_interpreter_alone_for_longer_than_it_holds_it(monkeypatch):
    busy_s, rests = [0.0], []
    monkeypatch.setattr("hookd.target.boot.loader.time", types.SimpleNamespace(thread_time=lambda: busy_s[0]))
    monkeypatch.setattr("hookd.target.boot.loader._sleep", rests.append)
    monkeypatch.setitem(vars(builtins), "work", lambda seconds: busy_s.append(busy_s.pop() + seconds))
    pieces = b"\n\f\f\f".join([b"total = work(0.004)", b"total = work(0.002)", b"total = work(9)", b"total = 1"])
    loader = Loader({"single.py": pieces}, codes, gentle=True)
    try:
        assert loader.module("single").total == 1
        assert rests == pytest.approx([0.012, 0.006, 0.1, 0.001]), "three times as long, within bounds"
    finally:
        loader.purge()


@pytest.mark.parametrize("is_enabled", [True, False])
def test_a_gentle_loader_never_brings_about_a_collection_of_old_objects(is_enabled):
    pieces = b"\n\f\f\f".join([b"kept = [[] for _ in range(300)]", *[b"kept += [[] for _ in range(300)]"] * 60])
    loader = Loader({"single.py": pieces}, codes, gentle=True)
    generations = []
    gc.callbacks.append(lambda _phase, details: generations.append(details["generation"]))
    try:
        gc.collect()
        generations.clear()
        (gc.enable if is_enabled else gc.disable)()
        loader.module("single")
    finally:
        gc.enable()
        gc.callbacks.pop()
        loader.purge()
    assert set(generations) == ({0} if is_enabled else set())  # automatic ones would have been three of generation 1


def test_tracebacks_show_the_source_and_nothing_of_it_stays(loader):
    fail = loader.module("carried.part").fail
    try:
        fail()
    except ValueError:
        assert "raise ValueError('carried')" in traceback.format_exc()
    assert "raise ValueError" in inspect.getsource(fail)
    loader.purge()
    assert not [name for name in linecache.cache if "hookd-payload" in name]


def test_a_changed_source_is_imported_anew_and_an_unchanged_one_is_not(loader):
    single, fail = loader.module("single"), loader.module("carried.part").fail
    with loader.renewing({"carried/__init__.py": FILES["carried/__init__.py"], "carried/part.py": "value = 8\n"}):
        new = loader.module("carried")
        assert (new.value, hasattr(new.part, "fail")) == (8, False)
    with loader.renewing({"single.py": FILES["single.py"]}):
        assert loader.module("single") is single
        assert loader.module("carried") is new
    with pytest.raises(ValueError, match="carried"):
        fail()


def test_the_marks_of_a_payload_do_not_make_a_source_another():
    loader = Loader({"single.py": b"value = 1\n\f\f\fother = 2\n"}, codes)
    assert loader.get_source("single").splitlines() == ["value = 1", "other = 2"], "as linecache takes it apart"
    single = loader.module("single")
    with loader.renewing({"single.py": "value = 1\nother = 2\n"}):
        assert loader.module("single") is single
    loader.purge()


def test_a_file_that_the_new_source_has_no_more_cannot_be_imported(loader):
    with loader.renewing({"carried/__init__.py": "value = 9\n"}):
        assert loader.module("carried").value == 9
        with pytest.raises(ModuleNotFoundError):
            loader.module("carried.part")


@pytest.mark.parametrize("before", [False, True], ids=["not-imported-yet", "imported"])
def test_a_new_source_that_fails_leaves_the_old_one(loader, before):
    old = loader.module("carried") if before else None
    broken = {"carried/__init__.py": "from carried.part import value\n1 / 0\n", "carried/part.py": "value = 8\n"}
    with pytest.raises(ZeroDivisionError), loader.renewing(broken):
        loader.module("carried")
    now = loader.module("carried")
    assert now.value == 7
    assert not before or now is old
    assert sys.modules["_hookd_carried"] is now
    assert "_hookd_carried.part" in sys.modules


def test_a_module_that_comes_with_a_failure_is_forgotten(loader):
    with pytest.raises(ZeroDivisionError), loader.renewing({"fresh.py": "value = 1\n"}):
        loader.module("fresh").value / 0
    assert "_hookd_fresh" not in sys.modules
    with loader.renewing({"fresh.py": "value = 2\n"}):
        assert loader.module("fresh").value == 2, "the mended source"


def test_tracebacks_show_the_new_source(loader):
    with pytest.raises(ValueError):
        loader.module("carried.part").fail()
    linecache.getline("/hookd-payload/carried/part.py", 3)
    changed = {"carried/__init__.py": "", "carried/part.py": "def fail():\n    raise ValueError('new words')\n"}
    with loader.renewing(changed):
        fail = loader.module("carried.part").fail
    try:
        fail()
    except ValueError:
        assert "new words" in traceback.format_exc()


def test_a_wait_that_is_over_before_it_begins_ends():
    for _ in range(2000):
        sleep(1e-6)


@pytest.mark.skipif(sys.version_info < (3, 15), reason="lazy imports are new in CPython 3.15")
def test_carried_code_imports_at_once_where_the_program_makes_all_imports_lazy(loader):
    sys.set_lazy_imports("all")
    try:
        assert "part" in vars(loader.module("carried"))
    finally:
        sys.set_lazy_imports("normal")
