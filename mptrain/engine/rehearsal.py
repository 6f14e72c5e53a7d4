"""Rehearsal of a training step without an update, which checks that the precision mode does what it promises.

Everything that the passes change is restored, so a rehearsed run trains exactly like one that was not rehearsed.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from mptrain.engine.failure_diagnosis import SAME_MODULES
from mptrain.engine.module_trail import ModuleTrail
from mptrain.engine.private_state import is_of_torch, is_of_user
from mptrain.engine.resources import memory_by_use, saved_bytes
from mptrain.engine.step import accumulate_gradients
from mptrain.numerics.overflow_check import judge
from mptrain.numerics.tensors import is_sharded, part, part_for
from mptrain.parallel.strategy import SingleProcessStrategy
from mptrain.precision.apply import input_dtype
from mptrain.precision.census import OperatorCensus, check_step
from mptrain.precision.emulation import check_emulated
from mptrain.runlog.checkpoint_data import check_plain
from mptrain.scaler.base import with_scale
from mptrain.system.device import capabilities, widest
from mptrain.system.errors import ConfigError, EnvironmentRefused, FirstBatchError, kernel_refusal, out_of_memory
from mptrain.system.process_state import other_random_numbers, random_state, set_random_state
from mptrain.system.records import EventRecord
from mptrain.system.torch_private import disable_current_modes, has_gradient_hooks, leaves, storage_key
from mptrain.system.words import elided, listed

if TYPE_CHECKING:
    from mptrain.engine.options import Options
    from mptrain.engine.parts import Parts
    from mptrain.engine.step import Learner
    from mptrain.engine.telemetry import Telemetry
    from mptrain.precision.policy import Policy
    from mptrain.workloads.base.batch import Batch


#: Numbers of passes after which a tensor that accumulates is found, and by how much more of a shift a mean over all
#: batches, which keeps more of what it was with each batch, keeps after the larger number (1/2 and 3/4).
_PASSES, _MORE = (2, 4), 0.1

#: Error of a running mean, relative to its value, above which rounding harms it. A mean that keeps the share r of what
#: it was stops changing where (1 - r) times its error is half a unit in the last place: about eps / (2 (1 - r)).
_STALLED = 0.01


@dataclass(frozen=True)
class Rehearsal:
    """Result of a rehearsed training step: parameters without training, and the operators that ran with their dtypes.

    Attributes:
        untrained: Names of the parameters that will not be trained, by reason: ``frozen``, ``no_learner``,
            ``no_gradient``.
        operators: Result of `OperatorCensus.table`; those in ``in_half`` ran with half-precision tensors.
        changed: Names of parameters that passes change, and of buffers in half precision that they write, on any rank.
        doubts: Warnings about what the passes do and training cannot follow, one sentence each.
        memory: Bytes by use, as `memory_by_use`; activations are those of the largest pass.
    """

    untrained: dict[str, list[str]]
    operators: dict[str, list[dict[str, Any]]]
    in_half: frozenset[Any]
    changed: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()
    memory: Mapping[str, int] = field(default_factory=dict)


def rehearse_run(parts: Parts, options: Options, telemetry: Telemetry, batch: Batch, planned: int) -> int:
    """Rehearse a run's first step without an update: record its operators, and warn of deviations from the options.

    ``batch`` is this rank's part of the first batch as it was loaded. Afterwards the model is compiled, if that was
    requested. Returns the bytes that a pass saves for its backward pass. Raises as `rehearse`.
    """
    raw, batch = batch, parts.prepare(batch)
    rehearsal = rehearse(parts, batch)
    parts.plan.products.leave_out_idle(parts.model, rehearsal.in_half)
    telemetry.sink.take(EventRecord("operators", telemetry.step, rehearsal.operators))
    telemetry.sink.take(EventRecord("memory", telemetry.step, dict(rehearsal.memory)))
    if any(rehearsal.untrained.values()):
        telemetry.sink.take(EventRecord("untrained", telemetry.step, rehearsal.untrained))
    for sentence in (*warnings_about(rehearsal.untrained), *parts.fault.check(batch, planned)):
        telemetry.warn(sentence)
    for sentence in (*rehearsal.doubts, *rounded_numbers(raw, batch)):
        telemetry.warn(sentence)
    if parts.blank is not None and rehearsal.untrained["no_gradient"]:
        telemetry.warn(
            f"parameters without a gradient may belong to layers that are left out at random: {SAME_MODULES}"
        )
    trained = {
        name
        for learner in parts.learners
        for name, parameter in zip(learner.weights.names, learner.weights.params, strict=True)
        if parameter.dtype.itemsize == 2
    }
    if halves := (*rounded_tensors(parts, batch, rehearsal), *(name for name in rehearsal.changed if name in trained)):
        telemetry.warn(
            f"forward passes change {listed(halves)} in {parts.policy.parameters}, which rounds small "
            "changes away (precision.keep_fp32 can name their modules)"
        )
    if options.train.compile:
        parts.compile()
    if options.train.engine == "graph" and parts.comm.world_size > 1:
        telemetry.warn("train.engine=graph: with several ranks the step runs without a CUDA graph")
    elif options.train.engine == "graph" and not capabilities(parts.device).graphs:
        telemetry.warn("train.engine=graph: only CUDA devices have graphs; the step runs without one")
    return rehearsal.memory["activations"]


def rehearse(parts: Parts, batch: Batch) -> Rehearsal:
    """Run every learner's forward and backward pass on a prepared batch, without an update, and check the dtypes.

    The model is in training mode and not compiled yet. Gradients, buffers and random states are restored. Raises
    EnvironmentRefused if a parameter or a product does not have the dtype that the precision mode promises, or torch
    has no kernel in that dtype for an operator; ConfigError if a loss is not a float32 scalar, or the first batch fails
    for another reason.
    """
    trail, guard = ModuleTrail(check_finite=False), parts.plan.guard
    census = OperatorCensus(trail.module)
    plan = replace(parts.plan, products=census.inside(parts.plan.products))
    plan.products.calls.clear()  # of passes before, in other networks
    missing, doubts, saved = list[str](), list[str](), [0]
    known: dict[int, torch.Tensor] = {id(parameter): parameter for parameter in parts.model.parameters()}
    batch = batch.clone()  # a model may change its inputs in place; the first step needs the originals
    with (
        guard.unharmed(parts.task) as undone,
        other_random_numbers(parts.device),
        trail.followed(parts.model),
    ):
        for learner in parts.learners:
            learner.weights.gradients.zero_grad()
            random = random_state(parts.device)
            with (
                _explained(parts, trail, batch),
                _gathered_unchanged(parts),
                _leaves_of(learner, parts, known, saved) as leaves,
                _hooked_tensors() as hooked,
                learner.strategy.rehearsal(learner.weights),
            ):
                try:
                    accumulate_gradients(learner, parts.model, batch, plan)
                finally:
                    _require_dense(learner)
            _require_next_scale(learner)
            missing += learner.weights.gradients.missing()
            with _explained(parts, trail, batch):
                _require_owners(learner, parts, batch, leaves, known, undone.paths)
                doubts += _doubts_of_hooks(learner, parts, batch, random, anywhere=bool(hooked))
            learner.weights.gradients.zero_grad()
        _require_same_everywhere(parts, missing)
        _require_plain_extra_states(parts.model)
    changed = _changed_tensors(parts, undone.changed, census)
    if undone.private:
        doubts.append(
            f"training changes {listed(undone.private)} outside of buffers: no checkpoint holds this, and a skipped "
            "step does not restore it (register_buffer makes a buffer of a tensor, get_extra_state saves other values)"
        )
    if undone.beyond:
        doubts.append(
            f"more objects hang from the model and its task than mptrain looks at: whether training changes what lies "
            f"beyond {undone.beyond} is not known"
        )
    guard.follow(changed)
    model = parts.model if parts.blank is None else parts.blank  # has the dtypes of a forward pass
    kept = {name: model.get_submodule(name) for name in parts.kept}
    check_step(parts.policy, model, kept, census)
    if in_fp32 := check_emulated(parts.policy, plan.products.calls):
        doubts.append(in_fp32)
    return Rehearsal(
        {**untrained_parameters(parts), "no_gradient": missing},
        census.table(),
        frozenset(census.in_half),
        tuple(changed),
        tuple(doubts),
        memory_by_use(parts, max(saved)),
    )


@contextlib.contextmanager
def _leaves_of(
    learner: Learner, parts: Parts, known: dict[int, torch.Tensor], saved: list[int] | None = None
) -> Iterator[dict[int, torch.Tensor]]:
    """Find the tensors to which backward passes give gradients, by identity, and which are not ``known``.

    ``saved`` gets the bytes that each pass saves. Tensors of the batch are left out, and gathered parameters, which
    become known. Those that are read within a reentrant checkpoint of activations cannot be seen.
    """
    objective, unknown_leaves = learner.objective, dict[int, torch.Tensor]()

    def loss_of(model: nn.Module, micro: Batch) -> torch.Tensor:
        loss = objective.loss(model, micro)
        given = {*known, *map(id, micro.tensors().values())}
        unknown_leaves.update({id(leaf): leaf for leaf in leaves(loss) if id(leaf) not in given})
        if saved is not None:
            saved.append(saved_bytes(loss, parts.model))
        return loss

    def gather(module: nn.Module, given: Any, result: Any) -> None:
        known.update({id(parameter): parameter for parameter in module.parameters()})

    learner.objective = replace(objective, loss=loss_of)
    try:
        with register_module_forward_hook(gather) if parts.blank is not None else contextlib.nullcontext():
            yield unknown_leaves
    finally:
        learner.objective = objective


def _require_owners(
    learner: Learner,
    parts: Parts,
    batch: Batch,
    unknown_leaves: Mapping[int, torch.Tensor],
    known: dict[int, torch.Tensor],
    paths: Mapping[int, str],
) -> None:
    """Refuse tensors outside the model that get a gradient in every pass, and that nothing but a learner could train.

    Those that a pass makes, and those that their own code changes, are no parameters.
    """
    if not any(parts.comm.all_gather_object(bool(unknown_leaves))):
        return
    before = {key: leaf.detach().clone() for key, leaf in unknown_leaves.items()}
    micro = batch.clone().split(parts.plan.accumulate)[0]
    with _leaves_of(learner, parts, known) as again, parts.plan.products.context, learner.only_trainable():
        strategy = SingleProcessStrategy() if parts.blank is None else learner.strategy
        with parts.plan.autocast:
            strategy.loss_of(learner.loss, parts.model, learner.weights, single_microbatch=False)(micro)
    for leaf in unknown_leaves.values():
        leaf.grad = None
    if untrained := [
        paths.get(key, f"a tensor of shape {tuple(leaf.shape)}")
        for key, leaf in unknown_leaves.items()
        if key in again and torch.equal(leaf, before[key])
    ]:
        raise ConfigError(
            f"{listed(untrained)} {'gets' if len(untrained) == 1 else 'get'} a gradient and would never be trained: "
            "the model does not register it, so that no learner has it",
            "make it a part of the model: an attribute that is an nn.Parameter or a module (nn.ParameterList or "
            "nn.ModuleList for several), which the task's loss can read; or call requires_grad_(False) if it is to "
            "stay as it is",
        )


@contextlib.contextmanager
def _hooked_tensors() -> Iterator[list[torch.Tensor]]:
    """Find the tensors whose gradients get a hook that is none of torch's; autograd keeps no list of them."""
    hooked, usual = list[torch.Tensor](), torch.Tensor.register_hook

    def register_hook(tensor: torch.Tensor, hook: Any) -> Any:
        if not is_of_torch(hook):
            hooked.append(tensor)
        return usual(tensor, hook)  # type: ignore[no-untyped-call]

    torch.Tensor.register_hook = register_hook  # type: ignore[method-assign]
    try:
        yield hooked
    finally:
        torch.Tensor.register_hook = usual  # type: ignore[method-assign]


