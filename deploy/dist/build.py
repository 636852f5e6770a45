"""Build a release of the last commit: a source distribution, a wheel for each machine, an SBOM and checksums.

    make dist

makes an environment of the packages in requirements.txt, and runs this script in it. What is not committed does not get into a
release. Two builds of a commit are identical byte for byte, in whichever directory.
"""

from __future__ import annotations

import hashlib
import os
import runpy
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import objects
import sbom

ROOT = Path(__file__).parents[2]
HATCHLING = [sys.executable, "-m", "hatchling", "build", "--target"]


def release(directory: Path) -> list[Path]:
    """Write the files of a release into an empty directory; return their paths.

    The wheels are built from the source distribution, so that it is known to be complete.

    Raises:
        subprocess.CalledProcessError: a step failed.
        ValueError: a shared object needs more than every Python on Linux has.
    """
    environment = {**os.environ, "SOURCE_DATE_EPOCH": _said("git", "log", "-1", "--format=%ct"), "LC_ALL": "C.UTF-8"}
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch, "tree")
        _export(tree)
        _run(*HATCHLING, "sdist", "--directory", directory, cwd=tree, env=environment)
        (archive,) = directory.glob("*.tar.gz")
        shutil.unpack_archive(archive, scratch)
        source = Path(scratch, archive.name.removesuffix(".tar.gz"))
        for machine in runpy.run_path(str(source / "hookd" / "native" / "build.py"))["MACHINES"]:
            of_machine = {**environment, "HOOKD_WHEEL_MACHINE": machine}
            _run(*HATCHLING, "wheel", "--directory", directory, cwd=source, env=of_machine)
            objects.check(next(directory.glob(f"*_{machine}.whl")), machine)
        _run(sys.executable, "-m", "twine", "check", "--strict", *sorted(directory.iterdir()))
        sbom.write(source, directory / f"{source.name}.cdx.json", environment)
    return [*sorted(directory.iterdir()), _checksums(directory)]


def _export(tree: Path) -> None:
    """Write the files of the last commit."""
    if _said("git", "status", "--porcelain"):
        sys.stderr.write("not everything is committed; the release is of the last commit\n")
    archive = tree.with_suffix(".tar")
    _run("git", "archive", "--output", archive, "HEAD")
    shutil.unpack_archive(archive, tree)


def _checksums(directory: Path) -> Path:
    """Write SHA256SUMS, as `sha256sum --check` reads it."""
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sorted(directory.iterdir())]
    written = directory / "SHA256SUMS"
    written.write_text("".join(lines), encoding="ascii")
    return written


def _said(*command: str) -> str:
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def _run(*command: str | Path, cwd: Path = ROOT, env: dict[str, str] | None = None) -> None:
    subprocess.run(command, cwd=cwd, env=env, check=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def main() -> None:
    """Replace dist/ by a release; leave it as it is if there is none."""
    target = ROOT / "dist"
    try:
        with tempfile.TemporaryDirectory() as scratch:
            made = release(Path(scratch))
            shutil.rmtree(target, ignore_errors=True)
            target.mkdir(parents=True)
            for path in made:
                sys.stdout.write(f"{shutil.copy(path, target)}\n")
    except subprocess.CalledProcessError as error:
        sys.exit(f"no release: {shlex.join(map(str, error.cmd))} failed: {error.stderr or error.stdout}")
    except (OSError, ValueError) as error:
        sys.exit(f"no release: {error}")


if __name__ == "__main__":
    main()
