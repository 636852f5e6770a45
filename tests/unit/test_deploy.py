"""The files of deploy/, held against the published schemas and the tools that read them, and against the code."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from hookd import config
from tests.support.environment import tool_environment
from tests.support.processes import wait_until

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
UNIT = DEPLOY / "systemd" / "hookd.service"
DOCKERFILE = DEPLOY / "docker" / "Dockerfile"
SCRIPTS = sorted((DEPLOY / "slurm").glob("*.s*"))
RIGHTS = {"SYS_PTRACE", "DAC_OVERRIDE", "CHOWN", "SYS_NICE"}
"""What was measured to be needed, and what each is for: docs/operations.md."""
EXPOSURE = 35
"""Tenths of a point that `systemd-analyze security` may find: 3.0 with systemd 252, and newer ones look at more."""
VERSIONS = ("1.29", "1.33")
"""Of Kubernetes: the oldest that has sidecars, and a newer one."""


def run(*command, **options):
    """Run a tool that need not be here."""
    if shutil.which(command[0]) is None and not Path(command[0]).exists():
        pytest.skip(f"no {command[0]} here")
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, timeout=60, check=False, **options
    )
    return done.returncode, done.stdout + done.stderr


def tool(name):
    """Find a program that pip has put beside this Python, or that is on the path."""
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.exists() else name


def documents(text):
    return [one for one in yaml.safe_load_all(text) if one is not None]


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
    code, told = run(*shed, kept, *hookd, env=tool_environment())
    assert (code, json.loads(told[: told.rindex("}") + 1])["reason"]) == (5, "ptrace-refused"), told
    assert missing in told


# ---- systemd


def settings(section):
    """Read a section of the unit; a key may stand there several times."""
    text = UNIT.read_text().partition(f"[{section}]\n")[2].partition("\n[")[0]
    lines = (line.split("=", 1) for line in text.splitlines() if "=" in line and not line.startswith("#"))
    return [(key, value) for key, value in lines]


def test_the_unit_is_as_hardened_as_it_says():
    code, told = run("systemd-analyze", "security", "--offline=true", f"--threshold={EXPOSURE}", UNIT)
    assert code == 0, told


def test_the_unit_has_no_mistake():
    _, told = run("systemd-analyze", "verify", UNIT)
    assert not [line for line in told.splitlines() if "is not executable" not in line]


def test_the_unit_starts_what_there_is():
    service = dict(settings("Service"))
    assert service["Type"] == "notify"  # hookd.daemon.notify
    words = service["ExecStart"].split()[1:]
    assert words[0] == "serve"
    assert set(words) & {"--config"}
    default = config.default_control_path({}, 0)
    assert default.parent == Path("/run", service["RuntimeDirectory"])
    assert config.default_state_dir({}, 0) == Path("/var/lib", service["StateDirectory"])
    assert set(service["CapabilityBoundingSet"].split()) == {"CAP_" + right for right in RIGHTS}


# ---- containers


def test_the_dockerfile_is_clean():
    code, told = run(tool("hadolint"), DOCKERFILE)
    assert code == 0, told


def test_the_image_is_pinned_and_nobodys_by_default():
    lines = DOCKERFILE.read_text().splitlines()
    last = lines[max(n for n, line in enumerate(lines) if line.startswith("FROM ")) :]
    assert re.search(r"^ARG PYTHON=\d+\.\d+", DOCKERFILE.read_text(), re.MULTILINE)
    assert "USER 65532:65532" in last
    assert any("/-/healthy" in line for line in last)
    variables = set(re.findall(r"\bHOOKD_([A-Z_]+)=", "\n".join(last)))
    assert variables
    assert {name.lower() for name in variables} <= set(config.SETTINGS)


def test_what_the_image_is_built_of_is_in_its_context():
    kept = [
        line[1:] for line in DOCKERFILE.with_suffix(".dockerignore").read_text().splitlines() if line.startswith("!")
    ]
    assert not [name for name in kept if not (ROOT / name).exists()]
    needed = {"pyproject.toml", "hatch_build.py", "LICENSE", "README.md", "hookd", "plugins", "examples"}
    assert needed <= set(kept)


def compose():
    return yaml.safe_load((DEPLOY / "docker" / "compose.yaml").read_text())


def compose_schema():
    """Give the check of the published schema that check-jsonschema brings along."""
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
    assert (hookd["cap_drop"], set(hookd["cap_add"])) == (["ALL"], RIGHTS)
    assert hookd["pid"] == "service:training"


# ---- Kubernetes


def rendered(directory):
    """Render a kustomization with kubectl."""
    code, told = run("kubectl", "kustomize", directory)
    assert code == 0, told
    return documents(told)


@pytest.mark.parametrize("name", ["base", "example", "monitoring", "sidecar"])
def test_a_kustomization_names_files_that_are_there(name):
    directory = KUBERNETES / name
    (content,) = documents((directory / "kustomization.yaml").read_text())
    named = [*content.get("resources", ()), *content.get("components", ())]
    named += [patch["path"] for patch in content.get("patches", ())]
    named += [file for made in content.get("configMapGenerator", ()) for file in made["files"]]
    assert named
    assert not [file for file in named if not (directory / file).exists()]
    used = {file.name for file in directory.iterdir()} - {"kustomization.yaml"}
    assert used <= set(named)


def check_object(one, version):
    package = pytest.importorskip("kubernetes_validate", reason="no kubernetes-validate here")
    package.validate(one, version, strict=True)


def plain_objects():
    """Give what the manifests hold, without kubectl: enough for the schemas."""
    files = [
        KUBERNETES / "base" / "namespace.yaml",
        KUBERNETES / "base" / "daemonset.yaml",
        KUBERNETES / "example" / "job.yaml",
    ]
    return [one for file in files for one in documents(file.read_text())]


@pytest.mark.parametrize("version", VERSIONS)
def test_the_objects_follow_kubernetes_own_schemas(version):
    for one in plain_objects():
        check_object(one, version)


def test_what_kustomize_makes_follows_kubernetes_own_schemas():
    objects = [one for name in ("base", "example") for one in rendered(KUBERNETES / name)]
    assert sorted(one["kind"] for one in objects) == ["ConfigMap", "DaemonSet", "Job", "Namespace"]
    for one in objects:
        check_object(one, VERSIONS[-1])


def test_the_schemas_find_a_mistake():
    package = pytest.importorskip("kubernetes_validate", reason="no kubernetes-validate here")
    wrong = copy.deepcopy(next(one for one in plain_objects() if one["kind"] == "DaemonSet"))
    wrong["spec"]["template"]["spec"]["hostPid"] = True
    with pytest.raises(package.ValidationError, match="hostPid"):
        check_object(wrong, VERSIONS[-1])


def hookd_containers():
    """Give the container of the node's daemon and that of the sidecar."""
    (daemon,) = documents((KUBERNETES / "base" / "daemonset.yaml").read_text())
    (patch,) = documents((KUBERNETES / "sidecar" / "patch.yaml").read_text())
    pods = [daemon["spec"]["template"]["spec"], patch["spec"]["template"]["spec"]]
    return pods, [*pods[0]["containers"], *pods[1]["initContainers"]]