def _doubts_of_hooks(
    learner: Learner, parts: Parts, batch: Batch, random: dict[str, Any], *, anywhere: bool
) -> list[str]:
    """Return a warning if gradients that hooks change do not scale with the loss, as clamped ones do not.

    ``random`` is the random state before the pass whose gradients the learner has; ``anywhere`` says that the pass has
    hooked functions to gradients of activations. Several ranks do not look, and say so.
    """
    anywhere = anywhere or any(map(has_gradient_hooks, parts.model.modules()))
    own = zip(learner.weights.names, learner.weights.params, strict=True)
    names = [name for name, parameter in own if anywhere or has_gradient_hooks(parameter)]
    if not names or learner.scaler.is_identity:
        return []
    if parts.comm.world_size > 1:
        where = "gradients of activations" if anywhere else listed(names)
        return [f"hooks change {where}, and with several ranks it is not tried whether the loss scale spoils them"]
    full, state = learner.weights.gradients.by_name(), learner.scale_state
    full = {name: full[name].clone() for name in names if name in full}
    learner.weights.gradients.zero_grad()
    learner.scale_state = {**state, "scale": state["scale"] / 2}
    try:
        set_random_state(random, parts.device)
        accumulate_gradients(learner, parts.model, batch.clone(), parts.plan)
        half = learner.weights.gradients.by_name()
    finally:
        learner.scale_state = state
    odd = [
        name
        for name, gradient in full.items()
        if name in half and gradient.isfinite().all() and (gradient == 0).equal(half[name] == 0)  # none underflows
        if not torch.isclose(gradient.double().norm(), 2 * half[name].double().norm(), rtol=0.1)
    ]
    return [
        f"gradients of {listed(odd)} do not grow with the loss scale: a hook of a parameter, module or activation "
        "clamps or adds to scaled gradients (mptrain doctor measures the error; optimizer.clip_norm clips after "
        "unscaling)"
    ] * bool(odd)


