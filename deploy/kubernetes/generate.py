"""Generate the Kubernetes forms of the rules and dashboards in the other directories.

    python deploy/kubernetes/generate.py

writes monitoring/prometheusrule.yaml with all groups of deploy/prometheus/rules/*.yml, and deploy/grafana/kustomization.yaml
with one ConfigMap for each dashboard, which Grafana's sidecar finds by its label. Run it after a change of those; a
test compares the files.

    python deploy/kubernetes/generate.py https://git.example.org/hookd/blob/main/ https://grafana.example.org/

puts the first address before the path in each alert's `runbook_url`, docs/alerts.md#…, for those who have these files on a server,
and the second before the path in `dashboard_url`, d/hookd-run/….
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).parents[1]
RULE = Path("kubernetes/monitoring/prometheusrule.yaml")
DASHBOARDS = Path("grafana/kustomization.yaml")
_HEAD = "# Made by deploy/kubernetes/generate.py.\n"


def prometheus_rule(rules: Path, docs: str = "", grafana: str = "") -> dict[str, Any]:
    """Put the groups of all rule files of a directory into one object for the Prometheus operator.

    Args:
        rules: the directory.
        docs: what stands before the path of each `runbook_url`.
        grafana: what stands before the path of each `dashboard_url`.
    """
    bases = {"runbook_url": docs, "dashboard_url": grafana}
    files = [yaml.safe_load(path.read_text("utf-8")) for path in sorted(rules.glob("*.yml"))]
    for notes in (rule.get("annotations", {}) for file in files for group in file["groups"] for rule in group["rules"]):
        notes.update({name: base + notes[name] for name, base in bases.items() if name in notes})
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "hookd", "labels": {"app.kubernetes.io/name": "hookd"}},
        "spec": {"groups": [group for file in files for group in file["groups"]]},
    }


def dashboards(directory: Path) -> dict[str, Any]:
    """List the dashboards of a directory as ConfigMaps. Their names are their files', without a hash: uids never change."""
    return {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "generatorOptions": {"disableNameSuffixHash": True, "labels": {"grafana_dashboard": "1"}},
        "configMapGenerator": [
            {"name": f"hookd-dashboard-{path.stem.removeprefix('hookd-')}", "files": [path.name]}
            for path in sorted(directory.glob("*.json"))
        ],
    }


def files(deploy: Path, docs: str = "", grafana: str = "") -> dict[Path, str]:
    """Return the text of each file by its path below `deploy`; `docs` and `grafana`: see `prometheus_rule`."""
    rule = prometheus_rule(deploy / "prometheus" / "rules", docs, grafana)
    made = {RULE: rule, DASHBOARDS: dashboards(deploy / "grafana")}
    return {path: _HEAD + yaml.safe_dump(content, sort_keys=False, width=1000) for path, content in made.items()}


def main() -> None:
    """Write the files. The arguments are what stands before the paths of the docs, and before those of the dashboards."""
    for path, text in files(DEPLOY, *sys.argv[1:3]).items():
        (DEPLOY / path).parent.mkdir(exist_ok=True)
        (DEPLOY / path).write_text(text, "utf-8")
        sys.stderr.write(f"wrote {path}\n")


if __name__ == "__main__":
    main()
