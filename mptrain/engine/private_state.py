"""State that passes keep outside of parameters and buffers: plain attributes, objects, closures and global names."""

from __future__ import annotations

import contextlib
import copy
import dis
import itertools
import pickle
import random
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from mptrain.numerics.tensors import is_sharded


class PrivateState:
    """Attributes and submodules of objects, by their paths, with copies of all that passes may change in them.

    Followed are lists, sets, dictionaries, deques, modules, objects of classes that neither Python nor torch, NumPy or
    mptrain define, and what the functions of a user read: those of such classes, hooks of modules, and functions in
    attributes, with the variables around them and the global names in them. Tensors, except ``known`` ones, arrays and
    random generators are copied. A cache of functools cannot be looked into. What is nearest is followed first; where
    a name leads to more than can be looked at in a moment, ``beyond`` is the path at which following ended.
    """

    def __init__(self, owners: Mapping[str, object], known: Iterable[Tensor | None]) -> None:
        self.paths: dict[int, str] = {}
        self.beyond: str | None = None
        self._quiet: set[int] = set()  # mappings of modules, whose names belong to the guard
        self._caches: set[str] = set()  # of torch's own modules, such as nn.LSTM, and what an extra state saves
        self._held: list[tuple[str, Any, Any]] = []
        self._values: list[tuple[str, Callable[[], Any], Callable[[Any], object], Any]] = []
        self._variables: list[_Variable] = []
        self._hooks: list[tuple[dict[int, Any], set[int]]] = []  # of modules, with the keys that they had
        seen: dict[int, Any] = {id(tensor): tensor for tensor in (*known, None)}
        classes = set[type]()
        left, given = deque(owners.items()), {id(owner) for owner in owners.values()}
        most = _MOST + len(seen) + 10 * len(owners)  # a module holds a few mappings
        while left:
            path, node = left.popleft()
            if type(node) in _PROXIES or isinstance(node, (int, float, complex, str, bytes)) or id(node) in seen:
                continue
            if len(seen) == most:
                self.beyond = path
                break
            seen[id(node)] = node
            if isinstance(node, Tensor):
                self.paths[id(node)] = path
            if access := _access(node):
                self._values.append((path, *access, copy.deepcopy(access[0]())))
            if isinstance(node, FunctionType):
                variables = _variables_of(node)
                self._variables += variables
                left += [(variable.path, variable.value) for variable in variables]
                left += [(path, getattr(node, "__wrapped__", None))]  # of a decorator
            elif isinstance(node, partial):
                left += [(path, value) for value in (node.func, *node.args, *node.keywords.values())]
            elif isinstance(node, MethodType):
                left += [(path, node.__func__), (path, node.__self__)]
            elif isinstance(node, tuple):
                left += [(f"{path}[{index}]", value) for index, value in enumerate(node[:_MOST])]
            elif isinstance(node, (list, set, deque)):
                held = list(node)
                self._held.append((path, node, held))
                left += [(f"{path}[{index}]", value) for index, value in enumerate(held[:_MOST])]
            elif isinstance(node, dict):
                self._held.append((path, node, named := dict(node)))  # another thread may write to it
                left += [(f"{path}.{key}".strip("."), value) for key, value in itertools.islice(named.items(), _MOST)]
            elif isinstance(node, nn.Module) or id(node) in given or _is_foreign(type(node)):
                own = getattr(node, "__dict__", {})
                self._held.append((path, own, dict(own)))
                left += [
                    (f"{path}.{name}".strip("."), value) for name, value in own.items() if name not in _OF_EVERY_MODULE
                ]
                saved = getattr(type(node), "get_extra_state", None) not in (None, nn.Module.get_extra_state)
                own_caches = [name for name in own if saved or name.startswith("_")]
                if saved or type(node).__module__.startswith("torch."):
                    self._caches.update(f"{path}.{name}".strip(".") for name in own_caches)
                    self._quiet.update([id(own)] * saved)
                registered = [own[name] for name in _REGISTERED if type(own.get(name)) is dict]
                self._quiet.update(map(id, registered))
                left += [(path, mapping) for mapping in registered]
                self._hooks += [(hooks, {*hooks}) for name in _HOOKS if (hooks := own.get(name)) is not None]
                left += [(path, hook) for hooks, _ in self._hooks[-len(_HOOKS) :] for hook in hooks.values()]
                for cls in type(node).__mro__:
                    if cls not in classes:
                        classes.add(cls)
                        variables, functions = _attributes_of(cls)
                        self._variables += variables
                        left += [(variable.path, variable.value) for variable in variables]
                        left += [(path, function) for function in functions]

    def put_back(self) -> list[str]:
        """Restore everything, and return the paths of what was changed and may be read in a later pass."""
        changed: list[str] = []
        for path, now, kept in self._held:
            if isinstance(now, dict):
                names = [name for name in {**now, **kept} if now.get(name, now) is not kept.get(name, now)]
                pairs = [(f"{path}.{name}".strip("."), kept.get(name), now.get(name)) for name in names]
            else:
                same = len(now) == len(kept) and all(current is other for current, other in zip(now, kept, strict=True))
                pairs = [] if same else [(path, kept, [*now])]
            if pairs:
                if id(now) not in self._quiet:
                    changed += [
                        name for name, before, after in pairs if name not in self._caches and _is_state(before, after)
                    ]
                _put(now, kept)
        for hooks, before in self._hooks:
            for key in [key for key, hook in hooks.items() if key not in before and not is_of_torch(hook)]:
                del hooks[key]  # torch's own, as those of FSDP2, come and go
        for path, read, write, value in self._values:
            if not _same(read(), value):
                changed += [path] * (path not in self._caches)
                write(value)
        for path, read, write, value in self._variables:
            if (now := read()) is not value:
                with contextlib.suppress(Exception):  # a class may forbid what a pass has done to it
                    write(value)
                changed += [path] if _is_state(value, now) else []
        return [*dict.fromkeys(changed)]