def rounded_numbers(raw: Batch, batch: Batch) -> list[str]:
    """Return a warning if the cast of a batch changes columns of whole numbers, which may be numbers of categories."""
    wide, half = raw.inputs, batch.inputs.cpu()
    if wide.dtype != torch.float32 or half.dtype.itemsize != 2 or wide.ndim not in (2, 3) or wide.shape != half.shape:
        return []
    rows, cast = wide.flatten(0, -2), half.float().flatten(0, -2)
    if not torch.equal(wide.to(half.dtype), half):  # the data set prepares them otherwise
        return []
    columns = ((rows == rows.round()).all(0) & (rows != cast).any(0)).nonzero().flatten().tolist()
    return [
        f"the cast of the inputs to {half.dtype} changes whole numbers in column {listed([*map(str, columns)])}: "
        "numbers of categories become others (give them to the model as integers, or choose a precision whose "
        "parameters are FP32, such as amp_dynamic; mptrain doctor measures the error)"
    ] * bool(columns)


def _require_next_scale(learner: Learner) -> None:
    """Require that the scaler makes a new state with a scale in FP32 after a clean step; a rule may be the user's."""
    scale, version = learner.scale, learner.scale._version
    norms = torch.ones(len(learner.weights.names), dtype=widest(scale.device), device=scale.device)
    verdict = judge(norms, scale, skip_on_overflow=True, measured=norms[:1])
    with_scale(learner.scaler.after(learner.scale_state, verdict))
    if scale._version != version:  # the record keeps it
        raise ConfigError(f"{type(learner.scaler).__name__}.after() changes the scale in place", "return a new tensor")


