"""The loader that brings modules in from memory and takes them out again."""

from __future__ import annotations

import gc
import inspect
import linecache
import sys
import time
import traceback
import types
from importlib.machinery import PathFinder

import pytest

from hookd.agent.arrival import codes
from hookd.agent.loader import Loader

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
    before = dict(sys.modules), list(sys.meta_path), list(sys.path)
    yield
    assert list(sys.meta_path) == before[1]
    assert list(sys.path) == before[2]
    assert not {name for name in sys.modules if name.partition(".")[0] in ("carried", "single")}


def test_modules_are_imported_from_the_payload_inside_only(loader):
    with pytest.raises(ModuleNotFoundError):
        __import__("carried")
    with loader.importing():
        import single
    assert single.value == 8
    assert single.__file__ == "/hookd-payload/single.py"
    loader.purge()
    with pytest.raises(ModuleNotFoundError):
        __import__("carried")


def test_what_is_not_in_the_payload_is_not_sought_elsewhere(loader):
    with loader.importing(), pytest.raises(ModuleNotFoundError, match="payload"):
        __import__("carried.absent")


def test_other_imports_are_not_touched(loader):
    with loader.importing():
        import json
    assert json.__spec__.loader is not loader


def test_modules_of_another_hookd_come_back(monkeypatch):
    loader = Loader({"hookd_carried/__init__.py": b"", "hookd_carried/part.py": b"value = 7\n"}, codes)
    theirs = {"hookd_carried": types.ModuleType("theirs"), "hookd_carried.theirs": types.ModuleType("theirs")}
    for name, module in theirs.items():
        monkeypatch.setitem(sys.modules, name, module)
    with loader.importing():
        import hookd_carried.part

        assert hookd_carried.part.value == 7
        assert "hookd_carried.theirs" not in sys.modules
    loader.purge()
    assert all(sys.modules[name] is module for name, module in theirs.items())


def test_a_plugin_whose_module_has_the_name_of_one_of_the_trainings_is_refused(loader, monkeypatch):
    theirs = types.ModuleType("single")
    monkeypatch.setitem(sys.modules, "single", theirs)
    with loader.importing(), pytest.raises(ImportError, match="another name"):
        loader.require_free("single")
    assert sys.modules["single"] is theirs


def test_a_plugins_module_is_not_in_the_trainings_way(loader, monkeypatch):
    """The training may import a module of that name later, and pickle looks its classes up there."""
    with loader.importing():
        import single

        loader.require_free("single")  # another plugin of the same file
    assert "single" not in sys.modules
    with loader.importing():
        loader.require_free("single")
        assert sys.modules["single"] is single
    theirs = types.ModuleType("single")
    monkeypatch.setitem(sys.modules, "single", theirs)
    with loader.importing():
        assert sys.modules["single"] is theirs
    loader.purge()
    assert sys.modules["single"] is theirs


def test_a_module_that_somebody_replaced_is_not_removed(loader):
    with loader.importing():
        __import__("single")
    replaced = sys.modules["single"] = types.ModuleType("single")
    loader.purge()
    assert sys.modules.pop("single") is replaced


def test_sources_can_be_added_later(loader):
    loader.add({"later.py": "value = 9\n"})
    with loader.importing():
        import later
    assert later.value == 9
    loader.purge()
    assert "later" not in sys.modules


def test_importing_may_be_entered_again(loader):
    with loader.importing(), loader.importing():
        import single
    assert single.value == 8


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
        with loader.importing():
            import single
        with pytest.raises(ValueError, match="1") as caught:
            single.line()
        assert caught.traceback[-1].lineno + 1 == 4
        assert single.late.__annotations__ == {"argument": "Absent"}  # the first piece's __future__ holds
    finally:
        loader.purge()


def test_a_gentle_loader_leaves_the_interpreter_alone_for_longer_than_it_holds_it():
    pieces = b"\n\f\f\f".join([b"total = sum(range(20_000))"] * 20)
    loader = Loader({"single.py": pieces}, codes, gentle=True)
    try:
        wall, busy = time.monotonic(), time.thread_time()
        with loader.importing():
            import single
        busy = time.thread_time() - busy
        assert single.total
        assert time.monotonic() - wall > 3 * busy
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
        with loader.importing():
            __import__("single")
    finally:
        gc.enable()
        gc.callbacks.pop()
        loader.purge()
    assert set(generations) == ({0} if is_enabled else set())  # automatic ones would have been three of generation 1


