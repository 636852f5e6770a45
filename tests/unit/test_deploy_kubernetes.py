"""The manifests of deploy/kubernetes, checked against the published schemas, kubectl, and the code."""

from __future__ import annotations

import copy
import importlib.util
import os
from pathlib import Path

import pytest
import yaml

from hookd.tool import config
from hookd.tool.daemon.web.host_names import HostNames
from hookd.version import __version__
from tests.support.deployment import DEPLOY, RIGHTS, ROOT, documents, run

KUBERNETES = DEPLOY / "kubernetes"
VERSIONS = ("1.29", "1.33")
"""Versions of Kubernetes: the oldest that has sidecars, and a newer one."""


def rendered(directory):
    """Render a kustomization with kubectl."""
    code, output = run("kubectl", "kustomize", directory)
    assert code == 0, output
    return documents(output)


@pytest.mark.parametrize("name", ["base", "example", "monitoring", "sidecar", "sidecar-policy", "web-config"])
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
    """Return the objects of the manifests, without kubectl: enough for the schemas."""
    files = [
        *(
            KUBERNETES / "base" / f"{name}.yaml"
            for name in ("namespace", "priorityclass", "networkpolicy", "daemonset")
        ),
        KUBERNETES / "example" / "job.yaml",
        KUBERNETES / "sidecar-policy" / "networkpolicy.yaml",
    ]
    return [one for file in files for one in documents(file.read_text())]


@pytest.mark.parametrize("version", VERSIONS)
def test_the_objects_follow_kubernetes_own_schemas(version):
    for one in plain_objects():
        check_object(one, version)


def test_what_kustomize_makes_follows_kubernetes_own_schemas():
    objects = [one for name in ("base", "example") for one in rendered(KUBERNETES / name)]
    assert sorted(one["kind"] for one in objects) == [
        "ConfigMap", "DaemonSet", "Job", "Namespace", "NetworkPolicy", "NetworkPolicy", "PriorityClass",
    ]  # fmt: skip
    for one in objects:
        check_object(one, VERSIONS[-1])


def test_the_schemas_find_a_mistake():
    package = pytest.importorskip("kubernetes_validate", reason="no kubernetes-validate here")
    wrong = copy.deepcopy(next(one for one in plain_objects() if one["kind"] == "DaemonSet"))
    wrong["spec"]["template"]["spec"]["hostPid"] = True
    with pytest.raises(package.ValidationError, match="hostPid"):
        check_object(wrong, VERSIONS[-1])


def hookd_containers():
    """Return the container of the node's daemon and that of the sidecar."""
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


def test_the_daemon_takes_the_place_of_no_training_and_tolerates_only_what_it_names():
    (daemon,) = documents((KUBERNETES / "base" / "daemonset.yaml").read_text())
    (priority,) = documents((KUBERNETES / "base" / "priorityclass.yaml").read_text())
    pod = daemon["spec"]["template"]["spec"]
    assert pod["priorityClassName"] == priority["metadata"]["name"]
    assert (priority["preemptionPolicy"], priority["value"], priority["globalDefault"]) == ("Never", 0, False)
    assert pod["tolerations"]
    assert all(one.get("key") and one["effect"] == "NoSchedule" for one in pod["tolerations"])