def _require_dense(learner: Learner) -> None:
    for name, parameter in zip(learner.weights.names, learner.weights.params, strict=True):
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            raise ConfigError(
                f"the gradient of {name} is sparse, and norms and updates need dense gradients",
                "set sparse=False in the module that reads it",
            )


@contextlib.contextmanager
def _gathered_unchanged(parts: Parts) -> Iterator[None]:
    """Refuse, in passes, modules that change gathered weights, which are freed with the change."""
    if parts.blank is None:
        yield
        return
    shards, changed = dict(parts.model.named_parameters()), set[str]()
    names = {id(module): name for name, module in parts.model.named_modules()}

    def look(module: nn.Module, given: Any, result: Any) -> None:
        with disable_current_modes():  # the census counts operators of the model only
            for name, gathered in module.named_parameters(names.get(id(module), "")):
                if name in shards and not is_sharded(gathered):
                    own = part_for(gathered.detach(), shards[name])
                    changed.update({name} if not torch.equal(own, part(shards[name]).to(own.dtype)) else ())

    with register_module_forward_hook(look):
        yield
    if changed := set().union(*parts.comm.all_gather_object(changed)):
        raise ConfigError(
            f"the parameter {min(changed)} is changed in a forward pass, and distributed=fsdp2 frees gathered weights "
            "with such changes",
            "choose distributed=ddp",
        )


def _changed_tensors(parts: Parts, changed: list[str], census: OperatorCensus) -> list[str]:
    """Return the parameters that passes change, or write to without a change yet, and changed half buffers, sorted."""
    if parts.blank is not None:
        return []
    written = [n for n, p in parts.model.named_parameters() if storage_key(p.untyped_storage()) in census.written]
    return sorted(set().union(*parts.comm.all_gather_object([*changed, *written])))


