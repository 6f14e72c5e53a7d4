"""Guard of what forward and backward passes change besides gradients: module buffers, and parameters.

A forward pass with one inf input leaves BatchNorm's running variance NaN for good, even if the step is skipped. A
skipped step must therefore not change the buffers of any module, nor a parameter that a module changes itself (a
constraint on its norm, a moving average of other parameters).
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from mptrain.engine.private_state import PrivateState, kind_of, repeats
from mptrain.numerics.tensors import flat, is_sharded, memory_order
from mptrain.system.errors import ConfigError
from mptrain.system.torch_private import foreach_copy_, storage_key
from mptrain.system.words import listed

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
    """Tensors of a model: its slots, the guarded tensors, and sizes of the modules' mappings of buffers.

    ``memory`` has the guarded tensors, each flattened in its own memory or alone as it is, with a copy of their values.
    """

    slots: list[_Place]
    guarded: list[Tensor]
    memory: list[tuple[list[Tensor], Tensor]]
    lasting: dict[str, Tensor]
    sizes: list[tuple[dict[str, Tensor | None], int]]


class Undone(NamedTuple):
    """Changes that `BufferGuard.unharmed` has undone.

    Attributes:
        changed: Names of the parameters that were changed, and of the buffers in half precision that were written, even
            if rounding left them as they were.
        private: Paths of the attributes, no buffers, that were changed so that later passes may read it.
        paths: Path of each tensor that an attribute holds and that is no parameter or buffer of the model, by identity.
        beyond: Path past which nothing was looked at or undone, because too many objects hang from the model; or None.
    """

    changed: list[str]
    private: list[str]
    paths: dict[int, str]
    beyond: str | None


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

    def __init__(self, model: nn.Module, masters: Sequence[MasterWeights] = ()) -> None:
        self.masters = tuple(masters)
        self.reshaped: set[str] = set()
        self._model = model
        self._followed: list[str] = []
        self._frozen = [  # by place: FSDP2 exchanges the tensors
            (f"{path}.{name}".strip("."), module._parameters, name)
            for path, module in model.named_modules()
            for name, parameter in module._parameters.items()
            if parameter is not None and not parameter.requires_grad
        ]
        self._undone = 0  # times that `unchanged` has increased the version of every guarded tensor
        self._before: _Held | None = None  # what it held at the snapshot, if a buffer has changed its shape since
        self._hold(self._gathered(move=True))
        self.agree()

    def _gathered(self, *, move: bool = False) -> _Held:
        """Find all places of tensors, with buffers and followed parameters to be guarded.

        With ``move``, buffers get contiguous memory of their own that can grow, which NumPy may have forbidden.
        """
        slots: list[_Place] = []
        sizes: list[tuple[dict[str, Tensor | None], int]] = []
        guarded: list[Tensor] = []
        lasting: dict[str, Tensor] = {}
        held = {
            id(tensor): tensor
            for tensor in (*self._model.parameters(), *self._model.buffers())
            if not is_sharded(tensor)
        }
        shared = Counter(storage_key(tensor.untyped_storage()) for tensor in held.values())
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
                        or (is_shared and repeats(tensor))  # its memory is guarded with the tensor that it repeats
                    ):
                        slots.append(_Place(full, tensors, name, tensor, None))
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
                            lasting.update({} if room is None else {full: room})
                    slots.append(_Place(full, tensors, name, tensor, seen[id(tensor)]))
        rooms = [*by_kind.values(), *([tensor] for tensor in alone)]
        return _Held(slots, guarded, [(group, _joined(group).clone()) for group in rooms], lasting, sizes)

    def _hold(self, held: _Held) -> None:
        self._held = held
        self._uses = Counter(id(slot.tensor) for slot in held.slots)
        self._checks = [
            (slot, slot.tensors, slot.name, own, home is not None, *_whereabouts(home))
            for slot in held.slots
            for own, home in [(slot.tensor, slot.memory)]
        ]

    @property
    def count(self) -> int:
        """Number of guarded tensors."""
        return len(self._held.guarded)

    @property
    def lasting(self) -> list[Tensor]:
        """Flat memory of persistent buffers, such as BatchNorm's running statistics, and of guarded parameters.

        On all ranks it has the sizes of the last `agree`: memory that nobody reads stands in for a buffer that training
        has reshaped since.
        """
        rooms = []
        for name, agreed in self._agreed.items():
            room = self._held.lasting.get(name)
            same = room is not None and (room.numel(), room.dtype) == (agreed.numel(), agreed.dtype)
            rooms.append(room if room is not None and same else torch.empty_like(agreed))
        return rooms

    def agree(self) -> None:
        """Take notice that the buffers have equal sizes on all ranks now."""
        self._agreed = dict(self._held.lasting)

    @property
    def lasting_reshaped(self) -> dict[str, Tensor]:
        """Flat memory of the persistent buffers that training has made or reshaped, by name."""
        return {name: self._held.lasting[name] for name in sorted(self.reshaped & self._held.lasting.keys())}

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
        new = {slot.path: slot.tensor for slot in self._held.slots if slot.memory is None}  # alike on all ranks
        self._followed += (added := [name for name in names if new.get(name) is not None])
        if added:
            self._hold(self._gathered())
            self.agree()
        for name in added:
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
        if thawed := [
            full
            for full, own, name in self._frozen
            if (parameter := own.get(name)) is not None and parameter.requires_grad
        ]:
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
        for slot, tensors, name, tensor, guarded, address, shape in self._checks:
            if tensors.get(name) is not tensor or (
                guarded and (tensor.data_ptr() != address or tensor.shape != shape)  # type: ignore[union-attr]
            ):
                other |= not self._taken_over(slot)
        if other:
            before = {slot.path: slot.memory for slot in self._held.slots}
            self._before = self._before or self._held
            self._hold(self._gathered())
            self.reshaped |= {
                slot.path
                for slot in self._held.slots
                if (now := slot.memory) is not None
                if (old := before.get(slot.path)) is None or kind_of(old) != kind_of(now)
            }

    @torch.no_grad()
    def _taken_over(self, slot: _Place) -> bool:
        """Copy what a module holds in a slot to its memory; return False for a buffer that does not fit there."""
        path, tensors, name, tensor, memory = slot
        current, home = tensors.get(name), tensor if memory is None else memory
        same = current is not None and home is not None and kind_of(current) == kind_of(home)
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
        held, before, reshaped = self._held, self._before, set(self.reshaped)
        now = held._replace(memory=[(rooms, _joined(rooms).clone()) for rooms, _ in held.memory])
        yield
        self.settle()
        self._put_back(now)
        self._held, self._before, self.reshaped = held, before, reshaped
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
        private, attributes = list[str](), PrivateState(owners, [slot.tensor for slot in held.slots])
        parameters = _SavedParameters(held.slots)
        halves = [
            (slot.path, own, own._version - self._undone, slot.memory, slot.memory.to("cpu", copy=True))
            for slot in held.slots
            if (own := slot.tensor) is not None and slot.memory is not None
            if slot.memory.is_floating_point() and slot.memory.dtype.itemsize == 2
        ]
        try:
            yield Undone(changed, private, attributes.paths, attributes.beyond)
            self.settle()
            changed += [
                path
                for path, own, version, memory, values in halves
                if own._version - self._undone != version or not torch.equal(memory.cpu(), values)
            ]
            parameters.require_same_kinds()
        finally:
            changed += parameters.put_back()
            try:
                private += attributes.put_back()
            finally:  # objects of a user may raise anything
                self._put_back(held)
                self.reshaped = reshaped

    def _put_back(self, held: _Held) -> None:
        """Give all tensors back to their modules, with saved values, and remove buffers that are new."""
        known: dict[int, dict[str, Tensor | None]] = {}
        for slot in held.slots:
            known.setdefault(id(slot.tensors), {})[slot.name] = slot.tensor
        for tensors, _ in held.sizes:
            tensors.clear()
            tensors.update(known.get(id(tensors), {}))
        for slot in held.slots:
            home, own = slot.memory, slot.tensor
            if slot.tensors.get(slot.name) is not own:
                slot.tensors[slot.name] = own
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

    def __init__(self, slots: Iterable[_Place]) -> None:
        self._saved = _host_copies(slots)

    def require_same_kinds(self) -> None:
        """Raise ConfigError if a parameter has another dtype, shape or device now."""
        for path, parameter, memory, *_ in self._saved:
            if kind_of(parameter) != kind_of(memory):
                raise _exchanged(path, parameter)

    def put_back(self) -> list[str]:
        """Restore the values, and return the names of the parameters that were changed."""
        changed = []
        for path, parameter, memory, version, values in self._saved:
            moved = parameter._version != version or parameter.data_ptr() != memory.data_ptr()
            if moved or not torch.equal(parameter.detach().cpu(), values):
                changed.append(path)
                parameter.data = memory.copy_(values)
                increment_version([parameter])
        return changed


def _host_copies(slots: Iterable[_Place]) -> list[tuple[str, nn.Parameter, Tensor, int, Tensor]]:
    """Return name, parameter, memory, version and values of all parameters."""
    return [
        (slot.path, parameter, parameter.data, parameter._version, parameter.detach().to("cpu", copy=True))
        for slot in slots
        if isinstance(parameter := slot.tensor, nn.Parameter)
    ]


class Thawed(ConfigError):
    """Error raised if a model lets a parameter learn that was frozen when the optimizer was built."""


def _exchanged(path: str, now: Tensor | None) -> ConfigError:
    return ConfigError(
        f"the parameter {path} is replaced by {'nothing' if now is None else kind_of(now)[0]} in a training step, and "
        "the optimizer still updates the one that the model was built with",
        "change its values in place instead, under torch.no_grad()",
    )
