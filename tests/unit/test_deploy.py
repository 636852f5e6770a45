"""The files of deploy/, checked against the published schemas and the tools that read them, and against the code."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from hookd.tool import config
from hookd.tool.config import tomllib
from hookd.tool.daemon.web.host_names import HostNames
from hookd.version import __version__
from tests.support.deployment import DEPLOY, RIGHTS, ROOT, run, tool
from tests.support.environment import tool_environment
from tests.support.processes import wait_until

DOCKERFILE = DEPLOY / "docker" / "Dockerfile"
UNIT = DEPLOY / "systemd" / "hookd.service"
SCRIPTS = sorted([*(DEPLOY / "slurm").glob("*.s*"), *(DEPLOY / "web").glob("*.sh")])
EXPOSURE = 35
"""Tenths of a point that `systemd-analyze security` may find: 3.0 with systemd 252, and newer ones look at more."""


# ---- rights

ESSENTIAL = ("SYS_PTRACE", "DAC_OVERRIDE")
"""Without these nothing of another user can be read; the other two make a stop short, and serve CPython 3.14."""


@pytest.mark.skipif(os.geteuid() != 0, reason="takes rights away, which only root has")
@pytest.mark.parametrize("missing", ESSENTIAL)
def test_without_one_of_the_rights_the_processes_of_others_stay_closed(missing, stack):
    shed = ["setpriv", "--inh-caps", "-all", "--bounding-set"]
    other = stack.enter_context(subprocess.Popen([*shed, "-all", "--reuid", "65534", "--clear-groups", "sleep", "60"]))
    stack.callback(other.kill)
    wait_until(lambda: Path(f"/proc/{other.pid}/comm").read_text() == "sleep\n")
    kept = "-all" + "".join(f",+{right.lower()}" for right in RIGHTS - {missing})
    hookd = [sys.executable, "-m", "hookd", "attach", "--json", "--listen", "127.0.0.1:0", str(other.pid)]
    code, output = run(*shed, kept, *hookd, env=tool_environment())
    assert (code, json.loads(output[: output.rindex("}") + 1])["reason"]) == (5, "ptrace-refused"), output
    assert missing in output


# ---- releases

WORKFLOW = ROOT / ".github" / "workflows" / "release.yml"


def test_the_workflow_of_releases_follows_the_published_schema():
    code, output = run(tool("check-jsonschema"), "--builtin-schema", "vendor.github-workflows", WORKFLOW)
    assert code == 0, output


def test_the_workflow_reads_the_version_of_the_code():
    workflow = yaml.safe_load(WORKFLOW.read_text())
    (step,) = [one for one in workflow["jobs"]["build"]["steps"] if one.get("id") == "version"]
    command = re.search(r"\$\(python (.*)\)", step["run"])[1]
    done = subprocess.run(
        f"{sys.executable} {command}", shell=True, cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == f"{__version__}\n"


# ---- systemd


def settings(section):
    """Read a section of the unit; a key may stand there several times."""
    text = UNIT.read_text().partition(f"[{section}]\n")[2].partition("\n[")[0]
    lines = (line.split("=", 1) for line in text.splitlines() if "=" in line and not line.startswith("#"))
    return [(key, value) for key, value in lines]


def test_the_unit_is_as_hardened_as_it_says():
    code, output = run("systemd-analyze", "security", "--offline=true", f"--threshold={EXPOSURE}", UNIT)
    assert code == 0, output


def test_the_unit_has_no_mistake():
    _, output = run("systemd-analyze", "verify", UNIT)
    assert not [line for line in output.splitlines() if "is not executable" not in line]


def test_the_unit_starts_what_there_is():
    service = dict(settings("Service"))
    assert service["Type"] == "notify"  # hookd.tool.daemon.notify
    words = service["ExecStart"].split()[1:]
    assert words[0] == "serve"
    assert set(words) & {"--config"}
    default = config.default_control_path({}, 0)
    assert default.parent == Path("/run", service["RuntimeDirectory"])
    assert config.default_state_dir({}, 0) == Path("/var/lib", service["StateDirectory"])
    assert set(service["CapabilityBoundingSet"].split()) == {"CAP_" + right for right in RIGHTS}


# ---- containers


def test_the_dockerfile_is_clean():
    code, output = run(tool("hadolint"), DOCKERFILE)
    assert code == 0, output


def test_the_image_is_pinned_and_nobodys_by_default():
    lines = DOCKERFILE.read_text().splitlines()
    last = lines[max(n for n, line in enumerate(lines) if line.startswith("FROM ")) :]
    assert re.search(r"^ARG PYTHON=\d+\.\d+\.\d+-", DOCKERFILE.read_text(), re.MULTILINE)
    assert f"ARG VERSION={__version__}" in last
    assert "LISTEN" not in "".join(line for line in last if not line.startswith("#")), "on loopback by default"
    assert "USER 65532:65532" in last
    assert any(line.startswith("HEALTHCHECK ") for line in last)
    variables = set(re.findall(r"\bHOOKD_([A-Z_]+)=", "\n".join(last)))
    assert variables
    assert {name.lower() for name in variables} <= set(config.SETTINGS)


def locked(name):
    """Read a lock file; return its requirements without their hashes, after checking that each has some."""
    entries = re.split(r"\n(?=\w)", (DEPLOY / "docker" / name).read_text().partition("make lock\n")[2].strip())
    assert all(re.search(r" \\\n +--hash=sha256:[0-9a-f]{64}", entry) for entry in entries)
    return [Requirement(entry.partition(" \\\n")[0]) for entry in entries]


def missing(needed, lock, environment):
    """Which of some requirements no entry of a lock satisfies, for one Python."""

    def applies(one):
        return one.marker is None or one.marker.evaluate({**environment, "extra": ""})

    versions = {}
    for one in filter(applies, lock):
        ((operator, version),) = [(pin.operator, pin.version) for pin in one.specifier]
        assert operator == "=="
        assert versions.setdefault(canonicalize_name(one.name), version) == version, f"{one.name} twice"
    found = [(one, versions.get(canonicalize_name(one.name))) for one in filter(applies, needed)]
    return [str(one) for one, version in found if version is None or version not in one.specifier]


@pytest.mark.parametrize("minor", range(10, 15))
def test_the_lock_files_satisfy_the_project_on_every_python(minor):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    python = {"python_version": f"3.{minor}", "python_full_version": f"3.{minor}.0"}
    for name, needed in (
        ("requirements.txt", project["project"]["dependencies"]),
        ("build.txt", project["build-system"]["requires"]),
    ):
        lock = locked(name)
        assert not missing(map(Requirement, needed), lock, python)
        assert missing([Requirement("pluggy>=99"), Requirement("absent")], lock, python) == ["pluggy>=99", "absent"]
    lock = locked("requirements.txt")
    assert {one.name for one in lock} >= {"tomli"}
    for one in lock:  # and what these need themselves, as far as it is installed here
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            needs = [Requirement(text) for text in importlib.metadata.requires(one.name) or ()]
            names = [Requirement(need.name + (f"; {need.marker}" if need.marker else "")) for need in needs]
            assert not missing(names, lock, python), one.name


def test_the_image_installs_nothing_that_is_not_locked():
    text = DOCKERFILE.read_text().replace("\\\n", " ")
    made = "".join(stage for stage in re.split(r"^(?=FROM )", text, flags=re.MULTILINE) if " AS training" not in stage)
    installs = re.findall(r"pip install ([^&\n]*)", made)
    assert len(installs) == 3
    assert all("--require-hashes" in one or "--no-deps --no-index" in one for one in installs)
    assert "pip wheel --no-deps --no-build-isolation" in made


def test_what_the_image_is_built_of_is_in_its_context():
    kept = [
        line[1:] for line in DOCKERFILE.with_suffix(".dockerignore").read_text().splitlines() if line.startswith("!")
    ]
    assert not [name for name in kept if not (ROOT / name).exists()]
    needed = {f"deploy/docker/{name}.txt" for name in ("build", "requirements")}
    needed |= {"pyproject.toml", "hatch_build.py", "LICENSE", "README.md", "hookd", "plugins", "examples"}
    assert needed <= set(kept)


def compose():
    return yaml.safe_load((DEPLOY / "docker" / "compose.yaml").read_text())


def compose_schema():
    """Return the check of the published schema that check-jsonschema brings along."""
    package = importlib.util.find_spec("check_jsonschema")
    if package is None:
        pytest.skip("no check-jsonschema here")
    jsonschema = pytest.importorskip("jsonschema")
    schemas = Path(package.origin).parent / "builtin_schemas" / "vendor"
    schema = json.loads((schemas / "compose-spec.json").read_text())
    return jsonschema.validators.validator_for(schema)(schema)


def test_the_compose_file_follows_the_published_schema():
    schema = compose_schema()
    assert not list(schema.iter_errors(compose()))
    wrong = compose()
    wrong["services"]["hookd"]["cap_ad"] = ["SYS_PTRACE"]
    assert list(schema.iter_errors(wrong))


def test_images_of_others_say_how_they_are_pinned():
    """A digest that nobody here has pulled would be invented: each has a version, and shows where a digest goes."""
    for line in (DEPLOY / "docker" / "compose.yaml").read_text().splitlines():
        found = re.match(r"\s+image: (\S+)(.*)", line)
        if found and not found[1].startswith("hookd:"):
            assert "@sha256:" in found[1] or found[2] == f" # {found[1]}@sha256:…"
    base = re.search(r"^ARG PYTHON=(\S+)$", DOCKERFILE.read_text(), re.MULTILINE)[1]
    assert f"--build-arg PYTHON={base}@sha256:…" in DOCKERFILE.read_text()
    bases = re.findall(r"^FROM (\S+)", DOCKERFILE.read_text(), re.MULTILINE)
    assert set(bases) == {"python:${PYTHON}"}


def test_the_compose_file_names_what_there_is():
    services, volumes = compose()["services"], compose()["volumes"]
    here = DEPLOY / "docker"
    stages = set(re.findall(r"^FROM .* AS (\w+)", DOCKERFILE.read_text(), re.MULTILINE))
    for name, service in services.items():
        assert set(service.get("depends_on", ())) <= set(services)
        for mount in service.get("volumes", ()):
            source = mount.split(":")[0]
            assert source in volumes or (here / source).exists(), f"{name}: {source}"
        build = service.get("build")
        assert build is None or ((here / build["context"] / build["dockerfile"]).exists() and build["target"] in stages)
        assert build is not None or re.search(r":v?\d+\.\d+", service["image"]), f"{name} is not pinned"
    hookd = services["hookd"]
    assert hookd["image"] == f"hookd:{__version__}"
    environment = hookd["environment"]
    assert {name.removeprefix("HOOKD_").lower() for name in environment} <= set(config.SETTINGS)
    scrapes = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    (asked,) = [target for one in scrapes for static in one["static_configs"] for target in static["targets"]]
    known = HostNames(config.load({}, environment).allow_hosts, is_local=False)
    assert known.refusal(asked) is None, "Prometheus asks by a name that is refused"
    assert (hookd["cap_drop"], set(hookd["cap_add"])) == (["ALL"], RIGHTS)
    assert hookd["pid"] == "service:training"


# ---- Prometheus


@pytest.mark.parametrize("path", sorted((DEPLOY / "prometheus").glob("prometheus*.yml")), ids=lambda path: path.name)
def test_prometheus_accepts_the_configuration(path):
    code, output = run("promtool", "check", "config", path)
    assert code == 0, output


def test_what_is_federated_and_written_far_away_is_of_whole_runs():
    folder = DEPLOY / "prometheus"
    federation, remote = (
        yaml.safe_load((folder / f"prometheus-{one}.yml").read_text()) for one in ("federation", "remote-write")
    )
    (pattern,) = re.findall(r'__name__=~"(.+?)"', federation["scrape_configs"][0]["params"]["match[]"][0])
    (kept,) = (relabel["regex"] for relabel in remote["remote_write"][0]["write_relabel_configs"])
    for path in (folder / "rules").glob("*.rules.yml"):
        for rule in (
            rule for group in yaml.safe_load(path.read_text())["groups"] for rule in group["rules"] if "record" in rule
        ):
            level = rule["record"].partition(":")[0].split("_")
            is_whole = {"rank", "instance"}.isdisjoint(level)
            assert bool(re.fullmatch(pattern, rule["record"])) == bool(re.fullmatch(kept, rule["record"])) == is_whole


# ---- Slurm


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_script_is_clean(path):
    code, output = run("shellcheck", path)
    assert code == 0, output
    assert os.access(path, os.X_OK) or path.suffix == ".sbatch"


def script(name, **variables):
    """Run one of the scripts as Slurm would, in a small environment."""
    environ = {"PATH": os.environ["PATH"], **variables}
    return run("/bin/sh", DEPLOY / "slurm" / name, env=environ)


def test_hookd_is_where_the_documents_install_it():
    """Neither a job's PATH nor that of slurmd need have it."""
    documents = [ROOT / "README.md", *(ROOT / "docs" / name for name in ("start.md", "operations.md"))]
    installed = "python3 -m venv /opt/hookd && /opt/hookd/bin/pip install ."
    assert all(installed in path.read_text("utf-8") for path in documents)
    for path in (DEPLOY / "slurm").iterdir():
        code = "\n".join(line for line in path.read_text("utf-8").splitlines() if not line.startswith("#"))
        assert not re.search(r"(^|-- |^\s+)hookd (run|attach|status)\b", code, re.MULTILINE), path
        assert set(re.findall(r"/[\w/]*/hookd/bin/\w+", code)) <= {"/opt/hookd/bin/hookd", "/opt/hookd/bin/python"}, (
            path
        )


