"""What a Python process runs, from its command line: a launcher, a helper, or a program that may train.

The tool asks it of others (`discover`), and under `hookd run` each process of itself: the file is laid beside
`_site/sitecustomize.py` and executed there at the start of every interpreter. So it imports nothing.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

# What stands in a command line of a process that serves a training process and is none itself.
HELPERS = (
    ("multiprocessing.resource_tracker", "multiprocessing's resource tracker"),
    ("torch/_inductor/compile_worker", "a compile worker of torch"),
    ("torch._inductor.compile_worker", "a compile worker of torch"),
)
_SCRIPTS = ("torchrun", "accelerate", "accelerate-launch", "deepspeed")
_MODULES = ("torch.distributed.run", "torch.distributed.launch")
_PACKAGES = ("accelerate.commands", "deepspeed.launcher")


def program(words: "Sequence[str]") -> "tuple[str, bool]":
    """Find what a Python process runs: the script's path, or the module's name and True; ("", False) for code.

    Options are read as the interpreter reads them: Python/getopt.c, 3.14.

    Args:
        words: the command line, with the interpreter's name first.
    """
    rest = iter(words[1:])
    for word in rest:
        if word == "--check-hash-based-pycs":
            next(rest, "")
        elif word == "--":
            return next(rest, ""), False
        elif word.startswith("--"):
            continue
        elif not word.startswith("-"):
            return word, False
        elif word == "-":
            return "", False
        else:
            option, argument = _with_argument(word)
            if option == "c":
                return "", False
            if option and not argument:
                argument = next(rest, "")
            if option == "m":
                return argument, True
    return "", False


def _with_argument(word: str) -> "tuple[str, str]":
    """Give the option of a word such as `-uX` that takes an argument, and as much of that as the word holds."""
    for i, letter in enumerate(word):
        if letter in "cmWX":
            return letter, word[i + 1 :]
    return "", ""


def is_launcher(words: "Sequence[str]") -> bool:
    """Whether it starts training processes and is none itself: torchrun, accelerate or deepspeed."""
    name, is_module = program(words)
    if not is_module:
        directory, _, file = name.rpartition("/")
        if file in _SCRIPTS:
            return True
        name = (directory + "/" + file[:-3]).replace("/", ".") if file.endswith(".py") else ""
    module = "." + name
    return module.endswith(tuple("." + one for one in _MODULES)) or any(
        module.rpartition(".")[0].endswith("." + package) for package in _PACKAGES
    )


def helper(words: "Sequence[str]") -> str:
    """Say what it is if it serves a training process and is none itself, such as a compile worker; else ""."""
    text = "\0".join(words)
    return next((what for mark, what in HELPERS if mark in text), "")
