"""A configuration that others can change is refused, with advice on how to fix it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hookd.errors import ConfigError
from hookd.tool import cli, config
from tests.support import acl

STRANGER = 54321
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to other users")


@pytest.fixture
def file(tmp_path):
    folder = tmp_path / "hookd"
    folder.mkdir(mode=0o755)
    path = folder / "hookd.toml"
    path.write_text("[serve]\nlinger_s = 5\n")
    return path


def refused(path, *words):
    """Check that the file is refused, with these words."""
    with pytest.raises(ConfigError) as caught:
        config.check(path)
    assert caught.value.reason == "unsafe-config"
    assert all(word in f"{caught.value} {caught.value.hint}" for word in words), caught.value


@pytest.mark.parametrize("is_root", [True, False])
def test_a_file_that_everybody_can_write_is_refused(file, is_root, monkeypatch):
    if not is_root:  # the check of the path is for root only
        monkeypatch.setattr(os, "geteuid", lambda: STRANGER)
    file.chmod(0o666)
    refused(file, "other users can write", f"chmod go-w {file}")


@needs_root
def test_a_file_that_another_group_can_write_is_refused_by_root(file):
    file.chmod(0o664)
    assert config.check(file)
    os.chown(file, 0, STRANGER)
    refused(file, "other users can write", f"chmod go-w {file}")


@needs_root
def test_a_file_of_another_user_is_refused_by_root(file):
    os.chown(file, STRANGER, 0)
    refused(file, f"belongs to user {STRANGER}", f"chown root {file}")


@needs_root
@pytest.mark.parametrize("depth", [0, 1])
def test_a_directory_of_another_user_on_the_way_is_refused_by_root(file, depth):
    os.chown(file.parents[depth], STRANGER, STRANGER)
    refused(file, f"{file.parents[depth]} belongs to user {STRANGER}")


@needs_root
@pytest.mark.parametrize("depth", [0, 1])
def test_a_directory_that_others_can_write_is_refused_unless_it_is_sticky(file, depth):
    file.parents[depth].chmod(0o777)
    refused(file, f"other users can write to {file.parents[depth]}")
    file.parents[depth].chmod(0o1777)
    assert config.check(file).linger_s == 5


@needs_root
def test_a_link_is_judged_by_all_that_it_leads_through(file, tmp_path):
    link = tmp_path / "link.toml"
    link.symlink_to(file)
    assert config.check(link).linger_s == 5
    file.parent.chmod(0o777)
    refused(link, f"other users can write to {file.parent}")
    file.parent.chmod(0o755)
    os.lchown(link, STRANGER, STRANGER)
    refused(link, f"{link} belongs to user {STRANGER}")


VERSION = "..2026_11_25_12_55_48.1234567890"
KUBELETS = "pods/0f1e/volumes/kubernetes.io~configmap/hookd"
CHECK = "import sys; from hookd.tool import cli; sys.exit(cli.main(['config', 'check', sys.argv[1]]))"


def volume(place, owner=0):
    """Lay out a directory as the kubelet does; return the path of the configuration in it."""
    (place / VERSION).mkdir(parents=True)
    place.chmod(0o777)
    (place / VERSION).chmod(0o755)
    (place / VERSION / "hookd.toml").write_text("[serve]\nlinger_s = 5\n")
    (place / VERSION / "hookd.toml").chmod(0o644)
    (place / "..data").symlink_to(VERSION)
    (place / "hookd.toml").symlink_to("..data/hookd.toml")
    os.lchown(place / "..data", owner, owner)
    return place / "hookd.toml"


@pytest.fixture
def in_mounts():
    """A function that checks a configuration in mounts of its own, which a script makes."""
    unshared = ["unshare", "--mount", "--propagation", "private", "sh", "-ec"]
    if os.geteuid() != 0 or subprocess.run([*unshared, "mount -t tmpfs none /mnt"], check=False).returncode:
        pytest.skip("mounts file systems")

    def run(script, path, *arguments):
        words = [*unshared, f'{script}\nexec "$0" -c "$1" "$2"', sys.executable, CHECK, path, *arguments]
        return subprocess.run(words, capture_output=True, text=True, check=False)

    return run


def is_refused(done, directory):
    return done.returncode == 2 and f"other users can write to {directory}" in done.stderr


def test_a_directory_that_is_read_only_to_the_daemon_alone_is_refused(file, in_mounts):
    """As under systemd's ProtectSystem=strict, and for a hostPath with readOnly: others see the directory as writable."""
    file.parent.chmod(0o777)
    for script in (
        'mount --bind / /; mount -o remount,bind,ro "$(stat -c %m "$3")"',
        'mount --bind "$3" "$3"; mount -o remount,bind,ro "$3"',
    ):
        done = in_mounts(script, file, file.parent)
        assert is_refused(done, file.parent), (script, done)