def rounded_tensors(parts: Parts, batch: Batch, rehearsal: Rehearsal) -> tuple[str, ...]:
    """Return the changed tensors in half precision that accumulate over steps, unless an optimizer updates them.

    A tensor accumulates if so much of a shift of all its finite values is still there after another pass, as in a
    counter or a slow running mean, that rounding makes it stop at a wrong value (`_STALLED`). The passes before the
    shift are for means over all batches so far, which forget their start, and for observers that start at inf. Rounding
    does not harm other tensors, such as the vectors of a spectral norm, and values that are written without a change
    and stay 0 once they are 0, as by a clamp. With several ranks, or if a pass fails with other values, all changed
    ones are returned.
    """
    trained = {id(parameter) for learner in parts.learners for parameter in learner.weights.params}
    tensors: dict[str, torch.Tensor] = {
        **dict(parts.model.named_parameters(remove_duplicate=False)),
        **dict(parts.model.named_buffers(remove_duplicate=False)),
    }
    halves = [
        name for name in rehearsal.changed if tensors[name].dtype.itemsize == 2 and id(tensors[name]) not in trained
    ]
    if parts.comm.world_size > 1 or not halves:
        return tuple(halves)
    micro, plan = batch.split(parts.plan.accumulate)[0], replace(parts.plan, accumulate=1)
    shifts: dict[str, float] = {}

    def run(passes: int, times: int, share: float = 1.0) -> list[torch.Tensor]:
        with plan.guard.unharmed(parts.task), other_random_numbers(parts.device), torch.no_grad():
            for left in reversed(range(passes)):
                for name in halves if left == 0 else ():
                    finite = tensors[name].float().nan_to_num(posinf=0.0, neginf=0.0)
                    shifts[name] = max(1.0, float(finite.abs().max())) / 8
                    tensors[name].mul_(share).add_(times * shifts[name])
                for learner in parts.learners:
                    with torch.enable_grad():
                        accumulate_gradients(learner, parts.model, micro.clone(), plan)
                    learner.weights.gradients.zero_grad()
                plan.guard.settle()
            return [tensors[name].float() for name in halves]

    try:
        usual, zeros = run(1, 0), run(1, 0, 0.0)
        same = [torch.equal(tensors[name].float(), after) for name, after in zip(halves, usual, strict=True)]
        halves = [name for name, still, zero in zip(halves, same, zeros, strict=True) if not still or zero.any()]
        shares: dict[str, list[float]] = {name: [] for name in halves}
        for passes in _PASSES:
            for name, before, after in zip(halves, run(passes, 0), run(passes, 1), strict=True):
                moved = (after - before)[before.isfinite()]
                shares[name].append(float(moved.min()) / shifts[name] if moved.numel() else 0.0)
    except Exception as error:  # a model may refuse the shifted values
        if isinstance(error, torch.AcceleratorError) or out_of_memory(error):
            raise
        return tuple(halves)
    limits = {name: 1 - torch.finfo(tensors[name].dtype).eps / (2 * _STALLED) for name in halves}
    return tuple(
        name for name, (early, late) in shares.items() if late > limits[name] or (late > 0.5 and late > early + _MORE)
    )


def _require_plain_extra_states(model: nn.Module) -> None:
    """Refuse extra states of modules that a checkpoint cannot hold."""
    for path, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            state = module.get_extra_state()
            try:
                check_plain(state, f"{path or 'the model'}.get_extra_state()")
            except TypeError as error:
                raise ConfigError(f"{error}", "return a tensor, or the bytes of what it returns") from error


def _require_same_everywhere(parts: Parts, missing: list[str]) -> None:
    """Require of sharded weights that each gets a gradient on all ranks or on none, for the reduce-scatter."""
    if parts.blank is None:
        return
    everyones = parts.comm.all_gather_object(missing)
    if differing := set().union(*everyones) - set(missing).intersection(*everyones):
        raise ConfigError(
            f"{min(differing)} gets a gradient on some ranks only; distributed=fsdp2 needs it on all ranks",
            "choose distributed=ddp",
        )


def untrained_parameters(parts: Parts) -> dict[str, list[str]]:
    """Return the names of parameters that no optimizer updates, by reason: ``frozen`` or ``no_learner``."""
    parameters = dict(parts.model.named_parameters())
    owned = {name for learner in parts.learners for name in learner.weights.names}
    return {
        "frozen": [name for name, parameter in parameters.items() if not parameter.requires_grad],
        "no_learner": [name for name, p in parameters.items() if p.requires_grad and name not in owned],
    }


#: Parts of the messages of torch and oneDNN for an operator without a half-precision kernel.
_NO_KERNEL = (
    "not implemented for 'Half'",
    "not implemented for 'BFloat16'",
    "Unsupported dtype Half",
    "could not create a primitive",
)


