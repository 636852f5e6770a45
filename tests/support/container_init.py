"""Run a command in a container made by hand: what Docker does, without Docker. Started by `container.py`, as root.

Its one argument is a file of JSON, see `container.Box`. Four processes: this one makes the file system and stays outside; its
child enters the namespaces; that one's child is process 1 of the container; and its child is the command.
"""

import ctypes
import json
import os
import signal
import struct
import sys

NEWTIME, NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = (
    0x80, 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000,
)  # fmt: skip
NAMESPACES = {"time": NEWTIME, "uts": NEWUTS, "ipc": NEWIPC, "pid": NEWPID, "net": NEWNET}
RDONLY, REMOUNT, BIND, REC, PRIVATE, DETACH = 1, 32, 4096, 16384, 1 << 18, 2
HIDDEN = ("tmp", "var/tmp", "run", "dev/shm", "root", "home")
SYS_MOUNT_SETATTR, SYS_PIVOT_ROOT = 442, {"x86_64": 155, "aarch64": 41}[os.uname().machine]
DIE_WITH_PARENT = 1
libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> None:
    if result:
        code = ctypes.get_errno()
        sys.exit(f"container: {what}: {os.strerror(code)}")


def mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    words = [word.encode() or None for word in (source, target, kind)]
    check(libc.mount(*words, ctypes.c_ulong(flags), data.encode() or None), f"mount {source} on {target}")


def unshare(flags: int) -> None:
    check(libc.unshare(flags), f"unshare {flags:#x}")


def read_only(path: str) -> None:
    """Make a mount and all below it read-only: MOUNT_ATTR_RDONLY with AT_RECURSIVE."""
    attributes = ctypes.create_string_buffer(struct.pack("QQQQ", 1, 0, 0, 0), 32)
    check(libc.syscall(SYS_MOUNT_SETATTR, -100, path.encode(), 0x8000, attributes, 32), f"read-only {path}")


def fork() -> int:
    """Fork a child that dies with us; 0 in it."""
    child = os.fork()
    if not child:
        libc.prctl(DIE_WITH_PARENT, signal.SIGKILL)
    return child


def wait(child: int) -> None:
    """End as the child ended."""
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def build_root(box: dict) -> None:
    """Make the container's file system from another one and go into it."""
    unshare(NEWNS)
    mount("", "/", "", REC | PRIVATE)
    root = box["mount_point"]
    mount(box["root"], root, "", BIND | REC)
    if box["root"] != "/":
        mount("/dev", root + "/dev", "", BIND | REC)
    if box["read_only"]:
        read_only(root)
    mount("/proc", root + "/proc", "", BIND | REC)  # for ourselves: the command gets one of its own
    for name in HIDDEN:
        mount("tmpfs", f"{root}/{name}", "tmpfs", 0, "mode=0755" if name in ("run", "root", "home") else "mode=1777")
    for source, path in box["visible"]:
        os.makedirs(root + path, exist_ok=True)
        mount(source, root + path, "", BIND | REC)
        read_only(root + path)
    os.mkdir(f"{root}/home/user", 0o700)
    owner = box["user"] + box["uid"]
    os.chown(f"{root}/home/user", owner, owner)
    for name in HIDDEN:
        if f"/{name}" not in box["writable"]:
            mount("", f"{root}/{name}", "", REMOUNT | BIND | RDONLY)
    os.chdir(root)
    check(libc.syscall(SYS_PIVOT_ROOT, b".", b"."), "pivot_root")
    check(libc.umount2(b".", DETACH), "umount the old root")
    os.chdir("/")


def enter_user_namespace(box: dict) -> None:
    """Become root of a user namespace that does not map the host's users."""
    ours, theirs = os.pipe()
    reader, tell = os.pipe()
    child = fork()
    if child:
        os.read(ours, 1)
        for kind in ("uid", "gid"):
            with open(f"/proc/{child}/{kind}_map", "w") as file:
                file.write(f"0 {box['user']} 65536")
        os.write(tell, b"x")
        wait(child)
    unshare(NEWUSER)
    os.write(theirs, b"x")
    os.read(reader, 1)
    os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    libc.prctl(DIE_WITH_PARENT, signal.SIGKILL)  # a change of user takes it back


def enter_namespaces(box: dict) -> None:
    """Make the other namespaces, and go on in process 1 of them, or in this process if there is no pid namespace."""
    unshare(NEWNS)
    flags = 0
    for name in box["namespaces"]:
        flags |= NAMESPACES[name]
    unshare(flags)
    if "time" in box["namespaces"]:
        with open("/proc/self/timens_offsets", "w") as file:
            file.write("boottime 100000 0\nmonotonic 100000 0\n")
    if child := fork():
        wait(child)
    if box["proc"]:
        mount("proc", "/proc", "proc", 0, box["proc_options"])
    else:
        mount("tmpfs", "/proc", "tmpfs")
    if child := fork():
        wait(child)


def main() -> None:
    with open(sys.argv[1]) as file:
        box = json.load(file)
    build_root(box)
    if box["user"]:
        enter_user_namespace(box)
    enter_namespaces(box)
    if box["uid"]:
        os.setgroups([])
        os.setresgid(box["uid"], box["uid"], box["uid"])
        os.setresuid(box["uid"], box["uid"], box["uid"])
        libc.prctl(DIE_WITH_PARENT, signal.SIGKILL)
    os.chdir(box["cwd"])
    os.execve(box["command"][0], box["command"], box["env"])


main()