def test_a_configmap_of_kubernetes_is_taken(tmp_path, in_mounts):
    """On the node's disk, where the kubelet keeps them."""
    place, mounted = tmp_path / KUBELETS, tmp_path / "etc"
    volume(place)
    mounted.mkdir(mode=0o755)
    done = in_mounts('mount --bind "$3" "$4"; mount -o remount,bind,ro "$4"', mounted / "hookd.toml", place, mounted)
    assert done.returncode == 0, done
    done = in_mounts('mount --bind "$3" "$4"', mounted / "hookd.toml", place, mounted)
    assert is_refused(done, mounted)  # it is writable


@pytest.mark.parametrize(("owner", "options", "is_taken"), [(0, "ro", True), (STRANGER, "ro", False), (0, "rw", False)])
def test_a_secret_of_kubernetes_is_taken_if_root_has_laid_it_out(tmp_path, in_mounts, owner, options, is_taken):
    """On a tmpfs of its own."""
    mounted = tmp_path / "etc"
    mounted.mkdir(mode=0o755)
    script = f'mount -t tmpfs -o mode=777 none "$4"; cp -a "$3"/. "$4"; mount -o remount,bind,{options} "$4"'
    volume(tmp_path / "copied", owner)
    done = in_mounts(script, mounted / "hookd.toml", tmp_path / "copied", mounted)
    assert (done.returncode == 0) is is_taken, done
    assert is_taken or is_refused(done, mounted)


def test_a_read_only_tmpfs_that_is_no_volume_is_refused(tmp_path, file, in_mounts):
    mounted = tmp_path / "etc"
    mounted.mkdir(mode=0o755)
    script = 'mount -t tmpfs -o mode=777 none "$4"; cp "$3" "$4"; mount -o remount,bind,ro "$4"'
    assert is_refused(in_mounts(script, mounted / "hookd.toml", file, mounted), mounted)


def put_after_look(monkeypatch, file, other):
    """Replace a file with another one right after its check."""
    real = Path.lstat

    def lstat(path):
        found = real(path)
        if path == file and other.exists():
            other.replace(file)
        return found

    monkeypatch.setattr(Path, "lstat", lstat)


@needs_root
def test_a_file_that_is_replaced_after_the_check_is_not_read(file, monkeypatch):
    other = file.parent / "other.toml"
    other.write_text("[serve]\nlinger_s = 6\n")
    os.chown(other, STRANGER, STRANGER)
    put_after_look(monkeypatch, file, other)
    refused(file, "was replaced while it was checked")


@needs_root
def test_an_access_control_list_by_which_another_user_writes_is_refused_by_root(file):
    acl.grant(file, STRANGER, 4)
    assert config.check(file).linger_s == 5
    acl.grant(file, STRANGER, 6)
    refused(file, f"lets others write to {file}", f"setfacl -b {file}")


@needs_root
@pytest.mark.parametrize("depth", [0, 1])
def test_an_access_control_list_of_a_directory_on_the_way_is_refused_by_root(file, depth):
    acl.grant(file.parents[depth], STRANGER, 5)
    assert config.check(file).linger_s == 5
    acl.grant(file.parents[depth], STRANGER, 7)
    refused(file, f"lets others write to {file.parents[depth]}", f"setfacl -b {file.parents[depth]}")


@needs_root
def test_a_pipe_is_read_as_the_shell_gives_it():
    reads, writes = os.pipe()
    os.write(writes, b"[serve]\nlinger_s = 7\n")
    os.close(writes)
    try:
        assert config.check(Path(f"/dev/fd/{reads}")).linger_s == 7
    finally:
        os.close(reads)


@needs_root
def test_a_file_without_a_name_is_read_as_the_shell_gives_it(tmp_path):
    with (tmp_path / "here").open("w+") as file:
        (tmp_path / "here").unlink()
        file.write("[serve]\nlinger_s = 8\n")
        file.flush()
        assert config.check(Path(f"/dev/fd/{file.fileno()}")).linger_s == 8
        os.fchown(file.fileno(), STRANGER, STRANGER)
        refused(Path(f"/dev/fd/{file.fileno()}"), f"belongs to user {STRANGER}")


def test_check_and_serve_say_what_to_do(file, tmp_path, capsys):
    file.chmod(0o666)
    assert cli.main(["config", "check", str(file)]) == 2
    assert f"chmod go-w {file}" in capsys.readouterr().err
    assert cli.main(["serve", "--config", str(file), "--listen", "127.0.0.1:0", "--state-dir", str(tmp_path)]) == 2
    assert f"chmod go-w {file}" in capsys.readouterr().err


def test_check_warns_of_password_hashes_that_others_can_read(file, capsys):
    web = file.parent / "web-config.yml"
    web.write_text("basic_auth_users:\n  alice: $2b$04$Ovq8t8Fd3nI6b6xjgZqVFuJ1HCiPKwBsFfKsuAWJ5q0oLrO1dS.1K\n")
    web.chmod(0o644)
    file.write_text(f'[serve]\nweb_config = "{web}"\n')
    assert cli.main(["config", "check", str(file)]) == 0
    assert f"chmod go= {web}" in capsys.readouterr().err
