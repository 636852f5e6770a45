"""Where a target runs, from the texts that kernels and container engines really write, and from hostile ones."""

from __future__ import annotations

import os

import pytest

from hookd.tool.attach import container
from hookd.tool.attach.container import Container

ID = "0f3e9b7c51d24a86be6d7c1a95f0837264e1b2c3d4e5f60718293a4b5c6d7e8f"
INNER = "a" * 64
UID = "6f8b1c1e-3f0a-4b7d-9d55-2f5f3c7f9a10"
ESCAPED = UID.replace("-", "_")
POD_V1 = f"/kubepods/burstable/pod{UID}/{ID}"
SYSTEMD = f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{ESCAPED}.slice"
KIND = "/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-besteffort.slice"
ROOTLESS = "/user.slice/user-1000.slice/user@1000.service/user.slice"


def v1(path: str) -> str:
    """Return the text of a machine with version 1, where each controller has a line."""
    controllers = ("cpuset", "memory", "pids", "cpu,cpuacct", "name=systemd")
    return "".join(f"{12 - n}:{name}:{path}\n" for n, name in enumerate(controllers))


IN_PODS = {
    "containerd, systemd driver": f"0::{SYSTEMD}/cri-containerd-{ID}.scope\n",
    "containerd, cgroupfs driver": f"0::{POD_V1}\n",
    "containerd, version 1": v1(POD_V1),
    "containerd, version 1, systemd driver": v1(f"{SYSTEMD}/cri-containerd-{ID}.scope"),
    "containerd with systemd set by the kubelet alone": v1(
        f"/system.slice/containerd.service/kubepods-burstable-pod{ESCAPED}.slice:cri-containerd:{ID}"
    ),
    "guaranteed, no class of service": f"0::/kubepods.slice/kubepods-pod{ESCAPED}.slice/cri-containerd-{ID}.scope\n",
    "cri-o": f"0::{SYSTEMD}/crio-{ID}.scope\n",
    "cri-o, a cgroup of the container's own below": f"0::{SYSTEMD}/crio-{ID}.scope/container\n",
    "cri-o, cgroupfs driver": f"0::{POD_V1.replace(ID, 'crio-' + ID)}\n",
    "docker below the kubelet": v1(f"{SYSTEMD}/docker-{ID}.scope"),
    "version 1 and 2 side by side, names in the first": v1(POD_V1) + "0::/\n",
    "version 1 and 2 side by side, names in the second": v1("/") + f"0::{POD_V1}\n",
    "version 1 and 2 side by side, other names in the first": v1(f"/docker/{INNER}") + f"0::{POD_V1}\n",
    "kind: a node that is a container itself": (
        f"0::/docker/{INNER}{KIND}/kubelet-kubepods-besteffort-pod{ESCAPED}.slice/cri-containerd-{ID}.scope\n"
    ),
    "seen from a container's own cgroup namespace": f"0::/../../kubepods-burstable-pod{ESCAPED}.slice/crio-{ID}.scope\n",
    "the same, cgroupfs driver": f"0::/../../pod{UID}/{ID}\n",
}
IN_CONTAINERS = {
    "docker, systemd driver": f"0::/system.slice/docker-{ID}.scope\n",
    "docker, cgroupfs driver": v1(f"/docker/{ID}"),
    "podman, root": f"0::/machine.slice/libpod-{ID}.scope/container\n",
    "podman, rootless": f"0::{ROOTLESS}/libpod-{ID}.scope/container\n",
    "the neighbour in one pod, seen from its cgroup namespace": f"0::/../cri-containerd-{ID}.scope\n",
    "containerd, by nerdctl": f"0::/system.slice/nerdctl-{ID}.scope\n",
}
ELSEWHERE = {
    "the machine itself": "0::/user.slice/user-1000.slice/session-4.scope\n",
    "a service": v1("/system.slice/slurmd.service"),
    "Slurm": "0::/system.slice/slurmstepd.scope/job_42/step_0/user/task_0\n",
    "a namespace of its own": "0::/\n",
    "nothing": "",
    "no line at all": "\x00\x00::::\n:\n",
    "podman's monitor": f"0::/machine.slice/libpod-conmon-{ID}.scope\n",
    "an id that is too short": "0::/docker/0123456789ab\n",
    "a uid that is none": f"0::/kubepods/pod{UID[:-1]}g/x\n",
}


@pytest.mark.parametrize("text", IN_PODS.values(), ids=IN_PODS)
def test_pod_and_container_are_known_by_their_ids(text):
    assert container.where(text, {}) == Container(UID, "", ID[:12])


@pytest.mark.parametrize("text", IN_CONTAINERS.values(), ids=IN_CONTAINERS)
def test_a_container_without_a_pod_has_its_id(text):
    assert container.where(text, {}) == Container("", "", ID[:12])


@pytest.mark.parametrize("text", ELSEWHERE.values(), ids=ELSEWHERE)
def test_what_is_in_no_container_has_no_names(text):
    assert container.where(text, {}) == container.NO_CONTAINER


def test_the_pod_of_a_file_of_the_kubelet_has_a_uid_without_dashes():
    uid = UID.replace("-", "")
    assert container.where(f"0::/kubepods/besteffort/pod{uid}/{ID}\n", {}) == Container(uid, "", ID[:12])


def test_the_manifests_names_come_before_the_ids():
    environ = {"POD_NAME": "bert-worker-0", "POD_NAMESPACE": "research", "CONTAINER_NAME": "pytorch"}
    assert container.where(f"0::{POD_V1}\n", environ) == Container("bert-worker-0", "research", "pytorch")
    assert container.where("0::/\n", {**environ, "HOOKD_POD": "mine"}).pod == "mine"


@pytest.mark.parametrize(
    "value",
    [
        "",
        "Upper",
        "a b",
        'x",run="y',
        "a\nb",
        "a\n",
        "-a",
        "a-",
        "a" * 254,
        ".".join(["a" * 64] * 2),
        "ä",
        "a..b",
        "\udcff",
    ],
)
def test_a_name_that_kubernetes_would_refuse_is_not_believed(value):
    environ = {"POD_NAME": value, "POD_NAMESPACE": value, "CONTAINER_NAME": value}
    assert container.where("0::/\n", environ) == container.NO_CONTAINER


def test_a_pods_name_may_have_dots_and_a_namespaces_may_not():
    environ = {"POD_NAME": "web.example", "POD_NAMESPACE": "web.example"}
    assert container.where("", environ) == Container("web.example", "", "")


def test_what_a_container_makes_below_its_own_cgroup_is_not_believed():
    forged = UID.replace("6", "7")
    text = f"0::{POD_V1}/kubepods/pod{forged}/{INNER}\n"
    assert container.where(text, {}) == Container(UID, "", ID[:12])


def test_a_long_text_is_read_in_no_time():
    text = "0::" + "/kubepods-pod" * 5000 + "/" + "a-" * 30_000 + "\n"
    assert container.where(text, {"POD_NAME": "a" * 100_000}) == container.NO_CONTAINER


def test_a_process_that_is_gone_is_nowhere():
    assert container.of_process(2**22 + 1) == container.NO_CONTAINER
    assert isinstance(container.of_process(os.getpid()), Container)
