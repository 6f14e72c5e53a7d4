"""What is broken, and how: every case is drawn from the seed and its own number, so that one can be repeated alone."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

#: How many processes a run may have.
RANKS = (1, 2, 3)

#: So many configurations are drawn for a seed; each needs one undisturbed run.
POOL = 14

PRECISIONS = ("fp32", "amp_dynamic", "fp16_dynamic", "fp16_static")

#: The pictures of `pictures.make`.
PICTURES, CLASSES = 48, 3


@dataclass(frozen=True)
class Setting:
    """A configuration, and what must be known of it to judge a run."""

    number: int  # in the pool of its seed
    words: tuple[str, ...]
    pictures: bool  # trains on a folder of pictures, which can be broken
    interval: int  # the most steps between two checkpoints
    async_save: bool  # checkpoints are written while training goes on
    seconds: float  # of ``log.seconds``
    ranks: int = 1
    sharded: bool = False  # each rank holds a part of the weights, and writes it to a file of its own

    def describe(self):
        return " ".join(self.words)


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong in, or behind, one attempt.

    ``place`` says when: ``seconds`` of the undisturbed run, or at a call of ``start``, ``step``, ``evaluation``, ``saving``, ``operation``
    (any change of a file in the run's folder) or ``end``; the first rank's calls.
    """

    kind: str  # one of `KINDS`
    place: str
    share: float  # which of those calls, or how much of that time, from 0 to 1
    fresh: bool = (
        False  # in a process of its own, imports included, instead of a forked one; then the place is ``seconds``
    )
    extra: dict = field(default_factory=dict)  # what else a kind wants to know

    def describe(self):
        extra = "".join(f" {key}={value}" for key, value in self.extra.items())
        return f"{self.kind} at {self.place} {self.share:.3f}{' of a fresh process' if self.fresh else ''}{extra}"


@dataclass(frozen=True)
class Case:
    """A configuration, what befalls it in its first attempts, and how it is gone on with."""

    number: int
    setting: Setting
    faults: tuple[Fault, ...]
    requeued: bool  # by the same line with run.resume=auto; else by mptrain resume

    @property
    def kind(self):
        return self.faults[0].kind

    def describe(self):
        how = "run.resume=auto" if self.requeued else "mptrain resume"
        faults = "; then ".join(fault.describe() for fault in self.faults)
        return f"{faults}; {how}\n  {self.setting.describe()}"


#: Files of a run that are damaged between two attempts.
FILES = (
    *(
        "steps.jsonl",
        "events.jsonl",
        "epochs.csv",
        "run.json",
        "config.yaml",
        "overrides.yaml",
        "data.json",
        "run.lock",
    ),
    *("checkpoints/newest.pt", "checkpoints/newest.json", "checkpoints/all.pt", "checkpoints/all.json"),
    *("checkpoints/last", "checkpoints/best"),
)

#: Those of a checkpoint of which every rank writes a part.
PARTS = ("checkpoints/newest.parts/rank-0.pt", "checkpoints/newest.parts/rank-1.pt", "checkpoints/all.parts")

#: Each kind of fault, and how often it is drawn.
KINDS = {
    "kill": 5, "kill_saving": 3, "sigterm": 4, "sigint": 3, "pause": 1, "disk_full": 4, "read_only": 3,
    "truncated": 3, "flipped_bit": 4, "clock": 2, "data_gone": 2, "bad_picture": 2, "kill_rank": 5,
}  # fmt: skip

OF_PICTURES = ("data_gone", "bad_picture")
DAMAGES = ("truncated", "flipped_bit")  # of files, behind an attempt that was broken off
PLACES = ("start", "step", "step", "evaluation", "saving", "operation", "end", "seconds")


def pool(seed):
    """The configurations of a seed; the last two train on pictures."""
    return [_setting(seed, number) for number in range(POOL)]


def draw(seed, number):
    """Case ``number`` of a seed."""
    chance = random.Random(f"{seed}:{number}")
    kind = chance.choices(list(KINDS), list(KINDS.values()))[0]
    settings = [one for one in pool(seed) if _suits(kind, one)]
    setting = chance.choice(settings)
    faults = [_fault(chance, kind, setting)]
    while kind not in DAMAGES and len(faults) < 3 and chance.random() < 0.3:  # it does not rain but it pours
        faults.append(_fault(chance, chance.choice(("kill", "kill", "kill_saving", "sigterm", "sigint")), setting))
    return Case(number, setting, tuple(faults), chance.random() < 0.5)


