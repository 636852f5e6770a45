"""Make a Debian root of 64-bit ARM on another machine: packages are unpacked, and nothing of them is run.

Python, torch, numpy and a C compiler are Debian's; what the tests need beside them are wheels, of the versions of this environment's
package index. Takes two minutes, 300 MB of downloads, and 1.5 GB of disk.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SUITE, MINOR = "trixie", "3.13"
PACKAGES = (
    "base-files base-passwd bash coreutils dash diffutils findutils grep gzip hostname libc-bin mount ncurses-base procps sed tar "
    "util-linux gcc libc6-dev python3 python3-venv python3-pip python3-torch python3-numpy"
).split()
WHEELS = (
    "pluggy>=1.7 psutil prometheus-client click==8.5.1 rich textual aiohttp PyYAML bcrypt packaging pytest pytest-xdist "
    "pytest-timeout hypothesis xxhash pyelftools freezegun setproctitle pyfakefs time-machine jsonschema hatchling editables "
    "expecttest griffelib check-jsonschema kubernetes-validate opentelemetry-exporter-otlp-proto-http gevent eventlet import-linter mypy setuptools tensorboard "
    "grafana-foundation-sdk==0.0.21 mkdocs"
).split()
_NEWEST_GLIBC = 41


def make(root: Path) -> None:
    """Make the root, unless it is there.

    Raises:
        subprocess.CalledProcessError: a download failed.
        ValueError: this machine's apt has no Debian mirror.
    """
    if (root / ".ready").exists():
        return
    shutil.rmtree(root, ignore_errors=True)
    for name in ("usr/bin", "usr/lib", "usr/sbin", "dev", "proc", "run", "sys", "tmp", "etc"):
        (root / name).mkdir(parents=True)
    for name in ("bin", "lib", "sbin"):
        (root / name).symlink_to(f"usr/{name}")
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda package: _unpack(package, root), _downloaded(root.with_name(f"{root.name}.packages"))))
    _configure(root)
    _install(root / f"usr/local/lib/python{MINOR}/dist-packages")
    (root / ".ready").touch()


def _mirror() -> str:
    for path in (*Path("/etc/apt/sources.list.d").glob("*.sources"), *Path("/etc/apt").glob("sources.list")):
        for word in path.read_text().split():
            if word.rstrip("/").endswith("/debian"):
                return word
    raise ValueError("no Debian mirror in /etc/apt")


def _downloaded(place: Path) -> list[Path]:
    for name in ("lists/partial", "archives/partial"):
        (place / name).mkdir(parents=True, exist_ok=True)
    (place / "status").touch()
    (place / "sources.list").write_text(f"deb [trusted=yes] {_mirror()} {SUITE} main\n")
    options = {
        "APT::Architecture": "arm64", "APT::Architectures": "arm64", "APT::Install-Recommends": "false",
        "APT::Sandbox::User": "root", "Acquire::Check-Valid-Until": "false", "Acquire::Languages": "none",
        "Debug::NoLocking": "1", "Dir::Cache": place, "Dir::Cache::archives": place / "archives",
        "Dir::Etc::sourcelist": place / "sources.list", "Dir::Etc::sourceparts": "/dev/null",
        "Dir::Etc::preferences": "/dev/null", "Dir::Etc::preferencesparts": "/dev/null",
        "Dir::State::lists": place / "lists", "Dir::State::status": place / "status",
    }  # fmt: skip
    apt = ["apt-get", "-qq", "-y", *(f"-o{name}={value}" for name, value in options.items())]
    subprocess.run([*apt, "update"], check=True)
    subprocess.run([*apt, "--download-only", "install", *PACKAGES], check=True)
    return sorted((place / "archives").glob("*.deb"))


def _unpack(package: Path, root: Path) -> None:
    with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", package], stdout=subprocess.PIPE) as tar:
        subprocess.run(["tar", "-x", "-C", root, "--keep-directory-symlink"], stdin=tar.stdout, check=True)


def _configure(root: Path) -> None:
    """Replace the packages' own scripts, as far as the tests need it."""
    for name in ("passwd", "group"):
        shutil.copy(root / f"usr/share/base-passwd/{name}.master", root / "etc" / name)
    libraries = root / "usr/lib/aarch64-linux-gnu"
    for name in ("blas", "lapack"):
        (libraries / f"lib{name}.so.3").symlink_to(f"{name}/lib{name}.so.3")
    (root / "usr/bin/cc").symlink_to("gcc")
    (root / "etc/hosts").write_text("127.0.0.1 localhost\n")
    certificates = root / "etc/ssl/certs/ca-certificates.crt"  # pip reads it even where it fetches nothing
    certificates.parent.mkdir(parents=True, exist_ok=True)
    certificates.write_bytes(
        b"".join(p.read_bytes() for p in sorted((root / "usr/share/ca-certificates").rglob("*.crt")))
    )
    (root / "tmp").chmod(0o1777)


def _install(place: Path) -> None:
    tags = [f"--platform=manylinux_2_{minor}_aarch64" for minor in range(17, _NEWEST_GLIBC + 1)]
    tags += ["--platform=manylinux2014_aarch64", *(f"--abi={abi}" for abi in ("cp313", "abi3", "none"))]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
    how = ["--only-binary=:all:", f"--python-version={MINOR}", "--implementation=cp", *tags, "--target", place]
    subprocess.run([*pip, *how, *WHEELS], check=True)
    for numpy in place.glob("numpy*"):  # brought along by another package: torch is Debian's, and so is its numpy
        shutil.rmtree(numpy)
