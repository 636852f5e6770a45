"""Classify a Python process by its command line: a launcher, a helper, or a program that may train.

The tool applies this to other processes (`discover`). Under `hookd run` each process applies it to itself: the file is copied
next to `_site/sitecustomize.py` and executed at the start of every interpreter. Therefore it imports nothing.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

# Command line substrings of processes that serve a training process and do not train.
HELPERS = (
    ("multiprocessing.resource_tracker", "multiprocessing's resource tracker"),
    ("torch/_inductor/compile_worker", "a compile worker of torch"),
    ("torch._inductor.compile_worker", "a compile worker of torch"),
)
_SCRIPTS = ("torchrun", "accelerate", "accelerate-launch", "deepspeed")
_MODULES = ("torch.distributed.run", "torch.distributed.launch")
_PACKAGES = ("accelerate.commands", "deepspeed.launcher")


def program(words: "Sequence[str]") -> "tuple[str, bool]":
    """Return the program that a Python process runs.

    Options are parsed as the interpreter does: Python/getopt.c, 3.14.

    Args:
        words: the command line, with the interpreter's name first.

    Returns:
        The script's path and False, or the module's name and True; ("", False) for code.
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
    """Return the option with an argument in a word such as `-uX`, and the part of the argument in this word."""
    for i, letter in enumerate(word):
        if letter in "cmWX":
            return letter, word[i + 1 :]
    return "", ""


def is_launcher(words: "Sequence[str]") -> bool:
    """Whether the process only starts training processes: torchrun, accelerate or deepspeed."""
    name, is_module = program(words)
    if not is_module:
        directory, _, file = name.rpartition("/")
        if file in _SCRIPTS:
            return True
        name = (directory + "/" + file[:-3]).replace("/", ".") if file.endswith(".py") else ""
    module = "." + name
    return module.endswith(tuple("." + launcher for launcher in _MODULES)) or any(
        module.rpartition(".")[0].endswith("." + package) for package in _PACKAGES
    )


def helper(words: "Sequence[str]") -> str:
    """Return the kind of helper, such as a compile worker; "" for any other process."""
    text = "\0".join(words)
    return next((what for mark, what in HELPERS if mark in text), "")
