"""Guard of what forward and backward passes change besides gradients: module buffers, and parameters.

A forward pass with one inf input leaves BatchNorm's running variance NaN for good, even if the step is skipped. A
skipped step must therefore not change the buffers of any module, nor a parameter that a module changes itself (a
constraint on its norm, a moving average of other parameters).
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import pickle
import random
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from mptrain.numerics.overflow_check import flat, memory_order
from mptrain.numerics.shards import is_sharded
from mptrain.numerics.words import listed
from mptrain.system.errors import ConfigError
from mptrain.system.torch_private import foreach_copy_, storage_key

if TYPE_CHECKING:
    from mptrain.optimizer.masters import MasterWeights


class _Place(NamedTuple):
    """Name under which a module holds a tensor: a parameter or a buffer, or None.

    ``tensors`` is the module's mapping of names. ``memory`` is that of a guarded tensor, else None.
    """

    path: str
    tensors: dict[str, Tensor | None]
    name: str
    tensor: Tensor | None
    memory: Tensor | None


class _Scripted:
    """Tensors of a TorchScript module by name: its own mapping neither has `get` nor takes a tensor."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def get(self, name: str) -> Any:
        return getattr(self._module, name, None)

    def __setitem__(self, name: str, tensor: Tensor | None) -> None:
        setattr(self._module, name, tensor)


class _Held(NamedTuple):
    """Tensors of a model: its places, the guarded tensors, and sizes of the modules' mappings of buffers.

    ``memory`` has the guarded tensors, each flattened in its own memory or alone as it is, with a copy of their values.
    """

    places: list[_Place]
    guarded: list[Tensor]
    memory: list[tuple[list[Tensor], Tensor]]
    lasting: list[Tensor]
    sizes: list[tuple[dict[str, Tensor | None], int]]


class Undone(NamedTuple):
    """Changes that `BufferGuard.unharmed` has undone.

    Attributes:
        changed: Names of the parameters that were changed, and of the buffers in half precision that were written, even
            if rounding left them as they were.
        private: Paths of the attributes, no buffers, that were changed so that later passes may read it.
        paths: Path of each tensor that an attribute holds and that is no parameter or buffer of the model, by identity.
    """

    changed: list[str]
    private: list[str]
    paths: dict[int, str]