@contextlib.contextmanager
def _explained(parts: Parts, trail: ModuleTrail, batch: Batch) -> Iterator[None]:
    """Convert exceptions of the passes into errors with a hint for the user."""
    try:
        yield
    except torch.AcceleratorError:  # a device error, not a mismatch of parts
        raise
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as error:
        if out_of_memory(error) or parts.comm.is_lost(error):
            raise
        if refused := kernel_refusal(error):
            raise refused from error
        first_line = str(error).splitlines()[0] if str(error) else "no message"
        if parts.blank is not None and "torch.Tensor and DTensor" in str(error):
            raise ConfigError(
                f"{type(parts.model).__name__} uses weights of a block outside the block's forward, where "
                "distributed=fsdp2 has not gathered them",
                "gather all weights at once with distributed.units=[], name the blocks there, or choose "
                "distributed=ddp",
            ) from error
        if not parts.policy.half or not any(words in str(error) for words in _NO_KERNEL):
            line = _line_of_user(error)
            hint = "choose a model and a task for the same kind of data: the option of a model chooses its own"
            inside = f"; in module {trail.raised_in[0]}" if trail.raised_in and trail.raised_in[0] else ""
            raise FirstBatchError(
                f"{type(parts.model).__name__} and {type(parts.task).__name__} fail on the first batch: "
                f"{type(error).__name__}: {first_line}; {_kinds(batch)}{f'; at {line}' if line else inside}",
                ("look at this line" if line else hint)
                + "; --traceback shows where it failed"
                + _channels_last(batch.inputs)
                + rounding_of_indices(parts.policy, error)
                + ("; if precision=fp32 works, mptrain diagnose names the operator" if parts.policy.half else ""),
            ) from error
        module = trail.raised_in[0] if trail.raised_in else ""
        native = parts.policy.cpu_kernels == "native" and parts.device.type == "cpu"
        raise EnvironmentRefused(
            f"precision={parts.policy.name}: on {parts.device.type} torch cannot compute a part of the model in "
            f"{parts.policy.compute}: {first_line}",
            "set precision.cpu_kernels=auto, which computes in FP32 and rounds once"
            if native
            else f"add {module or 'the module'} to precision.keep_fp32, or choose another precision",
        ) from error


def _line_of_user(error: BaseException) -> str:
    """Return the innermost line of a user's own code that an exception has passed; empty if there is none."""
    own = ""
    passed = zip(traceback.walk_tb(error.__traceback__), traceback.extract_tb(error.__traceback__), strict=True)
    for (frame, _), line in passed:
        if is_of_user(str(frame.f_globals.get("__name__", "mptrain"))):
            own = f"{Path(line.filename).name}:{line.lineno} in {line.name}: {elided(line.line or '', 100)}"
    return own.rstrip(": ")  # without the source, such as of code typed at a prompt


def _kinds(batch: Batch) -> str:
    kinds = {"inputs": batch.inputs, "targets": batch.targets}
    texts = (f"{name} {str(kind.dtype).removeprefix('torch.')} {list(kind.shape)}" for name, kind in kinds.items())
    return " and ".join(texts)


def _channels_last(inputs: torch.Tensor) -> str:
    """Return what to add to the hint of an error if the inputs look like images with their channels at the end."""
    if inputs.dim() != 4 or inputs.shape[3] not in (1, 3, 4) or inputs.shape[1] in (1, 3, 4):
        return ""
    return "; images are [N, channels, height, width]: inputs.permute(0, 3, 1, 2) makes them so"


def rounding_of_indices(policy: Policy, error: BaseException) -> str:
    """Return what to add to the hint of an IndexError of a pass: the cast of inputs may have changed the index."""
    dtype = input_dtype(policy)
    if not isinstance(error, IndexError) or dtype.itemsize != 2:
        return ""
    return (
        f"; inputs that are no integers are cast to {dtype}, which rounds whole numbers above "
        f"{2 / torch.finfo(dtype).eps:.0f}: an index may be another one"
    )


_WARNED = (
    ("no_gradient", "parameters get no gradient in a first pass, and are not trained while they get none"),
    ("no_learner", "parameters belong to no learner and are not trained"),
)


def warnings_about(untrained: Mapping[str, list[str]]) -> list[str]:
    """Return warnings for the user about parameters that are not trained, by reason, except frozen ones."""
    sentences = []
    for kind, why in _WARNED:
        if names := untrained[kind]:
            sentences.append(f"{len(names)} {why}: {listed(names)}")
    return sentences
