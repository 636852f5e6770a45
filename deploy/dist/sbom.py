"""Write the SBOM of a release: hookd, its C sources, and its runtime dependencies in the versions of the container image."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
import venv
from typing import TYPE_CHECKING, Any

from hatchling.metadata.core import ProjectMetadata
from hatchling.plugin.manager import PluginManager

if TYPE_CHECKING:
    from pathlib import Path


def write(source: Path, path: Path, environment: dict[str, str]) -> None:
    """Write it as CycloneDX JSON.

    The dependencies are installed into a new environment, in which cyclonedx-py reads their licenses and requirements.

    Args:
        source: the unpacked source distribution.
        path: of the file.
        environment: variables, with SOURCE_DATE_EPOCH, which becomes the time of the SBOM.

    Raises:
        subprocess.CalledProcessError: the dependencies cannot be installed or read.
    """
    with tempfile.TemporaryDirectory() as home:
        venv.create(home, with_pip=False)
        locked = source / "deploy" / "docker" / "requirements.txt"
        pip = [sys.executable, "-m", "pip", "--python", home, "--quiet", "--disable-pip-version-check"]
        _said(
            [*pip, "install", "--only-binary", ":all:", "--require-hashes", "--requirement", str(locked)], environment
        )
        reads = [sys.executable, "-m", "cyclonedx_py", "environment", "--output-reproducible", "--pyproject"]
        bom = json.loads(_said([*reads, str(source / "pyproject.toml"), home], environment))
    bom["metadata"]["component"] |= _hookd(source)
    path.write_text(json.dumps(bom, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _hookd(source: Path) -> dict[str, Any]:
    """Return what cyclonedx-py does not know of hookd: its version, which its code has, and its C sources."""
    version = ProjectMetadata(str(source), PluginManager()).version
    return {
        "version": version,
        "purl": f"pkg:pypi/hookd@{version}",
        "components": [_file(path, source) for path in sorted((source / "hookd" / "native").glob("*.[ch]"))],
    }


def _file(path: Path, source: Path) -> dict[str, Any]:
    name = str(path.relative_to(source))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return {"type": "file", "bom-ref": name, "name": name, "hashes": [{"alg": "SHA-256", "content": digest}]}


def _said(command: list[str], environment: dict[str, str]) -> str:
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