class BufferGuard:
    """Guard of a model's buffers, and of parameters that passes change: restores them if a training step is skipped.

    Each buffer stays the tensor that its module holds, in memory of its own, so that it can grow. Their values are
    saved in one flat tensor per dtype, so that snapshot and restore are a few kernels, however many buffers there are.
    Build the guard after the model has its final device and dtypes.

    Modules may change a guarded tensor in place, give it other memory (``buffer.data = ...``) or replace it by another
    tensor: `settle` copies the values to the guarded memory and gives the module its tensor back. A buffer that gets
    another shape or dtype, or is new, is guarded as it is from then on; a skipped step gives back the one from before.
    A trained parameter cannot be replaced: the gradients would reach the new tensor, and the optimizer updates the old
    one.

    Attributes:
        masters: Master weights of the learners, into which changes of their parameters are written.
        reshaped: Names of the buffers that training has made, or given another shape or dtype.
    """

    def __init__(self, model: nn.Module) -> None:
        self.masters: tuple[MasterWeights, ...] = ()
        self.reshaped: set[str] = set()
        self._model = model
        self._followed: list[str] = []
        self._frozen = [(name, one) for name, one in model.named_parameters() if not one.requires_grad]
        self._undone = 0  # times that `unchanged` has increased the version of every guarded tensor
        self._before: _Held | None = None  # what it held at the snapshot, if a buffer has changed its shape since
        self._hold(self._gathered(move=True))

    def _gathered(self, *, move: bool = False) -> _Held:
        """Find all places of tensors, with buffers and followed parameters to be guarded.

        With ``move``, buffers get contiguous memory of their own that can grow, which NumPy may have forbidden.
        """
        places: list[_Place] = []
        sizes: list[tuple[dict[str, Tensor | None], int]] = []
        guarded: list[Tensor] = []
        lasting: list[Tensor] = []
        held = {id(one): one for one in (*self._model.parameters(), *self._model.buffers()) if not is_sharded(one)}
        shared = Counter(storage_key(one.untyped_storage()) for one in held.values())
        by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        alone: list[Tensor] = []
        seen: dict[int, Tensor] = {}
        for path, module in self._model.named_modules():
            for kind in ("_parameters", "_buffers"):
                own = getattr(module, kind)
                tensors: Any = own if isinstance(own, dict) else _Scripted(module)
                if kind == "_buffers" and isinstance(own, dict):
                    sizes.append((own, len(own)))
                for name, tensor in own.items():
                    full = f"{path}.{name}" if path else name
                    if tensor is not None and is_sharded(tensor):
                        continue  # torch exchanges it for the gathered one itself
                    is_shared = tensor is not None and shared[storage_key(tensor.untyped_storage())] > 1
                    if (
                        tensor is None
                        or not (kind == "_buffers" or full in self._followed)
                        or (is_shared and _repeats(tensor))  # its memory is guarded with the tensor that it repeats
                    ):
                        places.append(_Place(full, tensors, name, tensor, None))
                        continue
                    if id(tensor) not in seen:
                        room = _flat(tensor.data)
                        if (room is None or move) and not is_shared and kind == "_buffers":
                            tensor.data = tensor.detach().clone(memory_format=torch.contiguous_format)
                            room = _flat(tensor.data)
                        seen[id(tensor)] = tensor.data
                        guarded.append(tensor)
                        if room is None:
                            alone.append(tensor.data)
                        else:
                            by_kind.setdefault((tensor.dtype, tensor.device), []).append(room)
                        if kind == "_parameters" or name not in module._non_persistent_buffers_set:
                            lasting += [] if room is None else [room]
                    places.append(_Place(full, tensors, name, tensor, seen[id(tensor)]))
        rooms = [*by_kind.values(), *([one] for one in alone)]
        return _Held(places, guarded, [(one, _joined(one).clone()) for one in rooms], lasting, sizes)

    def _hold(self, held: _Held) -> None:
        self._held = held
        self._uses = Counter(id(place.tensor) for place in held.places)
        self._checks = [
            (place, place.tensors, place.name, own, home is not None, *_whereabouts(home))
            for place in held.places
            for own, home in [(place.tensor, place.memory)]
        ]

    @property
    def count(self) -> int:
        """Number of guarded tensors."""
        return len(self._held.guarded)

    @property
    def lasting(self) -> list[Tensor]:
        """Flat memory of persistent buffers, such as BatchNorm's running statistics, and of guarded parameters."""
        return self._held.lasting

    def reshape(self, saved: Mapping[str, Tensor]) -> None:
        """Give buffers that training had reshaped or made the shape that they had when they were saved, by name."""
        modules = dict(self._model.named_modules())
        for path, values in saved.items():
            owner, _, name = path.rpartition(".")
            own = getattr(modules.get(owner), "_buffers", None)
            now = None if own is None else own.get(name)
            if isinstance(own, dict) and (now is None or now.shape != values.shape):
                like = next(self._model.parameters()) if now is None else now
                own[name] = torch.zeros_like(
                    values, device=like.device, dtype=values.dtype if now is None else now.dtype
                )
        self.reshaped |= saved.keys()

    def follow(self, names: Iterable[str]) -> None:
        """Guard parameters, the same on all ranks, like buffers from now on; all ranks get the values of rank 0."""
        new = {place.path: place.tensor for place in self._held.places if place.memory is None}
        self._followed += (found := [name for name in names if new.get(name) is not None])
        if found:
            self._hold(self._gathered())
        for name in found:
            for masters in self.masters:
                masters.follow(new[name])  # type: ignore[arg-type]

    def snapshot(self) -> None:
        """Save a copy of all guarded tensors on the device, before a training step."""
        self.settle()
        self._before = None
        for rooms, saved in self._held.memory:
            if len(rooms) == 1:
                saved.copy_(rooms[0])
            else:
                torch.cat(rooms, out=saved)
        for masters in self.masters:
            masters.mark()

    def settle(self) -> None:
        """Bring guarded tensors that were moved or replaced back to their own memory, with the new values.

        Raises ConfigError if a trained parameter was replaced, or a parameter has another shape or dtype; `Thawed` if a
        frozen one requires a gradient.
        """
        if thawed := [name for name, one in self._frozen if one.requires_grad]:
            self._frozen = []
            raise Thawed(
                f"{listed(thawed)} {'requires' if len(thawed) == 1 else 'require'} a gradient in training, and did not "
                "when the model was built, so that no optimizer has it",
                "leave it trainable when the model is built, and compute it under torch.no_grad() as long as it is not "
                "to learn: what gets no gradient is not updated; or train in two runs, the second with "
                "model.weights=RUN",
            )
        other = False
        for tensors, size in self._held.sizes:
            other |= len(tensors) != size
        for place, tensors, name, tensor, guarded, address, shape in self._checks:
            if tensors.get(name) is not tensor or (
                guarded and (tensor.data_ptr() != address or tensor.shape != shape)  # type: ignore[union-attr]
            ):
                other |= not self._taken_over(place)
        if other:
            before = {place.path: place.memory for place in self._held.places}
            self._before = self._before or self._held
            self._hold(self._gathered())
            self.reshaped |= {
                place.path
                for place in self._held.places
                if (now := place.memory) is not None
                if (old := before.get(place.path)) is None or _kind(old) != _kind(now)
            }

    @torch.no_grad()
    def _taken_over(self, place: _Place) -> bool:
        """Copy what a module holds in a place to its memory; return False for a buffer that does not fit there."""
        path, tensors, name, tensor, memory = place
        current, home = tensors.get(name), tensor if memory is None else memory
        same = current is not None and home is not None and _kind(current) == _kind(home)
        fits = same and (current is tensor or self._uses[id(tensor)] == 1)
        if isinstance(tensor, nn.Parameter) and (not fits or (current is not tensor and tensor.requires_grad)):
            raise _exchanged(path, current)
        if not fits:
            return False
        assert current is not None
        assert home is not None
        assert tensor is not None
        home.copy_(current.detach())
        tensor.data, tensors[name] = home.data, tensor
        increment_version([tensor])
        return True

    def write_through(self, applied: Tensor) -> None:
        """Write changes that passes made to parameters into their master weights, if the update will be applied."""
        for masters in self.masters:
            masters.take_changes(applied)

    def require_seen(self) -> None:
        """Refuse, with ConfigError, changes of parameters that could not be written through; reads the device."""
        for masters in self.masters:
            masters.require_seen()

    def restore(self, skip: Tensor) -> None:
        """Restore all guarded tensors if ``skip`` (float32, shape (1,)) is 1.

        It does not synchronise with the host, unless a buffer has changed its shape in this step.
        """
        self.settle()
        if self._before is not None:
            self._restore_reshaped(self._before, skip)
            return
        skipped = skip == 1
        for rooms, saved in self._held.memory:
            now = _joined(rooms)
            # A buffer that a module has made on the host may stand in a model on a device.
            torch.where(skipped.to(saved.device), saved, now, out=now)
            if len(rooms) > 1:
                _fill(rooms, now)
        increment_version(self._held.guarded)  # a live autograd graph may have saved the old values

    def _restore_reshaped(self, before: _Held, skip: Tensor) -> None:
        if bool(skip == 1):
            self._put_back(before)

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        """Undo all changes of guarded tensors on exit, unless the block raises."""
        self.settle()
        held, before = self._held, self._before
        now = held._replace(memory=[(rooms, _joined(rooms).clone()) for rooms, _ in held.memory])
        yield
        self.settle()
        self._put_back(now)
        self._held, self._before = held, before
        self._undone += 1

    @contextlib.contextmanager
    def unharmed(self, task: object = None) -> Iterator[Undone]:
        """Undo all changes of buffers, parameters, submodules and plain attributes on exit, and say what they were.

        Plain attributes are those of modules and of a ``task``, with what they hold. What is yielded is complete at the
        exit. Raises as `settle`.
        """
        self.snapshot()
        held, reshaped, changed = self._held, set(self.reshaped), list[str]()
        owners = {"task": task, **dict(self._model.named_modules())}
        private, attributes = list[str](), _SavedAttributes(owners, [place.tensor for place in held.places])
        parameters = _SavedParameters(held.places)
        halves = [
            (place.path, own, own._version - self._undone, place.memory, place.memory.to("cpu", copy=True))
            for place in held.places
            if (own := place.tensor) is not None and place.memory is not None
            if place.memory.is_floating_point() and place.memory.dtype.itemsize == 2
        ]
        try:
            yield Undone(changed, private, attributes.paths)
            self.settle()
            changed += [
                path
                for path, own, version, memory, values in halves
                if own._version - self._undone != version or not torch.equal(memory.cpu(), values)
            ]
            parameters.require_same_kinds()
        finally:
            changed += parameters.put_back()
            private += attributes.put_back()
            self._put_back(held)
            self.reshaped = reshaped

    def _put_back(self, held: _Held) -> None:
        """Give all tensors back to their modules, with saved values, and remove buffers that are new."""
        known: dict[int, dict[str, Tensor | None]] = {}
        for place in held.places:
            known.setdefault(id(place.tensors), {})[place.name] = place.tensor
        for tensors, _ in held.sizes:
            tensors.clear()
            tensors.update(known.get(id(tensors), {}))
        for place in held.places:
            home, own = place.memory, place.tensor
            if place.tensors.get(place.name) is not own:
                place.tensors[place.name] = own
            if own is not None and home is not None:
                own.data = home
        for rooms, saved in held.memory:
            _fill(rooms, saved)
        self._before = None
        self._hold(held)
        increment_version(held.guarded)


