"""Steps of the same training in turns: ours, bare ones, those of other frameworks, and forward and backward alone."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from benchmarks.loops.bare import Bare, Passes
from benchmarks.loops.base import Loop, Mode, Work, batches
from benchmarks.loops.ours import Ours
from benchmarks.loops.peers import PEERS, NotThere
from benchmarks.timing import Block, Times, in_several_places, take_turns
from mptrain.precision.apply import set_matmul_precision

#: How far the ratio of a loop to its own twin may be from 1 before nothing counts.
TWINS = 0.02
#: By how much the floor may be beaten before something is wrong with it, or with us.
FLOOR = 0.95
#: Relative difference of losses over the first steps, by mode: what order of sums and rounding explain.
AGREE = {"fp32": 1e-4, "tf32": 2e-3, "amp": 2e-2, "bf16": 5e-2, "half": 2e-2}

Maker = Callable[[Work], Loop]


class Contest:
    """Loops that take turns on one work.

    Args:
        work: What they train.
        makers: Name to what makes the loop; ``ours`` among them.
        refused: Name of a peer that cannot take part, to why.

    Attributes:
        times: Seconds of a step, after `run`.
        void: Why nothing of it counts; empty if it does.
        refused: As given.
    """

    def __init__(self, work: Work, makers: dict[str, Maker], refused: dict[str, str] | None = None) -> None:
        self.work = work
        self.makers = makers
        self.refused = dict(refused or {})
        self.times = Times({})
        self.void = ""

    def run(self, seconds: float, modes: dict[str, Mode], places: int = 1) -> Contest:
        """Check that all do the same work, then time them in turns.

        Args:
            seconds: How long.
            modes: Precision of each loop, by name.
            places: How often they are made anew.
        """
        self.void = self._disagreement(modes)
        self.times = in_several_places(self._turns, seconds, places)
        self.void = self.void or self._suspicion()
        return self

    def _turns(self, seconds: float) -> Times:
        with contextlib.ExitStack() as stack:
            loops = {}
            for name, make in self.makers.items():
                loops[name] = make(self.work)
                stack.callback(loops[name].close)
            return take_turns({name: loop.block for name, loop in loops.items()}, seconds, least=2)

    def _disagreement(self, modes: dict[str, Mode]) -> str:
        """A loop whose losses over the first steps are not those of the first loop of its mode; empty for none."""
        work = replace(self.work, lr=self.work.agree_lr)
        first: dict[str, tuple[str, Sequence[float]]] = {}
        for name, make in self.makers.items():
            if name.startswith("passes"):
                continue
            loop = make(work)
            losses, mode = loop.losses(20), modes[name]
            loop.close()
            other, expected = first.setdefault("fp32" if mode == "tf32" else mode, (name, losses))
            worst = max(abs(a - b) / max(abs(b), 1e-3) for a, b in zip(losses, expected, strict=True))
            if not worst <= AGREE[mode]:
                return f"losses of {name} and {other} differ by {worst:.1e} within 20 steps"
        return ""

    def _suspicion(self) -> str:
        """What makes the times suspect; empty for nothing."""
        if "twin" in self.makers:
            found = self.times.ratio("twin", "bare").value
            if abs(found - 1) > TWINS:
                return f"the same bare loop twice: {found:.3f} instead of 1"
        for name in self.makers:
            if name.startswith("passes") and (found := self.times.ratio("ours", name).value) < FLOOR:
                return f"ours takes {found:.2f} of forward and backward alone"
        return ""


def contest(
    work: Work, mode: Mode, seconds: float, *, peers: bool, bare_mode: Mode | None = None, places: int = 1
) -> Contest:
    """Ours against bare loops, other frameworks and the floor.

    Args:
        work: What is trained.
        mode: Our precision.
        seconds: How long to time.
        peers: Whether other frameworks take part.
        bare_mode: The precision of the others, where nobody else has ours.
        places: How often all are made anew.
    """
    theirs: Mode = bare_mode or mode
    makers: dict[str, Maker] = {
        "bare": lambda work: Bare(work, theirs),
        "ours": lambda work: Ours(work, mode),
        "bare_best": lambda work: Bare(work, theirs, best=True),
        "passes": lambda work: Passes(work, mode),
        "twin": lambda work: Bare(work, theirs),
    }
    refused: dict[str, str] = {}
    for peer in PEERS if peers else ():
        try:
            peer.make(work, theirs).close()
        except NotThere as why:
            refused[peer.name] = str(why)
        else:
            makers[peer.name] = lambda work, peer=peer: peer.make(work, theirs)  # type: ignore[misc]
    modes: dict[str, Mode] = {name: mode if name in ("ours", "passes") else theirs for name in makers}
    return Contest(work, makers, refused).run(seconds, modes, places)


def precisions(work: Work, modes: Sequence[Mode], seconds: float) -> tuple[Times, dict[str, int]]:
    """Ours in several precisions in turns.

    Returns:
        The times by mode; and on CUDA the largest memory in use in a step of each, bytes.
    """
    peaks: dict[str, int] = {mode: peak_memory(work, mode) for mode in modes} if work.device == "cuda" else {}
    with contextlib.ExitStack() as stack:
        loops = {mode: Ours(work, mode) for mode in modes}
        for loop in loops.values():
            stack.callback(loop.close)
        times = take_turns({mode: _in_its_own_arithmetic(mode, loop) for mode, loop in loops.items()}, seconds)
    return times, peaks


def _in_its_own_arithmetic(mode: Mode, loop: Ours) -> Block:
    """The loop's block with TF32 as its mode has it: that is set for the whole process."""

    def block(steps: int) -> float:
        set_matmul_precision(loop.loop.parts.policy)
        return loop.block(steps)

    return block


def peak_memory(work: Work, mode: Mode) -> int:
    """Largest memory in use while steps are trained, in bytes, the other precisions' not among it."""
    batches.cache_clear()  # each precision counts its own
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    loop = Ours(replace(work, batches=1), mode)
    loop.block(3)
    torch.cuda.reset_peak_memory_stats()
    loop.block(3)
    found = torch.cuda.max_memory_allocated() - before
    loop.close()
    return found
