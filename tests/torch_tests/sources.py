"""torch's own test files, of the version that runs: given as a directory, or fetched as Debian's source package."""

from __future__ import annotations

import re
import shutil
import subprocess
import tarfile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from tests.torch_tests.place import Place

LISTS = ("etc/apt/sources.list", "etc/apt/sources.list.d/*.list", "etc/apt/sources.list.d/*.sources")


def copy(sources: Path, directory: Path) -> None:
    """Copy `test/` of an unpacked source tree: tests write beside themselves.

    Raises:
        SystemExit: there is none.
    """
    if not (sources / "test" / "test_nn.py").exists():
        raise SystemExit(f"{sources} has no test/test_nn.py: name the top directory of torch's sources")
    shutil.copytree(sources / "test", directory / "test", symlinks=True)


def fetch(place: Place, directory: Path) -> None:
    """Fetch the source package of the root's torch and unpack `test/`.

    apt's configuration of the root is not changed: a copy of its list of archives, asked for sources, lies beside.

    Raises:
        SystemExit: the root's torch is not Debian's, or the archive does not have its source any more.
    """
    home = place.work / "apt"
    (home / "lists" / "partial").mkdir(parents=True)
    (home / "sources.d").mkdir()
    for pattern in LISTS:
        for file in place.root.glob(pattern):
            (home / "sources.d" / file.name).write_text(_asking_for_sources(file.read_text()))
    options = {"Dir::Etc::SourceList": "/dev/null", "Dir::Etc::SourceParts": home / "sources.d",
               "Dir::State::Lists": home / "lists", "APT::Sandbox::User": "root"}  # fmt: skip
    apt = ["apt-get", "-q", *(f"-o{key}={value}" for key, value in options.items())]
    try:
        package = place.output("dpkg-query", "-W", "-f", "${source:Package}=${source:Version}", "python3-torch")
        place.output(*apt, "update")
        place.output("env", f"--chdir={home}", *apt, "source", "--download-only", package)
    except subprocess.CalledProcessError as exc:
        raise SystemExit(f"no sources of the torch in {place.root}: {exc.stderr.strip()}") from exc
    (archive,) = home.glob("*.orig.tar.*")
    _unpack(archive, directory)


def _asking_for_sources(text: str) -> str:
    text = re.sub(r"^Types:.*", "Types: deb-src", text, flags=re.MULTILINE)
    return re.sub(r"^deb\s", "deb-src ", text, flags=re.MULTILINE)


def _unpack(archive: Path, directory: Path) -> None:
    """Unpack the files below `*/test/` of an archive."""
    with tarfile.open(archive) as tar:
        for member in tar:
            top, _, path = member.name.partition("/")
            if path.startswith("test/"):
                member.name = path
                if member.islnk():
                    member.linkname = member.linkname.removeprefix(top + "/")
                tar.extract(member, directory, filter="data")