def _flat(tensor: Tensor) -> Tensor | None:
    """Return a tensor flattened in its own memory; None if it has gaps there, so that only a copy can be flat."""
    order = memory_order(tensor)
    return None if order is None and not tensor.is_contiguous() else flat(tensor, order)


def _repeats(tensor: Tensor) -> bool:
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def _joined(rooms: list[Tensor]) -> Tensor:
    return rooms[0] if len(rooms) == 1 else torch.cat(rooms)


def _fill(rooms: list[Tensor], values: Tensor) -> None:
    if len(rooms) == 1:
        rooms[0].copy_(values)
    else:
        foreach_copy_(rooms, values.split([len(room) for room in rooms]))


def _whereabouts(memory: Tensor | None) -> tuple[int, torch.Size]:
    return (0, torch.Size()) if memory is None else (memory.data_ptr(), memory.shape)


class _SavedParameters:
    """Parameters of a model with copies of their values on the host, where they take no memory that training needs."""

    def __init__(self, places: Iterable[_Place]) -> None:
        self._saved = _host_copies(places)

    def require_same_kinds(self) -> None:
        """Raise ConfigError if a parameter has another dtype, shape or device now."""
        for path, one, memory, *_ in self._saved:
            if _kind(one) != _kind(memory):
                raise _exchanged(path, one)

    def put_back(self) -> list[str]:
        """Restore the values, and return the names of the parameters that were changed."""
        changed = []
        for path, one, memory, version, values in self._saved:
            moved = one._version != version or one.data_ptr() != memory.data_ptr()
            if moved or not torch.equal(one.detach().cpu(), values):
                changed.append(path)
                one.data = memory.copy_(values)
                increment_version([one])
        return changed