def test_the_containers_have_the_least_rights_that_were_measured():
    pods, containers = hookd_containers()
    assert pods[0]["hostPID"]
    assert not pods[0]["automountServiceAccountToken"]
    assert pods[1]["shareProcessNamespace"]
    for container in containers:
        context = container["securityContext"]
        assert not context["privileged"]
        assert not context["allowPrivilegeEscalation"]
        assert context["readOnlyRootFilesystem"]
        assert context["capabilities"]["drop"] == ["ALL"]
        assert set(context["capabilities"]["add"]) == RIGHTS


def test_probes_ports_and_variables_are_those_of_the_daemon():
    web = (ROOT / "hookd" / "daemon" / "web.py").read_text()
    for container in hookd_containers()[1]:
        variables = {one["name"]: one["value"] for one in container["env"]}
        assert {name.removeprefix("HOOKD_").lower() for name in variables} <= set(config.SETTINGS)
        listen = config.Address.parse(variables["HOOKD_LISTEN"])
        assert [(port["name"], port["containerPort"]) for port in container["ports"]] == [("hookd", listen.port)]
        probes = [container[name] for name in ("startupProbe", "readinessProbe", "livenessProbe") if name in container]
        assert len(probes) >= 2
        assert all(f'"{probe["httpGet"]["path"]}"' in web for probe in probes)
        mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
        written = {variables["HOOKD_STATE_DIR"], str(Path(variables["HOOKD_CONTROL"]).parent)}
        assert written <= mounts  # the root file system is read-only


