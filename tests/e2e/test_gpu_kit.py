"""`make gpu` does on a processor what it will do on a GPU: none of its parts is broken when there is one at last."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.gpu import __main__ as kit
from tests.gpu import cost, faults, identity, peers, seconds, suite
from tests.gpu.place import ROOT, Place

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return Place(is_dry=True, scratch=tmp_path)


def test_a_training_that_is_watched_in_four_ways_ends_the_same(place: Place) -> None:
    table = identity.part(place, ["scaler"])
    assert table.failures == []
    assert table.rows == [["scaler", "same", "same", "same", "same"]]


def test_a_planted_fault_is_an_incident(place: Place) -> None:
    table = faults.part(place, ["nan"])
    assert table.failures == []
    assert table.figures["nan"]["kind"] == "nan"


def test_costs_are_measured(place: Place) -> None:
    table = cost.part(place)
    assert table.failures == []
    assert list(table.figures) == ["transformer", "small", "convnet", "mlp"]


@pytest.mark.filterwarnings("ignore:Anomaly Detection:UserWarning")
def test_other_tools_are_measured(place: Place) -> None:
    assert len(peers.part(place).figures) == 5


def test_what_needs_a_gpu_is_said(place: Place) -> None:
    assert "there is no GPU" in seconds.part(place).text
    assert [file for file in suite.FILES if not (ROOT / file).is_file()] == []


def test_the_document_gets_the_tables_and_keeps_the_rest(tmp_path: Path) -> None:
    document = tmp_path / "gpu.md"
    document.write_text("# On a GPU\n\nText.\n")
    for word in ("first", "second"):
        kit._write(document, f"{word}\n")
    assert document.read_text().startswith("# On a GPU\n\nText.\n")
    assert document.read_text().count(kit.BEGIN) == 1
    assert "second\n" in document.read_text()
    assert "first" not in document.read_text()


@pytest.mark.load
@pytest.mark.timeout(1800)
def test_every_part_in_its_dry_form(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu", "--dry", "--out", out], cwd=ROOT, env=os.environ, check=False
    )
    parts = json.loads(out.read_text())["parts"]
    assert {name: part["failures"] for name, part in parts.items()} == {name: [] for name in kit.PARTS}
    assert done.returncode == 0