@pytest.mark.parametrize("hookd", ["/bin/true", "/bin/false", "/nowhere"])
def test_a_prolog_never_takes_a_node_out_of_service(hookd, tmp_path):
    (tmp_path / "systemctl").symlink_to("/bin/false")  # nothing of this machine is started
    code, _ = script("prolog.sh", HOOKD_PROGRAM=hookd, PATH=f"{tmp_path}:{os.environ['PATH']}", SLURM_JOB_ID="7")
    assert code == 0


def test_a_task_is_watched_unless_its_user_says_no():
    assert script("task_prolog.sh") == (0, "export HOOKD=1\n")
    assert script("task_prolog.sh", HOOKD="0") == (0, "export HOOKD=0\n")


def test_an_epilog_removes_the_sockets_of_dead_trainings_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a socket's path may not be long
    dead, live, other = (Path(f"hookd-{n}-{n:012x}.sock") for n in (1, 2, 3))
    reported = {
        "HOOKD_PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "HOOKD_SOCKET_DIRECTORIES": f"/nowhere {tmp_path}",
    }  # fmt: skip
    other.write_text("no socket")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(live))
        listener.listen()
        with socket.socket(socket.AF_UNIX) as gone:
            gone.bind(str(dead))
        assert script("epilog.sh", SLURM_JOB_UID=str(os.getuid() + 1), **reported) == (0, "")
        assert dead.exists()  # it is another user's
        assert script("epilog.sh", SLURM_JOB_UID=str(os.getuid()), **reported) == (0, "")
        assert [path.exists() for path in (dead, live, other)] == [False, True, True]
    assert script("epilog.sh", **reported) == (0, "")
    assert (
        script("epilog.sh", SLURM_JOB_UID="0", HOOKD_PYTHON="/nowhere", HOOKD_SOCKET_DIRECTORIES=str(tmp_path))[0] == 0
    )
