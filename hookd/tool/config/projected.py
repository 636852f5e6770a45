"""Recognize volumes of ConfigMaps and Secrets, whose mode is world-writable.

The kubelet gives such a directory the mode 0777 and mounts it read-only into every container. A read-only mount alone is not
enough: it may be read-only for this process only (`ProtectSystem=strict`, a hostPath with `readOnly`), while others write
through their own mounts. Source: pkg/volume/configmap and pkg/volume/util/atomic_writer.go of Kubernetes.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

_VERSION = re.compile(r"\.\.\d{4}(_\d\d){5}\.\d+")
"""Name of the directory with one version of all files: ..2026_11_25_12_55_48.1234567890."""
# On the node this directory is below /var/lib/kubelet/pods, which only root can enter.
_ON_DISK = re.compile(r"/pods/[^/]+/volumes/kubernetes\.io~(configmap|secret|projected)/[^/]+")
_ESCAPE = re.compile(r"\\([0-7]{3})")


def is_projected(directory: Path) -> bool:
    """Whether a directory is a volume that only the kubelet changes.

    That is a volume of a ConfigMap, a Secret or both (`projected`).
    """
    return _is_mounted_so(directory) and _has_versions(directory)


def _is_mounted_so(directory: Path) -> bool:
    """Whether it is the root of a read-only mount: a tmpfs, or a directory on the kubelet's disk."""
    real, is_mount = os.path.realpath(directory), False
    for line in os.fsdecode(Path("/proc/self/mountinfo").read_bytes()).splitlines():
        _, _, _, root, point, options, *rest = line.split(" ")
        if _unescaped(point) == real:  # the last mount hides the earlier ones
            is_tmpfs = root == "/" and rest[rest.index("-") + 1] == "tmpfs"
            is_kubelets = is_tmpfs or _ON_DISK.search(_unescaped(root)) is not None
            is_mount = is_kubelets and "ro" in options.split(",")
    return is_mount


def _has_versions(directory: Path) -> bool:
    """Whether it is root's and laid out by the kubelet: `..data` links to the current version."""
    link = directory / "..data"
    try:
        name = str(link.readlink())
        owners = {path.lstat().st_uid for path in (directory, link, directory / name)}
        mode = (directory / name).lstat().st_mode
    except OSError:
        return False
    return _VERSION.fullmatch(name) is not None and owners == {0} and stat.S_ISDIR(mode) and not mode & stat.S_IWOTH


def _unescaped(path: str) -> str:
    return _ESCAPE.sub(lambda match: chr(int(match[1], 8)), path)
