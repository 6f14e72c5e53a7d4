"""Guard of what forward and backward passes change besides gradients: module buffers, and parameters.

A forward pass with one inf input leaves BatchNorm's running variance NaN for good, even if the step is skipped. A
skipped step must therefore not change the buffers of any module, nor a parameter that a module changes itself (a
constraint on its norm, a moving average of other parameters).
"""

from __future__ import annotations

import contextlib
import copy
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.nn import functional as F

from mptrain.numerics.overflow_check import memory_order
from mptrain.numerics.shards import is_sharded
from mptrain.system.errors import ConfigError
from mptrain.system.torch_private import storage_key

if TYPE_CHECKING:
    from mptrain.optimizer.masters import MasterWeights

#: Alignment of each buffer in bytes, as if it were allocated on its own; vectorised kernels and compilers expect 16.
ALIGNMENT = 64


class _Place(NamedTuple):
    """Name under which a module holds a tensor: a parameter or a buffer, or None.

    ``tensors`` is the module's mapping of names. ``memory`` is that of a guarded tensor, else None.
    """

    path: str
    tensors: dict[str, Tensor | None]
    name: str
    tensor: Tensor | None
    memory: Tensor | None


class BufferGuard:
    """Guard of a model's buffers, and of parameters that passes change: restores them if a training step is skipped.

    The buffers move into one flat tensor per dtype and kind (persistent or not), so that snapshot and restore are one
    kernel each, however many buffers there are. Each buffer stays the tensor that its module holds, with its own
    version counter: autograd rejects a backward pass if a saved tensor was changed, and views share a counter. Build
    the guard after the model has its final device and dtypes.

    Modules may change a guarded tensor in place, give it other memory (``buffer.data = ...``) or replace it by another
    tensor: `settle` copies the values to the guarded memory and gives the module its tensor back. A buffer that is
    shared, or that becomes another shape or dtype, is then no longer guarded, and a warning names it. A trained
    parameter cannot be replaced: the gradients would reach the new tensor, and the optimizer updates the old one.

    Attributes:
        lasting: Memory of all persistent buffers, such as BatchNorm's running statistics, one flat tensor per dtype;
            and of the guarded parameters.
        masters: Master weights of the learners, into which changes of their parameters are written.
        notes: Warnings for the user, one sentence each; the caller removes them once shown.
    """

    def __init__(self, model: nn.Module) -> None:
        self.masters: tuple[MasterWeights, ...] = ()
        self.notes: list[str] = []
        self.lasting: list[Tensor] = []
        self._memory: list[tuple[Tensor, Tensor]] = []
        self._said: set[str] = set()
        self._undone = 0  # times that `unchanged` has increased the version of every guarded tensor
        self._places: list[_Place] = []
        by_kind: dict[tuple[torch.dtype, bool], list[Tensor]] = {}
        seen: set[int] = set()
        self._modules = list(model.modules())
        for path, module in model.named_modules():
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None and is_sharded(tensor):
                        continue  # torch exchanges it for the gathered one itself
                    self._places.append(_Place(f"{path}.{name}" if path else name, tensors, name, tensor, None))
                    if tensors is module._buffers and tensor is not None and id(tensor) not in seen:
                        lasting = name not in module._non_persistent_buffers_set
                        by_kind.setdefault((tensor.dtype, lasting), []).append(tensor)
                        seen.add(id(tensor))
        self._guarded = [buffer for buffers in by_kind.values() for buffer in buffers]
        held = (*self._guarded, *(one for one in model.parameters() if not is_sharded(one)))
        shared = Counter(storage_key(one.untyped_storage()) for one in held)
        self.count = len(self._guarded)
        self._uses = Counter(id(place.tensor) for place in self._places)
        for (dtype, lasting), all_buffers in by_kind.items():
            buffers = []
            for own in all_buffers:
                if shared[storage_key(own.untyped_storage())] == 1:
                    buffers.append(own)
                else:  # a view of memory that another buffer or parameter has too stays one
                    self._guard_in_place(own, lasting=lasting)
            if not buffers:
                continue
            unit = ALIGNMENT // dtype.itemsize
            rooms = [F.pad(own.detach().reshape(-1), (0, -own.numel() % unit)) for own in buffers]
            flat = torch.cat(rooms)
            for own, room in zip(buffers, flat.split([len(room) for room in rooms]), strict=True):
                own.data = room[: own.numel()].view(own.shape)
            self._memory.append((flat, flat.clone()))
            if lasting:
                self.lasting.append(flat)
        self._remember()

    def _guard_in_place(self, tensor: Tensor, *, lasting: bool) -> None:
        room = tensor.data
        if lasting:
            order = memory_order(room)
            self.lasting.append((room if order is None else room.permute(order)).reshape(-1))
        self._memory.append((room, room.clone()))

    def _remember(self) -> None:
        new = {id(tensor): tensor.data for tensor in self._guarded}
        self._places = [
            place._replace(memory=new.get(id(place.tensor))) if place.memory is None else place
            for place in self._places
        ]
        self._checks = [
            (place, place.tensors, place.name, place.tensor, 0 if place.memory is None else place.memory.data_ptr())
            for place in self._places
        ]

    def follow(self, names: Iterable[str]) -> None:
        """Guard parameters, the same on all ranks, like buffers from now on; all ranks get the values of rank 0."""
        for name in names:
            for tensor in [place.tensor for place in self._places if place.path == name and place.memory is None]:
                assert tensor is not None
                self._guard_in_place(tensor, lasting=True)
                self._guarded.append(tensor)
                self._remember()
                for masters in self.masters:
                    masters.follow(tensor)

    def snapshot(self) -> None:
        """Save a copy of all guarded tensors on the device, before a training step."""
        self.settle()
        for memory, saved in self._memory:
            saved.copy_(memory)
        for masters in self.masters:
            masters.mark()

    def settle(self) -> None:
        """Bring guarded tensors that were moved or replaced back to their own memory, with the new values.

        Raises ConfigError if a trained parameter was replaced, or a parameter has another shape or dtype.
        """
        for place, tensors, name, tensor, address in self._checks:
            if tensors.get(name) is not tensor or (address and tensor.data_ptr() != address):  # type: ignore[union-attr]
                self._take_over(place)

    @torch.no_grad()
    def _take_over(self, place: _Place) -> None:
        path, tensors, name, tensor, memory = place
        current, home = tensors.get(name), tensor if memory is None else memory
        same = current is not None and home is not None and _kind(current) == _kind(home)
        fits = same and (current is tensor or self._uses[id(tensor)] == 1)
        if isinstance(tensor, nn.Parameter) and (not fits or (current is not tensor and tensor.requires_grad)):
            raise _exchanged(path, current)
        if not fits:
            self._places = [one for one in self._places if one is not place]
            self._remember()
            if path not in self._said:
                self.notes.append(
                    f"the buffer {path} becomes a tensor that a skipped step cannot restore: of another shape or dtype,"
                    " or shared"
                )
            self._said.add(path)
            return
        assert current is not None
        assert home is not None
        assert tensor is not None
        home.copy_(current.detach())
        tensor.data, tensors[name] = home.data, tensor
        increment_version([tensor])

    def write_through(self, applied: Tensor) -> None:
        """Write changes that passes made to parameters into their master weights, if the update will be applied."""
        for masters in self.masters:
            masters.take_changes(applied)

    def require_seen(self) -> None:
        """Refuse, with ConfigError, changes of parameters that could not be written through; reads the device."""
        for masters in self.masters:
            masters.require_seen()

    def restore(self, skip: Tensor) -> None:
        """Restore all guarded tensors if ``skip`` (float32, shape (1,)) is 1, without synchronising with the host."""
        self.settle()
        if not self._memory:
            return
        skipped = skip == 1
        for memory, saved in self._memory:
            torch.where(skipped, saved, memory, out=memory)
        increment_version(self._guarded)  # a live autograd graph may have saved the old values

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        """Undo all changes of guarded tensors on exit, unless the block raises."""
        self.settle()
        before = [memory.clone() for memory, _ in self._memory]
        yield
        self.settle()
        for (memory, _), kept in zip(self._memory, before, strict=True):
            memory.copy_(kept)
        increment_version(self._guarded)
        self._undone += 1

    @contextlib.contextmanager
    def unharmed(self, task: object = None) -> Iterator[tuple[list[str], list[str]]]:
        """Undo all changes of buffers, parameters, submodules and plain attributes on exit, and say what they were.

        Plain attributes, of modules and of a ``task``, are tensors, numbers, texts, None, and what lists, sets,
        dictionaries and deques hold. Yields
        two lists that are filled at the exit: names of the parameters that were changed, and of the buffers in half
        precision that were written, even if rounding left them as they were; and names of the buffers that became
        tensors which a skipped step cannot restore. Raises as `settle`.
        """
        self.snapshot()
        places, changed, unguarded = self._places, list[str](), list[str]()
        parameters, attributes = _SavedParameters(places), _SavedAttributes([*self._modules, task])
        halves = [
            (place.path, own, own._version - self._undone, place.memory, place.memory.to("cpu", copy=True))
            for place in places
            if (own := place.tensor) is not None and place.memory is not None
            if place.memory.is_floating_point() and place.memory.dtype.itemsize == 2
        ]
        try:
            yield changed, unguarded
            self.settle()
            changed += [
                path
                for path, own, version, memory, values in halves
                if own._version - self._undone != version or not torch.equal(memory.cpu(), values)
            ]
            parameters.require_same_kinds()
        finally:
            changed += parameters.put_back()
            unguarded += self._put_back(places)
            attributes.put_back()

    def _put_back(self, places: list[_Place]) -> list[str]:
        """Give all tensors back to their modules, with the values of the last snapshot; return those that had gone."""
        gone = []
        for place in places:
            home, own = place.memory, place.tensor
            moved = home is not None and own is not None and own.data_ptr() != home.data_ptr()
            if place.tensors.get(place.name) is not own or moved:
                gone.append(place.path)
                place.tensors[place.name] = own
            if own is not None and home is not None:
                own.data = home
        self._places = places
        self._remember()
        for memory, saved in self._memory:
            memory.copy_(saved)
        increment_version(self._guarded)
        return gone


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
    """Plain attributes and submodules of objects, with copies of what containers and tensors among them hold."""

    def __init__(self, owners: Iterable[object]) -> None:
        self._saved = [(own, _attributes(own)) for one in owners if (own := getattr(one, "__dict__", None)) is not None]
        children = [own["_modules"] for own, _ in self._saved if type(own.get("_modules")) is dict]
        self._children = [(own, dict(own)) for own in children]
        tensors = [one for _, kept in self._saved for one, _ in kept.values() if _is_plain(one)]
        self._tensors = [(one, one._version, one.data_ptr(), one.detach().clone()) for one in tensors]

    def put_back(self) -> None:
        """Restore attributes and their content, and remove public ones that are new."""
        for now, kept in self._children:
            if now != kept:
                now.clear()
                now.update(kept)
        for now, kept in self._saved:
            for name in [name for name in now.keys() - kept if not name.startswith("_")]:
                del now[name]
            for name, (value, content) in kept.items():
                now[name] = value
                if content is not None:
                    value.clear()
                    (value.extend if isinstance(value, (list, deque)) else value.update)(content)
        for tensor, version, address, values in self._tensors:
            if tensor._version != version or tensor.data_ptr() != address:
                tensor.data = values


#: Attributes that every module has, such as its parameters and hooks, and types of private ones that are restored.
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}
_CONTAINERS = (list, set, dict, deque)
_SIMPLE = (int, float, complex, str, type(None), *_CONTAINERS)


def _attributes(attributes: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return a module's attributes, of private ones only simple values; each with a copy of what a container holds."""
    return {
        name: (value, copy.copy(value) if isinstance(value, _CONTAINERS) else None)
        for name, value in attributes.items()
        if name not in _OF_EVERY_MODULE and (not name.startswith("_") or isinstance(value, _SIMPLE))
    }


def _is_plain(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided and not value.is_inference()


def _exchanged(path: str, now: Tensor | None) -> ConfigError:
    return ConfigError(
        f"the parameter {path} is replaced by {'nothing' if now is None else _kind(now)[0]} in a training step, and "
        "the optimizer still updates the one that the model was built with",
        "change its values in place instead, under torch.no_grad()",
    )


def _kind(tensor: Tensor) -> tuple[str, torch.device]:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)}", tensor.device
