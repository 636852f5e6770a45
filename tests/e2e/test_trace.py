"""`hookd trace` and `hookd record` on a job that trains: their files, and that the job does not notice."""

from __future__ import annotations

import gzip
import json
import xml.etree.ElementTree as ET

import pytest

from tests.support import tool, training
from tests.support.tool import Attachment
from tests.support.training import Job

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("attachable")]

JOB = Job("transformer.py", "--steps 400")
ENDLESS = Job("transformer.py", "--steps 0")


@pytest.mark.load
def test_a_traced_and_recorded_job_goes_on_as_it_would_and_the_files_name_its_modules(tmp_path):
    plain = training.plain_run(JOB)
    names = training.called_modules(JOB.script)
    with training.start_warm(ENDLESS, "--pause", "0.2") as process:
        process.expect("^step 3 ")
        for command in ("trace", "record"):
            refused = json.loads(tool.hookd(command, str(process.pid), "--json", status=4))
            assert (refused["reason"], refused["hint"]) == ("not-attached", f"Run `hookd attach {process.pid}`.")
        with Attachment([process.pid], "--timeout", "60") as attachment:
            packed, flame, profile = tmp_path / "t.json.gz", tmp_path / "r.svg", tmp_path / "r.json"
            reported = tool.hookd_json("trace", str(process.pid), "--steps", "3", "-o", packed)
            assert (reported["steps"], reported["is_cut"], reported["path"]) == (3, False, str(packed))
            reported = tool.hookd_json("record", str(process.pid), "--steps", "4", "-o", flame)
            assert (reported["steps"], reported["ended"]) == (4, False)
            reported = tool.hookd_json("record", str(process.pid), "--seconds", "0.5", "-o", profile)
            assert reported["seconds"] == pytest.approx(0.5, abs=0.3)
            attachment.detach()
        done = len(process.out)
        process.expect(f"^step {done + 1} loss ")
        assert process.out[:done] == list(plain.result()[:done])
        assert process.err == []
    trace = json.loads(gzip.decompress(packed.read_bytes()))
    calls = [event["name"] for event in trace["traceEvents"] if str(event.get("name")).startswith("module ")]
    assert {name.removeprefix("module ") for name in calls} >= names
    assert calls.count("module (root)") == 3
    titles = [title.text or "" for title in ET.parse(flame).iter("{http://www.w3.org/2000/svg}title")]
    assert any(title.startswith("(root) (") for title in titles)
    assert json.loads(profile.read_text())["profiles"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.json", "r.svg", "t.json.gz"]