def test_the_configuration_of_the_nodes_is_one():
    assert config.check(KUBERNETES / "base" / "hookd.toml")


def test_the_sidecar_comes_to_those_who_ask_for_it():
    (job,) = rendered(KUBERNETES / "example")
    pod = job["spec"]["template"]
    assert pod["metadata"]["labels"]["hookd-sidecar"] == "true"
    assert [one["name"] for one in pod["spec"]["initContainers"]] == ["hookd"]
    assert [one["name"] for one in pod["spec"]["containers"]] == ["pytorch"]
    assert pod["spec"]["initContainers"][0]["restartPolicy"] == "Always"  # else the Job would wait for it for ever


def test_the_example_names_itself_as_the_labels_want_it():
    from hookd.attach import container

    (job,) = documents((KUBERNETES / "example" / "job.yaml").read_text())
    names = {one["name"] for one in job["spec"]["template"]["spec"]["containers"][0]["env"]}
    for variables in (container.POD_VARIABLES, container.NAMESPACE_VARIABLES, container.CONTAINER_VARIABLES):
        assert names & set(variables)


# The part of the operator's own types that is used here; monitoring.coreos.com/v1 of prometheus-operator 0.93.
TEXT = {"type": "string"}
DURATION = {
    "type": "string",
    "pattern": r"^(0|(([0-9]+)y)?(([0-9]+)w)?(([0-9]+)d)?(([0-9]+)h)?(([0-9]+)m)?(([0-9]+)s)?(([0-9]+)ms)?)$",
}
LABELS = {"type": "object", "additionalProperties": TEXT}


def closed(required=(), **properties):
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


SELECTOR = closed(matchLabels=LABELS)
RELABELING = closed(
    action=TEXT,
    sourceLabels={"type": "array", "items": TEXT},
    targetLabel=TEXT,
    regex=TEXT,
    replacement=TEXT,
    separator=TEXT,
)
ENDPOINT = closed(
    port=TEXT, path=TEXT, interval=DURATION, scrapeTimeout=DURATION, honorLabels={"type": "boolean"},
    relabelings={"type": "array", "items": RELABELING},
)  # fmt: skip
RULE = closed(["expr"], alert=TEXT, record=TEXT, expr=TEXT, labels=LABELS, annotations=LABELS,
              keep_firing_for=DURATION, **{"for": DURATION})  # fmt: skip
SPECS = {
    "PodMonitor": closed(
        ["selector", "podMetricsEndpoints"], selector=SELECTOR, namespaceSelector=closed(any={"type": "boolean"}),
        podMetricsEndpoints={"type": "array", "items": ENDPOINT, "minItems": 1},
    ),
    "PrometheusRule": closed(groups={"type": "array", "items": closed(
        ["name"], name={"type": "string", "minLength": 1}, interval=DURATION, limit={"type": "integer"}, labels=LABELS,
        rules={"type": "array", "items": RULE},
    )}),
}  # fmt: skip


def test_the_operators_objects_have_its_types():
    jsonschema = pytest.importorskip("jsonschema", reason="no jsonschema here")
    monitoring = KUBERNETES / "monitoring"
    objects = [
        one
        for name in ("podmonitors", "prometheusrule")
        for one in documents((monitoring / f"{name}.yaml").read_text())
    ]
    assert [one["kind"] for one in objects] == ["PodMonitor", "PodMonitor", "PrometheusRule"]
    for one in objects:
        assert one["apiVersion"] == "monitoring.coreos.com/v1"
        jsonschema.validate(one["spec"], SPECS[one["kind"]])
        for endpoint in one["spec"].get("podMetricsEndpoints", ()):
            assert endpoint["port"] == "hookd"  # the name of the containers' port
            assert float(endpoint["scrapeTimeout"][:-1]) <= float(endpoint["interval"][:-1])


def test_monitoring_brings_everything():
    kinds = {one["kind"] for one in rendered(KUBERNETES / "monitoring")}
    assert {"DaemonSet", "PodMonitor", "PrometheusRule"} <= kinds


