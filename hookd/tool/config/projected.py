"""Recognize the volumes of ConfigMaps and Secrets, whose directories anybody could write to by their mode. Tool side.

The kubelet gives such a directory the mode 0777 and mounts it read-only into every container. That a mount is read-only
says nothing by itself: it holds for this process's view alone (`ProtectSystem=strict`, a hostPath with `readOnly`), while
others go on writing through theirs. Source: pkg/volume/configmap and pkg/volume/util/atomic_writer.go of Kubernetes.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

_VERSION = re.compile(r"\.\.\d{4}(_\d\d){5}\.\d+")
"""The name of the directory that holds one version of all files: ..2026_11_25_12_55_48.1234567890."""
# On the node this directory lies below /var/lib/kubelet/pods, which no user but root can enter.
_ON_DISK = re.compile(r"/pods/[^/]+/volumes/kubernetes\.io~(configmap|secret|projected)/[^/]+")
_ESCAPE = re.compile(r"\\([0-7]{3})")


def is_projected(directory: Path) -> bool:
    """Whether this directory is a volume of a ConfigMap, a Secret or both (`projected`), which only the kubelet changes."""
    return _is_mounted_so(directory) and _has_versions(directory)


def _is_mounted_so(directory: Path) -> bool:
    """Whether it is the root of a read-only mount: of a tmpfs, or of a directory that the kubelet has on its disk."""
    real, found = os.path.realpath(directory), False
    for line in os.fsdecode(Path("/proc/self/mountinfo").read_bytes()).splitlines():
        _, _, _, root, point, options, *rest = line.split(" ")
        if _unescaped(point) == real:  # the last one covers the others
            is_tmpfs = root == "/" and rest[rest.index("-") + 1] == "tmpfs"
            is_kubelets = is_tmpfs or _ON_DISK.search(_unescaped(root)) is not None
            found = is_kubelets and "ro" in options.split(",")
    return found


def _has_versions(directory: Path) -> bool:
    """Whether root has laid it out as the kubelet does: `..data` links to the present version."""
    link = directory / "..data"
    try:
        name = str(link.readlink())
        owners = {path.lstat().st_uid for path in (directory, link, directory / name)}
        mode = (directory / name).lstat().st_mode
    except OSError:
        return False
    return _VERSION.fullmatch(name) is not None and owners == {0} and stat.S_ISDIR(mode) and not mode & stat.S_IWOTH


def _unescaped(path: str) -> str:
    return _ESCAPE.sub(lambda found: chr(int(found[1], 8)), path)