def test_a_policy_lets_prometheus_alone_in_and_nothing_out():
    objects = rendered(KUBERNETES / "base")
    (policy,) = [one["spec"] for one in objects if one["kind"] == "NetworkPolicy"]
    (daemon,) = [one for one in objects if one["kind"] == "DaemonSet"]
    template = daemon["spec"]["template"]
    assert policy["podSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    assert (set(policy["policyTypes"]), policy["egress"]) == ({"Ingress", "Egress"}, [])
    (rule,) = policy["ingress"]
    assert [set(one) for one in rule["from"]] == [{"namespaceSelector", "podSelector"}]
    (container,) = template["spec"]["containers"]
    assert [one["port"] for one in rule["ports"]] == [one["name"] for one in container["ports"]]


def test_a_policy_closes_the_port_of_the_sidecar_and_no_other():
    objects = rendered(KUBERNETES / "example")
    (policy,) = [one for one in objects if one["kind"] == "NetworkPolicy"]
    (job,) = [one for one in objects if one["kind"] == "Job"]
    template, spec = job["spec"]["template"], policy["spec"]
    assert policy["metadata"]["namespace"] == job["metadata"]["namespace"]
    assert spec["podSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    assert spec["policyTypes"] == ["Ingress"], "what the ranks connect to is theirs"
    prometheus, others = spec["ingress"]
    (daemons,) = documents((KUBERNETES / "base" / "networkpolicy.yaml").read_text())
    assert prometheus["from"] == daemons["spec"]["ingress"][0]["from"]
    (container,) = template["spec"]["initContainers"]
    served = [one["containerPort"] for one in container["ports"]]
    assert [one["port"] for one in prometheus["ports"]] == served
    assert "from" not in others
    for protocol, closed in (("TCP", set(served)), ("UDP", set()), ("SCTP", set())):
        opened = [one for one in others["ports"] if one["protocol"] == protocol]
        covered = {port for one in opened for port in range(one["port"], one["endPort"] + 1)}
        assert set(range(1, 65536)) - covered == closed


def test_images_have_the_tag_of_this_version():
    for name in ("base", "sidecar"):
        (content,) = documents((KUBERNETES / name / "kustomization.yaml").read_text())
        assert [one["newTag"] for one in content["images"]] == [__version__]
    containers = hookd_containers()[1]
    assert {one["image"] for one in containers} == {f"hookd:{__version__}"}
    (job,) = documents((KUBERNETES / "example" / "job.yaml").read_text())
    assert [one["image"] for one in job["spec"]["template"]["spec"]["containers"]] == [f"training:{__version__}"]


def test_probes_ports_and_variables_are_those_of_the_daemon():
    web = (ROOT / "hookd" / "tool" / "daemon" / "web" / "site.py").read_text()
    for container in hookd_containers()[1]:
        variables = {one["name"]: one["value"] for one in container["env"] if "value" in one}
        assert {name.removeprefix("HOOKD_").lower() for name in variables} <= set(config.SETTINGS)
        (pod_ip,) = [one for one in container["env"] if "valueFrom" in one]
        assert pod_ip == {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
        for address in ("10.0.0.7", "fd00::7"):
            listen = config.Address.parse(variables["HOOKD_LISTEN"].replace("$(POD_IP)", address))
            assert listen.host == address
            assert HostNames(is_local=False).refusal(str(listen)) is None, "kubelet and Prometheus ask by it"
            assert [(port["name"], port["containerPort"]) for port in container["ports"]] == [("hookd", listen.port)]
        probes = [container[name] for name in ("startupProbe", "readinessProbe", "livenessProbe") if name in container]
        assert len(probes) >= 2
        assert all(f'"{probe["httpGet"]["path"]}"' in web for probe in probes)
        mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
        written = {variables["HOOKD_STATE_DIR"], str(Path(variables["HOOKD_CONTROL"]).parent)}
        assert written <= mounts  # the root file system is read-only


def test_with_a_web_configuration_the_daemon_reads_it_and_the_kubelet_asks_it_otherwise(tmp_path):
    here = {name: os.path.relpath(KUBERNETES / name, tmp_path) for name in ("base", "web-config")}
    overlay = {"resources": [here["base"]], "components": [here["web-config"]]}
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
    (daemon,) = [one for one in rendered(tmp_path) if one["kind"] == "DaemonSet"]
    check_object(daemon, VERSIONS[-1])
    pod = daemon["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    variables = {one["name"]: one["value"] for one in container["env"] if "value" in one}
    assert {name.removeprefix("HOOKD_").lower() for name in variables} <= set(config.SETTINGS)
    (mount,) = [one for one in container["volumeMounts"] if one["name"] == "web"]
    assert Path(variables["HOOKD_WEB_CONFIG"]).parent == Path(mount["mountPath"])
    assert "HOOKD_CONTROL" in variables, "what was there is kept"
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[name]["exec"] == {"command": ["hookd", "status"]}
        assert "httpGet" not in container[name]
        assert container[name]["periodSeconds"]


def test_the_configuration_of_the_nodes_is_one():
    assert config.check(KUBERNETES / "base" / "hookd.toml")


def test_the_sidecar_comes_to_those_who_ask_for_it():
    (job,) = [one for one in rendered(KUBERNETES / "example") if one["kind"] == "Job"]
    pod = job["spec"]["template"]
    assert pod["metadata"]["labels"]["hookd-sidecar"] == "true"
    assert [one["name"] for one in pod["spec"]["initContainers"]] == ["hookd"]
    assert [one["name"] for one in pod["spec"]["containers"]] == ["pytorch"]
    assert pod["spec"]["initContainers"][0]["restartPolicy"] == "Always"  # else the Job would wait for it for ever


def test_the_example_names_itself_as_the_labels_want_it():
    from hookd.tool.attach import container

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


@pytest.mark.parametrize("name", ["runbook_url", "dashboard_url"])
def test_links_lead_to_where_docs_and_dashboards_are_served(name):
    rules = DEPLOY / "prometheus" / "rules"
    where = {"runbook_url": "https://git.example.org/hookd/blob/main/", "dashboard_url": "https://grafana.example.org/"}
    paths, served = (
        [
            rule["annotations"][name]
            for group in made["spec"]["groups"]
            for rule in group["rules"]
            if name in rule.get("annotations", ())
        ]
        for made in (generate().prometheus_rule(rules), generate().prometheus_rule(rules, *where.values()))
    )
    assert paths
    assert served == [where[name] + path for path in paths]


def test_every_dashboard_fits_into_a_config_map():
    assert not [path for path in (DEPLOY / "grafana").glob("*.json") if path.stat().st_size > 1_000_000]