def _host_copies(places: Iterable[_Place]) -> list[tuple[str, nn.Parameter, Tensor, int, Tensor]]:
    """Return name, parameter, memory, version and values of all parameters."""
    return [
        (place.path, one, one.data, one._version, one.detach().to("cpu", copy=True))
        for place in places
        if isinstance(one := place.tensor, nn.Parameter)
    ]


class _SavedAttributes:
    """Attributes and submodules of objects, by their paths, with copies of all that passes may change in them.

    Followed are lists, sets, dictionaries, deques, modules, and objects of classes that neither Python nor torch, NumPy
    or mptrain define. Their tensors, except ``known`` ones, arrays and random generators are copied.
    """

    def __init__(self, owners: Mapping[str, object], known: Iterable[Tensor | None]) -> None:
        self.paths: dict[int, str] = {}
        self._quiet: set[int] = set()  # mappings of modules, whose names belong to the guard
        self._held: list[tuple[str, Any, Any]] = []
        self._values: list[tuple[str, Callable[[], Any], Callable[[Any], object], Any]] = []
        seen: dict[int, Any] = {id(one): one for one in (*known, None)}
        left, given = [*owners.items()], {id(one) for one in owners.values()}
        while left:
            path, one = left.pop()
            if isinstance(one, (int, float, complex, str, bytes)) or id(one) in seen:
                continue
            seen[id(one)] = one
            if isinstance(one, Tensor):
                self.paths[id(one)] = path
            if access := _access(one):
                self._values.append((path, *access, copy.deepcopy(access[0]())))
            if isinstance(one, (list, set, deque)):
                self._held.append((path, one, list(one)))
                left += [(f"{path}[{place}]", value) for place, value in enumerate(itertools.islice(one, _MOST))]
            elif isinstance(one, dict):
                self._held.append((path, one, dict(one)))
                left += [(f"{path}.{key}".strip("."), value) for key, value in itertools.islice(one.items(), _MOST)]
            elif isinstance(one, nn.Module) or id(one) in given or _is_foreign(type(one)):
                own = getattr(one, "__dict__", {})
                self._held.append((path, own, dict(own)))
                left += [
                    (f"{path}.{name}".strip("."), value) for name, value in own.items() if name not in _OF_EVERY_MODULE
                ]
                registered = [own[name] for name in _REGISTERED if type(own.get(name)) is dict]
                self._quiet.update(map(id, registered))
                left += [(path, one) for one in registered]

    def put_back(self) -> list[str]:
        """Restore everything, and return the paths of what was changed and may be read in a later pass."""
        found: list[str] = []
        for path, now, kept in self._held:
            if isinstance(now, dict):
                names = [name for name in {**now, **kept} if now.get(name, now) is not kept.get(name, now)]
                pairs = [(f"{path}.{name}".strip("."), kept.get(name), now.get(name)) for name in names]
            else:
                same = len(now) == len(kept) and all(one is other for one, other in zip(now, kept, strict=True))
                pairs = [] if same else [(path, kept, [*now])]
            if pairs:
                if id(now) not in self._quiet:
                    found += [name for name, before, after in pairs if _is_state(before, after)]
                now.clear()
                (now.extend if isinstance(now, (list, deque)) else now.update)(kept)
        for path, read, write, value in self._values:
            if not _same(read(), value):
                found += [path]
                write(value)
        return [*dict.fromkeys(found)]