class _Variable(NamedTuple):
    """Variable around a function, or global name in it: its path, functions that read and set it, its value."""

    path: str
    read: Callable[[], Any]
    write: Callable[[Any], object]
    value: Any


def _variables_of(function: FunctionType) -> list[_Variable]:
    """Return the variables around a function, and global names in it, if it is a user's own."""
    if not _is_own(function):
        return []
    names, own, module = _global_names(function.__code__), function.__globals__, function.__module__
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return [
        *(
            _Variable(f"{module}.{name}", partial(own.get, name), partial(own.__setitem__, name), own[name])
            for name in sorted(names & own.keys())
        ),
        *(
            _Variable(f"{name} in {function.__qualname__}", partial(_content, cell), partial(_fill, cell), content)
            for name, cell in cells
            if (content := _content(cell)) is not cell
        ),
    ]


@cache
def _global_names(code: CodeType) -> frozenset[str]:
    """Return the global names in a code, and in those that it defines; reading them is slow, and each pass asks."""
    inner = (_global_names(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return frozenset(
        instruction.argval for instruction in dis.get_instructions(code) if instruction.opname in _GLOBAL
    ).union(*inner)


def _content(cell: CellType) -> Any:
    """Return the value of a variable; the cell itself if it has none yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return cell


def _fill(cell: CellType, value: Any) -> None:
    cell.cell_contents = value


def is_of_torch(hook: Any) -> bool:
    """Return whether a hook is a function of torch's own."""
    return str(getattr(getattr(hook, "func", hook), "__module__", "")).startswith("torch.")


def _attributes_of(cls: type) -> tuple[list[_Variable], list[Any]]:
    """Return the attributes of a class of a user, and its functions."""
    attributes = vars(cls).items() if _is_own(cls) else ()
    functions = [
        getattr(attribute, "__func__", getattr(attribute, "fget", attribute))
        for _, attribute in attributes
        if isinstance(attribute, _FUNCTIONS)
    ]
    return [
        _Variable(f"{cls.__name__}.{name}", partial(vars(cls).get, name), partial(setattr, cls, name), attribute)
        for name, attribute in attributes
        if not isinstance(attribute, _FUNCTIONS) and not name.startswith("__")
    ], functions


#: Attributes that every module has, such as its parameters and hooks, and the most objects that are looked at: as many
#: take a tenth of a second, in each pass of doctor.
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}
_HOOKS = tuple(name for name in sorted(_OF_EVERY_MODULE) if name.endswith("_hooks"))
_REGISTERED = ("_modules", "_buffers", "_parameters")
_MOST = 10_000
_PROXIES = (weakref.ProxyType, weakref.CallableProxyType)  # what they stand for may be gone
_GLOBAL = ("LOAD_GLOBAL", "STORE_GLOBAL", "LOAD_NAME", "STORE_NAME")
_FUNCTIONS = (FunctionType, classmethod, staticmethod, property)
_KNOWN_PACKAGES = frozenset({*sys.stdlib_module_names, "torch", "numpy", "mptrain"})


def _is_foreign(cls: type) -> bool:
    return cls.__module__.partition(".")[0] not in _KNOWN_PACKAGES


def _is_own(definition: type | FunctionType) -> bool:
    """Return whether a class or function is a user's own, not a library's, whose names lead to registers of it all."""
    return is_of_user(str(definition.__module__))


def is_of_user(name: str) -> bool:
    """Return whether a module of Python, given by name, is a user's own, and not of a library."""
    file = getattr(sys.modules.get(name), "__file__", None)
    return name.partition(".")[0] not in _KNOWN_PACKAGES and "-packages/" not in str(file)  # site-, or dist- of Debian


def _access(node: Any) -> tuple[Callable[[], Any], Callable[[Any], object]] | None:
    """Return functions that read and write the values of a tensor, an array, a generator or a TorchScript module."""
    if isinstance(node, Tensor):
        plain = node.layout == torch.strided and not (
            node.is_inference() or node.is_meta or node.is_nested or is_sharded(node)
        )
        if plain and repeats(node):  # an expanded tensor may be larger than all memory
            return _distinct(node).detach, partial(_overwrite, _distinct(node))
        return (node.detach, partial(_overwrite, node)) if plain else None
    if isinstance(node, np.ndarray) and not node.dtype.hasobject and not isinstance(node, np.memmap):  # may be large
        return node.view, partial(np.copyto, node)
    if isinstance(node, np.random.Generator):
        return lambda: node.bit_generator.state, partial(setattr, node.bit_generator, "state")
    if isinstance(node, (torch.Generator, np.random.RandomState)):
        return node.get_state, node.set_state
    if type(node) is random.Random:
        return node.getstate, node.setstate
    return None


def _same(now: Any, before: Any) -> bool:
    if isinstance(now, Tensor):
        return kind_of(now) == kind_of(before) and bool(((now == before) | ((now != now) & (before != before))).all())
    if isinstance(now, np.ndarray):
        return now.dtype == before.dtype and np.array_equal(now, before, equal_nan=now.dtype.kind in "fc")
    return pickle.dumps(now) == pickle.dumps(before)


def _put(now: Any, kept: Any) -> None:
    """Give a container what it held, past methods of its own class; in a mapping, other names stay as they are."""
    if isinstance(now, list):
        list.__setitem__(now, slice(None), kept)
    elif isinstance(now, deque):
        deque.clear(now)
        deque.extend(now, kept)
    elif isinstance(now, set):
        set.clear(now)
        set.update(now, kept)
    elif now.keys() != kept.keys():
        dict.clear(now)
        dict.update(now, kept)
    else:
        for name, value in kept.items():
            if now[name] is not value:
                dict.__setitem__(now, name, value)


def _distinct(tensor: Tensor) -> Tensor:
    """Return a view of a tensor's elements that has each once along the dimensions that repeat them."""
    sizes = [1 if stride == 0 else size for stride, size in zip(tensor.stride(), tensor.shape, strict=True)]
    return tensor.detach().as_strided(sizes, tensor.stride())


def _overwrite(tensor: Tensor, values: Tensor) -> None:
    if kind_of(tensor) == kind_of(values):
        tensor.detach().copy_(values)
    else:
        tensor.data = values


def _is_state(before: Any, after: Any) -> bool:
    """Return whether an attribute's new value is state for later passes, not a result of this pass."""
    if isinstance(after, Tensor):
        return not after.requires_grad
    if isinstance(after, (list, set, deque, dict, tuple)):
        return not any(isinstance(member, Tensor) and member.requires_grad for member in after)
    return isinstance(after, (int, float)) and isinstance(before, (int, float)) and after != before


def repeats(tensor: Tensor) -> bool:
    """Return whether elements of a tensor share memory, as those of an expanded one do."""
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def kind_of(tensor: Tensor) -> tuple[str, torch.device]:
    """Return a tensor's dtype and shape, in words, and its device."""
    return f"{tensor.dtype} of shape {tuple(tensor.shape)}", tensor.device