def test_an_import_of_another_thread_finds_its_module_while_the_loader_leaves(loader):
    """Another thread may be anywhere in the list of finders: here before the one of files, when the loader leaves."""
    importing = loader.importing()

    class Leaves:
        @staticmethod
        def find_spec(name, *_):
            if name == "colorsys":
                importing.__exit__(None, None, None)

    sys.modules.pop("colorsys", None)
    before = sys.meta_path
    importing.__enter__()
    sys.meta_path.insert(sys.meta_path.index(PathFinder), Leaves)
    try:
        import colorsys

        assert colorsys
        assert sys.meta_path is before, "the list itself is as it was"
        assert sys.meta_path[sys.meta_path.index(Leaves) + 1] is PathFinder, "what others put in meanwhile stays"
    finally:
        sys.meta_path.remove(Leaves)


def test_a_list_of_finders_that_others_have_set_meanwhile_stays_theirs(loader):
    before = sys.meta_path
    try:
        with loader.importing():
            theirs = sys.meta_path = list(sys.meta_path)
        assert sys.meta_path == before
        assert sys.meta_path is not theirs
    finally:
        sys.meta_path = before


def test_tracebacks_show_the_source_and_nothing_of_it_stays(loader):
    with loader.importing():
        from carried.part import fail
    try:
        fail()
    except ValueError:
        assert "raise ValueError('carried')" in traceback.format_exc()
    assert "raise ValueError" in inspect.getsource(fail)
    loader.purge()
    assert not [name for name in linecache.cache if "hookd-payload" in name]


def test_a_changed_source_is_imported_anew_and_an_unchanged_one_is_not(loader):
    with loader.importing():
        import carried
        import single
    fail = carried.part.fail
    with loader.renewing({"carried/__init__.py": FILES["carried/__init__.py"], "carried/part.py": "value = 8\n"}):
        with loader.importing():
            import carried as new
        assert (new.value, hasattr(new.part, "fail")) == (8, False)
    with loader.renewing({"single.py": FILES["single.py"]}), loader.importing():
        assert sys.modules["single"] is single
        assert sys.modules["carried"] is new
    with pytest.raises(ValueError, match="carried"):
        fail()


def test_the_marks_of_a_payload_do_not_make_a_source_another():
    loader = Loader({"single.py": b"value = 1\n\f\f\fother = 2\n"}, codes)
    assert loader.get_source("single").splitlines() == ["value = 1", "other = 2"], "as linecache takes it apart"
    with loader.importing():
        import single
    with loader.renewing({"single.py": "value = 1\nother = 2\n"}), loader.importing():
        assert sys.modules["single"] is single
    loader.purge()


def test_a_file_that_the_new_source_has_no_more_cannot_be_imported(loader):
    with loader.renewing({"carried/__init__.py": "value = 9\n"}), loader.importing():
        import carried

        assert carried.value == 9
        with pytest.raises(ModuleNotFoundError):
            __import__("carried.part")


@pytest.mark.parametrize("before", [False, True], ids=["not-imported-yet", "imported"])
def test_a_new_source_that_fails_leaves_the_old_one(loader, before):
    if before:
        with loader.importing():
            import carried as old
    broken = {"carried/__init__.py": "from carried.part import value\n1 / 0\n", "carried/part.py": "value = 8\n"}
    with pytest.raises(ZeroDivisionError), loader.renewing(broken), loader.importing():
        __import__("carried")
    with loader.importing():
        import carried

        assert carried.value == 7
        assert not before or carried is old
        assert "carried.part" in sys.modules


def test_a_failed_renewal_of_hookds_own_names_puts_them_back():
    files = {"hookd_carried/__init__.py": b"value = 7\n"}
    loader = Loader(files, codes)
    with loader.importing():
        import hookd_carried
    with (
        pytest.raises(ZeroDivisionError),
        loader.renewing({"hookd_carried/__init__.py": "1 / 0\n"}),
        loader.importing(),
    ):
        __import__("hookd_carried")
    assert sys.modules["hookd_carried"] is hookd_carried
    loader.purge()
    assert "hookd_carried" not in sys.modules


def test_tracebacks_show_the_new_source(loader):
    with loader.importing():
        import carried.part
    with pytest.raises(ValueError):
        carried.part.fail()
    linecache.getline("/hookd-payload/carried/part.py", 3)
    changed = {"carried/__init__.py": "", "carried/part.py": "def fail():\n    raise ValueError('new words')\n"}
    with loader.renewing(changed), loader.importing():
        from carried import part
    try:
        part.fail()
    except ValueError:
        assert "new words" in traceback.format_exc()


def test_where_the_training_has_a_module_of_its_own_all_of_it_is_the_trainings(loader, monkeypatch):
    theirs = types.ModuleType("carried")
    theirs.__path__ = []
    monkeypatch.setitem(sys.modules, "carried", theirs)
    with loader.importing():
        import carried

        assert carried is theirs
        with pytest.raises(ModuleNotFoundError, match=r"No module named 'carried\.part'$"):
            __import__("carried.part")