def _suits(kind, setting):
    if kind in OF_PICTURES:
        return setting.pictures
    return setting.ranks > 1 if kind == "kill_rank" else True


def _setting(seed, number):
    chance = random.Random(f"{seed}:setting:{number}")
    pictures, ranks = number >= POOL - 2, RANKS[(number + number // 4) % len(RANKS)]  # each with every precision
    precision = PRECISIONS[number % 4]
    words = [chance.choice(("model=mlp", "model=mlp", "model=cnn")), f"precision={precision}", f"seed={number}"]
    if words[0] == "model=cnn":
        words += ["model.widths=[4,8]"]
    else:
        words += [f"model.hidden=[{chance.choice(('16', '64,32'))}]"]
    samples = PICTURES if pictures else chance.choice((160, 200, 240))
    batch = 4 if pictures else chance.choice((4, 8))
    epochs = chance.choice((2, 3))
    if pictures:
        words += ["dataset=image_folder", "dataset.root=data", "dataset.image_size=16", "dataset.augment=true"]
        words += [f"dataset.workers={1 if ranks == 1 else 0}"]  # so that the children of several ranks are ranks
    else:
        words += [f"dataset.train_samples={samples}"]
    words += [f"train.batch_size={batch}", f"train.epochs={epochs}"]
    words += [f"train.accumulate={chance.choice((1, 1, 2))}"]
    if chance.random() < 0.3:
        words += ["train.ema_decay=0.9"]
    if "dynamic" in precision:
        words += ["scaler.init_scale=268435456", "scaler.max_scale=268435456", "scaler.growth_interval=9"]
    if precision != "fp32" and chance.random() < 0.4:
        words += [f"inject.step={chance.randint(2, 30)}", "inject.tensor=input", "inject.value=inf"]
    an_epoch = samples // batch
    every = chance.choice((None, 1, 5, 7, 13))
    interval, async_save = every or an_epoch, chance.random() < 0.5
    seconds = chance.choice((0.0, 0.02, 0.05, 0.15, 1.0))
    words += [f"checkpoint.every_steps={every or 'null'}", f"checkpoint.async_save={str(async_save).lower()}"]
    words += [f"log.ring={chance.choice((1, 4, 32))}", f"log.seconds={seconds}"]
    sharded = ranks > 1 and number % 5 in (1, 4)  # with every precision
    if ranks > 1:
        words += [f"distributed={'fsdp2' if sharded else 'ddp'}", f"distributed.procs={ranks}"]
    return Setting(number, tuple(words), pictures, min(interval, an_epoch), async_save, seconds, ranks, sharded)


def _fault(chance, kind, setting):
    fault = Fault(kind, chance.choice(PLACES), chance.random())
    match kind:
        case "kill" | "sigterm" | "sigint":
            fault = replace(fault, fresh=fault.place == "seconds" and chance.random() < 0.4)
            if kind == "sigint":
                fault = replace(fault, extra={"twice": chance.random() < 0.3})
        case "kill_saving":
            fault = replace(fault, place="saving", extra={"operation": chance.randint(1, 14)})
        case "pause":
            fault = replace(fault, place="seconds", extra={"for": round(chance.uniform(0.1, 1.0), 2)})
        case "disk_full":
            fault = replace(fault, place=chance.choice(("tmpfs", "operation")))
        case "read_only":
            fault = replace(fault, extra={"folder": chance.choice(("outputs", "run", "run", "checkpoints"))})
            fault = replace(fault, place=chance.choice(("start", "step", "step", "evaluation", "saving", "end")))
        case _ if kind in DAMAGES:
            how = chance.choice(("kill", "sigterm"))
            files = FILES + 2 * PARTS if setting.sharded else FILES
            extra = {"file": chance.choice(files), "where": round(chance.random(), 4), "bit": chance.randrange(8)}
            fault = replace(fault, place="step", share=0.3 + 0.7 * fault.share, extra={"after": how, **extra})
        case "clock":
            hours = chance.choice((-24 * 400, -5, -1, 1, 5, 24 * 400))
            fault = replace(fault, place=chance.choice(("step", "evaluation", "start")), extra={"hours": hours})
        case "data_gone" | "bad_picture":
            fault = replace(fault, place=chance.choice(("start", "step", "step", "evaluation")))
            if kind == "bad_picture":
                fault = replace(fault, extra={"how": chance.choice(("cut", "garbage", "empty"))})
    return fault
