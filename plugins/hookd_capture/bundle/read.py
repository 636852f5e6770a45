"""Read a bundle and recreate its module and arguments, in the process of `hookd replay`.

Nothing in a bundle is run or looked up by path. A module is created without its `__init__`: an empty object of its class
gets the attributes in the bundle. Classes are those of torch.nn; others only if the user has allowed the import.
"""

from __future__ import annotations

import ast
import collections
import importlib
import os
import stat
import sys
import types
import weakref
from typing import TYPE_CHECKING, Any, cast

import torch

from hookd import HookdError
from hookd_capture.bundle import tensorfile
from hookd_capture.bundle.describe import is_data
from hookd_capture.bundle.tensorfile import FormatError
from hookd_capture.bundle.write import TENSORS, TEXT

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from hookd_capture.bundle.manifest import Manifest, ModuleRecord, TensorRecord

LONGEST_TEXT = 64 << 20
_MOST_STRETCHED = 16
_DEFINING = (ast.Import, ast.ImportFrom, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_FUNCTIONS_OF = ("torch.nn.functional", "torch._C._nn")
_SOURCE = "hookd_replay_source"


class BundleError(HookdError):
    """The bundle or the request is wrong; exit code 2."""

    exit_code = 2
    reason = "bundle"


class Gone:
    """Placeholder for a value that could not be saved; raises an error when it is used."""

    def __init__(self, what: str, path: str) -> None:
        self.__dict__.update(what=what, path=path)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{self.path} ({self.what}) is not in the bundle, but its {name!r} is needed")

    def __call__(self, *_: object, **__: object) -> Any:
        """Raise: the value is not in the bundle."""
        raise TypeError(f"{self.path} ({self.what}) is not in the bundle, but it is called")


def read(path: Path) -> tuple[Manifest, dict[str, Tensor]]:
    """Read the two files of a bundle.

    Raises:
        BundleError: a file is missing, truncated or invalid.
    """
    if not path.is_dir():
        raise BundleError(f"{path} is not a directory", hint="A bundle is a directory with bundle.json in it.")
    if path.name.endswith(".part"):
        raise BundleError(f"{path} was never finished: the process ended while it wrote the bundle")
    text, data = _contents(path / TEXT, LONGEST_TEXT), _contents(path / TENSORS, None)
    try:
        found = tensorfile.parse(bytes(text))
    except FormatError as error:
        raise BundleError(f"{path / TEXT}: {error}") from None
    if found.get("format") != "hookd bundle" or found.get("version") != 1:
        what = f"format {found.get('format')!r}, version {found.get('version')!r}"
        raise BundleError(f"{path / TEXT} is not a bundle that this hookd can read ({what})")
    try:
        return cast("Manifest", found), tensorfile.read(data)
    except FormatError as error:
        raise BundleError(f"{path / TENSORS}: {error}") from None


def _contents(path: Path, most: int | None) -> bytearray:
    """Read a regular file; refuse pipes, which may never end, and symbolic links, which lead elsewhere."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise BundleError(f"{path} cannot be read: {error.strerror}") from None
    with os.fdopen(fd, "rb") as file:
        about = os.fstat(fd)
        if not stat.S_ISREG(about.st_mode):
            raise BundleError(f"{path} is not a regular file")
        if most is not None and about.st_size > most:
            raise BundleError(f"{path} has {about.st_size} bytes, but at most {most} are allowed")
        data = bytearray(about.st_size)
        del data[file.readinto(data) or 0 :]
        return data


class Classes:
    """Finds the classes of modules.

    Args:
        allowed: names of Python modules from which classes may be imported, submodules included.
        source: the file of the training script, for classes in `__main__`.
    """

    def __init__(self, allowed: Sequence[str], source: Path | None) -> None:
        self._allowed, self._source = tuple(allowed), source
        self._names: dict[str, Any] | None = None

    def find(self, module: str, qualname: str, path: str) -> type[torch.nn.Module]:
        """Return a class.

        Args:
            module: name of its Python module.
            qualname: qualified name of the class.
            path: path of the module object in the bundle, for messages.

        Raises:
            BundleError: it must not be imported, or cannot be.
        """
        if not all(part.isidentifier() for part in [*module.split("."), *qualname.split(".")]):
            raise BundleError(f"{path}: {module}.{qualname} is not the name of a class", reason="import")
        found: Any = self._module(module, qualname, path)
        for part in qualname.split("."):
            found = found.get(part) if isinstance(found, dict) else getattr(found, part, None)
        if not (isinstance(found, type) and issubclass(found, torch.nn.Module)):
            raise BundleError(f"{path}: there is no module class {qualname!r} in {module}", reason="import")
        if module.startswith("torch.") and not found.__module__.startswith("torch.nn."):
            raise BundleError(f"{path}: {qualname!r} in {module} is not torch's own", reason="import")
        return found

    def _module(self, module: str, qualname: str, path: str) -> Any:
        if module == "__main__":
            return self._script(qualname, path)
        if not module.startswith("torch.nn.") and not any(f"{module}.".startswith(f"{one}.") for one in self._allowed):
            hint = f"Add --allow-import {module.partition('.')[0]} if you trust that code: importing runs it."
            raise BundleError(f"{path} is a {qualname} of {module}, which is not torch's", reason="import", hint=hint)
        try:
            return importlib.import_module(module)
        except Exception as error:  # noqa: BLE001 - the user's code runs here
            hint = "Name the interpreter of the training's environment with --python."
            what = f"{path}: {module} cannot be imported: {type(error).__name__}: {error}"
            raise BundleError(what, reason="import", hint=hint) from error

    def _script(self, qualname: str, path: str) -> dict[str, Any]:
        if self._source is None:
            hint = "Name that script with --source FILE: only its imports, classes and functions are run."
            raise BundleError(f"{path} is a {qualname} of the training script itself", reason="import", hint=hint)
        if self._names is None:
            self._names = _definitions(self._source)
        return self._names


def _definitions(source: Path) -> dict[str, Any]:
    """Run only the imports, classes, functions, and assignments without a call of a script."""
    try:
        tree = ast.parse(source.read_bytes(), str(source))
        tree.body = [one for one in tree.body if isinstance(one, _DEFINING) or _is_constant(one)]
        module = types.ModuleType(_SOURCE)
        module.__file__ = str(source)
        sys.modules[_SOURCE] = module  # dataclasses look up their module
        sys.path.insert(0, str(source.absolute().parent))
        exec(compile(tree, str(source), "exec"), vars(module))  # noqa: S102 - the user has asked for it
    except Exception as error:  # noqa: BLE001 - the user's code runs here
        what = f"{source} cannot be used: {type(error).__name__}: {error}"
        raise BundleError(what, reason="import") from error
    return vars(module)


def _is_constant(statement: ast.stmt) -> bool:
    is_assignment = isinstance(statement, (ast.Assign, ast.AnnAssign))
    return is_assignment and not any(isinstance(one, (ast.Call, ast.Await)) for one in ast.walk(statement))


class Scene:
    """The recreated module and its arguments, for one call only, because a call may change them.

    Raises:
        BundleError: the bundle has an impossible value.

    Attributes:
        module: the module.
        inputs: its positional arguments.
        kwargs: its keyword arguments.
        output: the recorded output, None if it was not kept.
        gradient: gradients of the outputs for the backward; empty if there is none.
        notes: what differs from the recorded call.
    """

    def __init__(self, text: Manifest, tensors: dict[str, Tensor], classes: Classes, device: torch.device) -> None:
        self._about, self._stored, self._classes, self._device = text["tensors"], tensors, classes, device
        self._made: dict[str, Tensor] = {}
        self._modules: dict[str, torch.nn.Module] = {}
        self.notes: list[str] = []
        try:
            self.module = self._module(text["module"], "module")
            self.inputs: tuple[Any, ...] = tuple(self.value(text["call"]["inputs"], "inputs"))
            self.kwargs: dict[str, Any] = dict(self.value(text["call"]["kwargs"], "kwargs"))
            self.output = self.value(text["call"]["output"], "output")
            self.gradient: tuple[Any, ...] = tuple(self.value(text["call"]["gradient"], "gradient"))
        except HookdError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError) as error:
            raise BundleError(f"bundle.json is invalid: {type(error).__name__}: {error}") from error

    def value(self, what: Any, path: str) -> Any:
        """Create a value from its description (hookd_capture.bundle)."""
        if isinstance(what, list):
            return [self.value(one, f"{path}.{at}") for at, one in enumerate(what)]
        if not isinstance(what, dict):
            return what
        (kind,) = (key for key in what if key.startswith("$"))
        got = what[kind]
        makers: dict[str, Callable[[], Any]] = {
            "$tensor": lambda: self.tensor(got),
            "$tuple": lambda: tuple(self.value(got, path)),
            "$dict": lambda: {self.value(key, path): self.value(one, f"{path}.{key}") for key, one in got},
            "$fields": lambda: types.SimpleNamespace(**self._named(got, path)),
            # namedtuple refuses invalid names before it makes code of them: Lib/collections/__init__.py, 3.10 to 3.14.
            "$named": lambda: collections.namedtuple("Named", list(got))(**self._named(got, path)),  # noqa: PYI024
            "$float": lambda: float(got),
            "$dtype": lambda: dtype_of(got),
            "$device": lambda: self._device,
            "$size": lambda: torch.Size(got),
            "$slice": lambda: slice(*got),
            "$function": lambda: _function(got),
            "$ref": lambda: weakref.ref(self.value(got, path)),
            "$gone": lambda: Gone(str(got), path),
        }
        return makers[kind]()

    def _named(self, fields: Mapping[str, object], path: str) -> dict[str, object]:
        return {name: self.value(one, f"{path}.{name}") for name, one in fields.items()}

    def tensor(self, key: str) -> Tensor:
        """Return the tensor of a key with its recorded strides; the same object for the same key."""
        if key not in self._made:
            about, stored = self._about[key], self._stored[key]
            tensor = tensorfile.restored(stored, dtype_of(about["dtype"]))
            if list(tensor.shape) != about["shape"]:
                raise ValueError(f"{key} has the shape {list(tensor.shape)}, not {about['shape']}")
            tensor = self._as_it_lay(tensor, about["stride"], key).to(self._device)
            self._made[key] = _with_graph(tensor, about)
        return self._made[key]

    def _as_it_lay(self, tensor: Tensor, stride: list[int], key: str) -> Tensor:
        if list(tensor.stride()) == stride or not tensor.numel():
            return tensor.clone()
        if len(stride) == tensor.dim() and all(tensorfile.is_size(one) for one in stride):
            needed = 1 + sum((size - 1) * one for size, one in zip(tensor.shape, stride))
            if needed <= _MOST_STRETCHED * (tensor.numel() + 1024):
                base = tensor
                for dim, step in enumerate(stride):
                    base = base.narrow(dim, 0, 1) if step == 0 else base
                made = torch.empty_strided(base.shape, stride, dtype=tensor.dtype).copy_(base).expand(tensor.shape)
                if same_bits(made, tensor):
                    return made
        self.notes.append(f"{key} has another memory layout than in the training")
        return tensor.clone()

    def _module(self, what: ModuleRecord, path: str) -> torch.nn.Module:
        if "$same" in what:
            return self._modules[what["$same"]]
        kind = self._classes.find(what["module"], what["qualname"], path)
        module = self._modules[path] = kind.__new__(kind)
        torch.nn.Module.__init__(module)
        module.training = bool(what["training"])
        for name, one in what["parameters"].items():
            parameter = None if one is None else self.value(one, f"{path}.{name}")
            module.register_parameter(name, parameter if isinstance(parameter, torch.nn.Parameter) else None)
        for name, one in what["buffers"].items():
            buffer = None if one is None else self.value(one, f"{path}.{name}")
            module.register_buffer(name, buffer if isinstance(buffer, torch.Tensor) else None)
        for name, child in what["children"].items():
            module.add_module(name, self._module(child, f"{path}.{name}"))
        for name in what["empty"]:
            module.add_module(name, None)
        for name, value in what["attributes"].items():
            if not is_data(name):  # it could replace an attribute of torch's
                raise ValueError(f"{path} cannot have an attribute {name!r}")
            module.__dict__[name] = self.value(value, f"{path}.{name}")
        return module


def dtype_of(name: str) -> torch.dtype:
    """Return a dtype by its name.

    Raises:
        ValueError: this version of torch has no such dtype.
    """
    found = vars(torch).get(name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"this torch has no dtype {name!r}")  # noqa: TRY004 - the name is wrong, not its type
    return found


def _function(name: str) -> Any:
    found = vars(torch.nn.functional).get(name)
    if name.startswith("_") or not callable(found) or getattr(found, "__module__", "") not in _FUNCTIONS_OF:
        found = getattr(torch, name, None) if name in ("relu", "tanh", "sigmoid", "selu", "celu") else None
    if found is None:
        raise ValueError(f"there is no function {name!r} in torch.nn.functional")
    return found


def _with_graph(tensor: Tensor, about: TensorRecord) -> Tensor:
    if about["is_parameter"]:
        return torch.nn.Parameter(tensor, requires_grad=bool(about["requires_grad"]))
    if about["requires_grad"]:
        tensor.requires_grad_()
        if not about["is_leaf"]:
            with torch.enable_grad():
                return tensor.view_as(tensor)  # a non-leaf, which may be changed in place as in the training
    return tensor


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same type, shape and bits, NaN included."""
    if one.dtype is not other.dtype or one.shape != other.shape:
        return False
    first, second = (tensorfile.storable(x.detach().resolve_neg()).cpu().contiguous() for x in (one, other))
    return bool(torch.equal(first.reshape(-1).view(torch.uint8), second.reshape(-1).view(torch.uint8)))
