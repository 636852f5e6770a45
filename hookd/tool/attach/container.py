"""Find the pod and container of a process from its cgroup and its environment, for the labels of `hookd_target_info`.

Read-only. The ids are part of the cgroup's path. The names come from environment variables that a pod's manifest passes to
its container (Kubernetes' downward API): there is no other way to get them without asking the cluster. Both are hostile
input: the target controls its environment, and anyone who may create cgroups chooses their names.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hookd.errors import HookdError
from hookd.tool.attach import environment
from hookd.tool.linux import proc

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

POD_VARIABLES = ("HOOKD_POD", "POD_NAME", "K8S_POD_NAME", "MY_POD_NAME")
NAMESPACE_VARIABLES = ("HOOKD_NAMESPACE", "POD_NAMESPACE", "K8S_NAMESPACE", "MY_POD_NAMESPACE")
CONTAINER_VARIABLES = ("HOOKD_CONTAINER", "CONTAINER_NAME", "K8S_CONTAINER_NAME")
"""Environment variables of the names; the first one with a valid name is used."""
SHORT_ID = 12
"""Length to which a container's id is shortened, as in `docker ps`."""
_MAX_CGROUP = 1 << 16
# DNS-1123: the name of a pod is a subdomain, those of namespaces and containers are labels. Source: the page "Object Names
# and IDs" of the Kubernetes documentation.
_LABEL = r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?"
_NAME = re.compile(_LABEL)
_POD_NAME = re.compile(rf"(?=.{{1,253}}\Z){_LABEL}(?:\.{_LABEL})*")
# `pod<uid>`; with the systemd driver `kubepods-burstable-pod<uid>.slice`, with `_` for `-`. The uid of a static pod (from a file
# of the kubelet) has no dashes. Source: pkg/kubelet/cm of Kubernetes 1.33.
_POD_PART = re.compile(
    r"(?:[a-z]+-)*pod([0-9a-f]{8}(?:[-_]?[0-9a-f]{4}){3}[-_]?[0-9a-f]{12})(?:\.slice)?(?::.*)?", re.ASCII
)
# `<id>`, `docker-<id>.scope`, `cri-containerd-<id>.scope`, `crio-<id>.scope`, `libpod-<id>.scope`, and `…slice:cri-containerd:<id>`,
# which containerd creates if it takes a slice for a path. In `…-conmon-<id>` only the container's monitor runs.
_CONTAINER_PART = re.compile(r"(?:.*:)?(?:(?!.*conmon)[a-z-]+[-:])?([0-9a-f]{64})(?:\.scope)?", re.ASCII)


@dataclass(frozen=True)
class Container:
    """The pod and container of a process; "" for unknown.

    All are "" for a process outside of containers.

    Attributes:
        pod: the pod's name, else its uid.
        namespace: the name of the pod's namespace.
        container: the container's name, else the first letters of its id.
    """

    pod: str = ""
    namespace: str = ""
    container: str = ""


NO_CONTAINER = Container()


def of_process(pid: int) -> Container:
    """Return the container of a process; NO_CONTAINER if the process is gone or hidden."""
    try:
        text, environ = proc.read(pid, "cgroup", _MAX_CGROUP), environment.of(pid) or {}
    except (HookdError, OSError):
        return NO_CONTAINER
    return where(text.decode("utf-8", "replace"), environ)


def where(cgroup: str, environ: Mapping[str, str]) -> Container:
    """Return the container according to a cgroup and an environment.

    Args:
        cgroup: the text of /proc/PID/cgroup, cgroup v1, v2 or both.
        environ: the environment with which the process was started.
    """
    pod, container = _ids(cgroup)
    return Container(
        _named(environ, POD_VARIABLES, _POD_NAME) or pod,
        _named(environ, NAMESPACE_VARIABLES, _NAME),
        _named(environ, CONTAINER_VARIABLES, _NAME) or container[:SHORT_ID],
    )


def pod_uid(cgroup: str) -> str:
    """Return the uid of the pod to which a cgroup belongs, "" if it belongs to none; `cgroup` as of `where`."""
    return _ids(cgroup)[0]


def _named(environ: Mapping[str, str], variables: Sequence[str], pattern: re.Pattern[str]) -> str:
    values = (environ.get(variable, "") for variable in variables)
    return next((value for value in values if pattern.fullmatch(value)), "")


def _ids(cgroup: str) -> tuple[str, str]:
    """Return the uid of the pod and the id of the container; the unified hierarchy (v2) comes first."""
    lines = [line.split(":", 2) for line in cgroup.splitlines() if line.count(":") >= 2]
    paths = [path for _, _, path in sorted(lines, key=lambda line: line[0] != "0")]
    return next((ids for path in paths if any(ids := _ids_of(path.split("/")))), ("", ""))


def _ids_of(parts: Sequence[str]) -> tuple[str, str]:
    """Return the first ids in a path, from the root on: a container can create cgroups below its own."""
    pods = [(n, match) for n, part in enumerate(parts) if (match := _POD_PART.fullmatch(part)) is not None]
    first, pod = (pods[0][0], _uid(pods[0][1][1])) if pods else (0, "")
    containers = (match[1] for part in parts[first:] if (match := _CONTAINER_PART.fullmatch(part)) is not None)
    return pod, next(containers, "")


def _uid(text: str) -> str:
    return text.replace("_", "-")