class Thawed(ConfigError):
    """Error raised if a model lets a parameter learn that was frozen when the optimizer was built."""


#: Attributes that every module has, such as its parameters and hooks, and the most values of a container that are seen.
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}
_REGISTERED = ("_modules", "_buffers", "_parameters")
_MOST = 10_000
_KNOWN_PACKAGES = frozenset({*sys.stdlib_module_names, "torch", "numpy", "mptrain"})


def _is_foreign(cls: type) -> bool:
    return cls.__module__.partition(".")[0] not in _KNOWN_PACKAGES


def _access(one: Any) -> tuple[Callable[[], Any], Callable[[Any], object]] | None:
    """Return functions that read and write the values of a tensor, an array, a generator or a TorchScript module."""
    if isinstance(one, Tensor):
        plain = one.layout == torch.strided and not one.is_inference() and not is_sharded(one)
        whole = functools.partial(torch.clone, one.detach(), memory_format=torch.contiguous_format)
        return (whole if _repeats(one) else one.detach, functools.partial(_overwrite, one)) if plain else None
    if isinstance(one, np.ndarray):
        return one.copy, functools.partial(np.copyto, one)
    if isinstance(one, np.random.Generator):
        return lambda: one.bit_generator.state, functools.partial(setattr, one.bit_generator, "state")
    if isinstance(one, (torch.Generator, np.random.RandomState)):
        return one.get_state, one.set_state
    if type(one) is random.Random:
        return one.getstate, one.setstate
    return None


def _same(now: Any, before: Any) -> bool:
    if isinstance(now, Tensor):
        return _kind(now) == _kind(before) and bool(((now == before) | ((now != now) & (before != before))).all())
    return pickle.dumps(now) == pickle.dumps(before)


def _overwrite(tensor: Tensor, values: Tensor) -> None:
    if _kind(tensor) == _kind(values):
        tensor.detach().copy_(values)
    else:
        tensor.data = values


def _is_state(before: Any, after: Any) -> bool:
    """Return whether an attribute's new value is state for later passes, not a result of this pass."""
    if isinstance(after, Tensor):
        return not after.requires_grad
    if isinstance(after, (list, set, deque, dict)):
        return not any(isinstance(one, Tensor) and one.requires_grad for one in after)
    return isinstance(after, (int, float)) and isinstance(before, (int, float)) and after != before


def _exchanged(path: str, now: Tensor | None) -> ConfigError:
    return ConfigError(
        f"the parameter {path} is replaced by {'nothing' if now is None else _kind(now)[0]} in a training step, and "
        "the optimizer still updates the one that the model was built with",
        "change its values in place instead, under torch.no_grad()",
    )


def _kind(tensor: Tensor) -> tuple[str, torch.device]:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)}", tensor.device