def generate():
    spec = importlib.util.spec_from_file_location("deploy_generate", KUBERNETES / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_rules_and_dashboards_are_those_of_the_other_directories():
    for path, text in generate().files(DEPLOY).items():
        assert (DEPLOY / path).read_text() == text, f"{path} is old: run python deploy/kubernetes/generate.py"


def test_what_is_generated_holds_every_group_and_dashboard(tmp_path):
    for directory in ("prometheus/rules", "grafana"):
        (tmp_path / directory).mkdir(parents=True)
    groups = [{"name": name, "rules": [{"alert": "A", "expr": "up == 0", "for": "1m"}]} for name in ("a", "b", "c")]
    (tmp_path / "prometheus/rules/one.yml").write_text(yaml.safe_dump({"groups": groups[:2]}))
    (tmp_path / "prometheus/rules/two.yml").write_text(yaml.safe_dump({"groups": groups[2:]}))
    (tmp_path / "grafana/hookd-fleet.json").write_text("{}")
    made = generate()
    rule, dashboards = (documents(text)[0] for text in made.files(tmp_path).values())
    assert rule["spec"]["groups"] == groups
    assert dashboards["configMapGenerator"] == [{"name": "hookd-dashboard-fleet", "files": ["hookd-fleet.json"]}]
    (tmp_path / "grafana/kustomization.yaml").write_text(yaml.safe_dump(dashboards))
    (config_map,) = rendered(tmp_path / "grafana")
    assert config_map["metadata"]["labels"] == {"grafana_dashboard": "1"}


def test_every_dashboard_fits_into_a_config_map():
    assert not [path for path in (DEPLOY / "grafana").glob("*.json") if path.stat().st_size > 1_000_000]


# ---- Prometheus


@pytest.mark.parametrize("path", sorted((DEPLOY / "prometheus").glob("prometheus*.yml")), ids=lambda path: path.name)
def test_prometheus_accepts_the_configuration(path):
    code, told = run("promtool", "check", "config", path)
    assert code == 0, told


# ---- Slurm


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_script_is_clean(path):
    code, told = run("shellcheck", path)
    assert code == 0, told
    assert os.access(path, os.X_OK) or path.suffix == ".sbatch"


def script(name, **variables):
    """Run one of the scripts as Slurm would, with little around it."""
    environ = {"PATH": os.environ["PATH"], **variables}
    return run("/bin/sh", DEPLOY / "slurm" / name, env=environ)


@pytest.mark.parametrize("hookd", ["/bin/true", "/bin/false", "/nowhere"])
def test_a_prolog_never_takes_a_node_out_of_service(hookd, tmp_path):
    (tmp_path / "systemctl").symlink_to("/bin/false")  # nothing of this machine is started
    code, _ = script("prolog.sh", HOOKD=hookd, PATH=f"{tmp_path}:{os.environ['PATH']}", SLURM_JOB_ID="7")
    assert code == 0


def test_a_task_is_watched_unless_its_user_says_no():
    assert script("task_prolog.sh") == (0, "export HOOKD=1\n")
    assert script("task_prolog.sh", HOOKD="0") == (0, "export HOOKD=0\n")


def test_an_epilog_removes_the_sockets_of_dead_trainings_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a socket's path may not be long
    dead, live, other = (Path(f"hookd-{n}-{n:012x}.sock") for n in (1, 2, 3))
    told = {
        "HOOKD_PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "HOOKD_SOCKET_DIRECTORIES": f"/nowhere {tmp_path}",
    }  # fmt: skip
    other.write_text("no socket")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(live))
        listener.listen()
        with socket.socket(socket.AF_UNIX) as gone:
            gone.bind(str(dead))
        assert script("epilog.sh", SLURM_JOB_UID=str(os.getuid() + 1), **told) == (0, "")
        assert dead.exists()  # it is another user's
        assert script("epilog.sh", SLURM_JOB_UID=str(os.getuid()), **told) == (0, "")
        assert [path.exists() for path in (dead, live, other)] == [False, True, True]
    assert script("epilog.sh", **told) == (0, "")
    assert (
        script("epilog.sh", SLURM_JOB_UID="0", HOOKD_PYTHON="/nowhere", HOOKD_SOCKET_DIRECTORIES=str(tmp_path))[0] == 0
    )
