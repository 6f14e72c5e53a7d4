"""The runs: settings, what they are in words of the command line, and a run from its first attempt to its record."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import tempfile
from importlib import import_module
from pathlib import Path

import yaml

from tests.faults.attempts import attempt, computed
from tests.golden.kept import kept_of, outcome_of, text_of

#: Small networks by family: the words that make them and their data small. Epochs have five steps, the last one of fewer
#: samples, unless the data allow only another number.
FAMILIES = {
    # Two of its tensors take more than one piece of `numerics.overflow_check`, in which large gradients are judged otherwise.
    "perceptron": ("model=mlp", "model.hidden=[128,270,270]", "dataset.image_size=8", "dataset.train_samples=37"),
    "cnn": ("model=cnn", "model.widths=[4,8]", "dataset.train_samples=37"),
    "resnext": ("model=resnext_small", "model.widths=[8,16]", "model.cardinality=2", "dataset=synthetic", "dataset.image_size=16",
                "dataset.train_samples=37", "dataset.val_samples=8", "dataset.test_samples=8"),
    "lstm": ("model=word_lstm", "model.embedding_size=8", "model.hidden_size=8", "model.layers=2", "dataset.sequence_length=8",
             "dataset.train_samples=37", "dataset.max_vocabulary=50", "dataset.val_share=0.005", "dataset.test_share=0.005"),
    "sampled_softmax": ("model=big_lstm_small", "model.embedding_size=8", "model.hidden_size=16", "model.projection=8",
                        "model.samples=20", "model.cutoffs=[10,20]", "dataset.sequence_length=8", "dataset.train_samples=37",
                        "dataset.max_vocabulary=50", "dataset.val_share=0.005", "dataset.test_share=0.005"),
    "transformer": ("model=transformer", "model.width=8", "model.heads=2", "dataset.sequence_length=8",
                    "dataset.train_samples=37", "dataset.val_share=0.005", "dataset.test_share=0.005"),
    "seq2seq": ("model=seq2seq_small", "model.width=16", "dataset.samples=46", "dataset.vocabulary=80", "task.length_extra=3"),
    "translator": ("model=transformer_small_translation", "model.width=16", "model.heads=2", "model.inner=32", "model.layers=1",
                   "schedule.warmup=2", "dataset.samples=46", "dataset.vocabulary=80", "task.length_extra=3"),
    "speech": ("model=deepspeech2_small", "model.channels=2", "model.hidden_size=8", "dataset.train_samples=37",
               "dataset.val_samples=4", "dataset.test_samples=4", "dataset.hop_ms=20"),
    "detector": ("model=ssd_small", "model.width=4", "dataset.image_size=64", "dataset.train_samples=37",
                 "dataset.val_samples=6", "dataset.test_samples=6"),
    "gan": ("model=dcgan", "model.width=4", "model.latent=8", "dataset.image_size=16", "dataset.train_samples=37"),
    "raw_audio": ("model=wavenet_small", "model.stacks=1", "model.layers=4", "model.residual=8", "model.skip=12",
                  "model.condition=4", "dataset.train_samples=10", "dataset.val_samples=4", "dataset.test_samples=4",
                  "dataset.window=1000", "dataset.context=15", "task.seconds=0.004"),
    "enlarger": ("model=edsr_small", "model.blocks=1", "model.width=16", "dataset.patch_size=16", "dataset.patches=37",
                 "dataset.tile_size=32", "dataset.tiles_per_photo=1"),
    "denoiser": ("model=dncnn_small", "model.depth=3", "model.width=16", "dataset.patch_size=16", "dataset.patches=37",
                 "dataset.tile_size=32", "dataset.tiles_per_photo=1"),
}  # fmt: skip

#: A parameter of each family: under the fault ``infinite`` its gradient is made so.
PARAMETERS = {
    "perceptron": "7.weight",
    "cnn": "12.bias",
    "resnext": "0.weight",
    "lstm": "lstm.weight_ih_l0",
    "sampled_softmax": "decoder.bias",
    "transformer": "norm.bias",
    "seq2seq": "output.weight",
    "translator": "decoder.0.feed_norm.weight",
    "speech": "letters.weight",
    "detector": "backbone.stem.0.weight",
    "gan": "generator.7.weight",
    "raw_audio": "output.bias",
    "enlarger": "head.weight",
    "denoiser": "noise.5.weight",
}

#: The step of the first checkpoint, in the middle of the second epoch.
SAVED = 7

#: What every run has.
USUAL = (
    *("device=cpu", "threads=1", "run.name=run", "train.batch_size=8", "train.epochs=2"),
    *("checkpoint.every_epochs=null", f"checkpoint.every_steps={SAVED}"),
)

#: One rank looks at its tensors now and then; ranks that hold parts of theirs cannot.
RANKS = {
    "one": ("diagnostics=histograms", "diagnostics.every=3"),
    "ddp": ("distributed=ddp", "distributed.procs=2"),
    "fsdp2": ("distributed=fsdp2", "distributed.procs=2"),
}
CLIPPING = {"unclipped": (), "clipped": ("train.clip_norm=0.5",)}
AVERAGE = {"last": (), "average": ("train.ema_decay=0.9",)}
#: How the run is interrupted. SIGTERM finds it between two steps, SIGKILL while it trains on.
INTERRUPTION = {"sigkill": ("checkpoint.async_save=true",), "sigterm": ("checkpoint.async_save=false",)}
#: The signal of each, and the exit code of a run that it ends.
ENDS = {"sigkill": (signal.SIGKILL, -signal.SIGKILL), "sigterm": (signal.SIGTERM, 75)}
FAULTS = ("no_fault", "infinite", "high_scale")

#: Where scales begin at most, and where a high one begins, unless the rule's limit is below: FP16 gradients overflow there.
MODERATE, HIGH = 2.0**16, 2.0**20


def factors(configs):
    """Return the values of each factor, of which runs are drawn.

    Args:
        configs: The folder of the configuration that is trained with.
    """
    others = {"torch", "timm"}  # optimizers whose numbers change with their packages
    options = {
        group: sorted(
            {path.stem for path in (configs / group).glob("*.yaml")} - (others if group == "optimizer" else set())
        )
        for group in ("precision", "scaler", "optimizer")
    }
    return {
        "precision": options["precision"], "scaler": options["scaler"], "family": list(FAMILIES), "accumulate": ["1", "3"],
        "ranks": list(RANKS), "optimizer": options["optimizer"], "clipping": list(CLIPPING), "average": list(AVERAGE),
        "fault": list(FAULTS), "interruption": list(INTERRUPTION),
    }  # fmt: skip


def name_of(row):
    """Return the name of a run: that of its record's file, without the suffix."""
    return "-".join(row.values())


def words_of(row, configs):
    """Return the words of a run, or None where the rule has no first scale, which could be high."""
    rule = yaml.safe_load((configs / "scaler" / f"{row['scaler']}.yaml").read_text())
    rule = rule.get("scaler", rule)
    words = [*FAMILIES[row["family"]], *USUAL, f"precision={row['precision']}", f"scaler={row['scaler']}"]
    words += [f"optimizer={row['optimizer']}", f"train.accumulate={row['accumulate']}"]
    words += [
        *RANKS[row["ranks"]],
        *CLIPPING[row["clipping"]],
        *AVERAGE[row["average"]],
        *INTERRUPTION[row["interruption"]],
    ]
    words += [f"scaler.{key}=2" for key in ("growth_interval", "interval") if key in rule]  # so that scales grow
    if row["precision"] == "tf32":
        words.append("precision.force=true")  # a CPU has none, and refuses it
    if row["fault"] == "infinite":
        words += ["inject.step=4", "inject.count=2", f"inject.tensor=gradient:{PARAMETERS[row['family']]}"]
    first = rule.get("init_scale")
    if first is None and row["fault"] == "high_scale":
        return None
    if first is not None:
        first = min(HIGH, rule.get("max_scale") or HIGH) if row["fault"] == "high_scale" else min(MODERATE, first)
        words.append(f"scaler.init_scale={first}")
    return words


def warm_up():
    """Import what attempts need before they are forked; returns the folder of the configuration."""
    for name in ("torch", "torchvision", "mptrain.cli.main", "mptrain.config.compose"):
        import_module(name)
    try:
        return Path(import_module("mptrain.config.catalogue").configs_folder())
    except AttributeError:  # an older tree
        return Path(import_module("mptrain.config.location").configs())


class Valid:
    """Tells whether the program itself takes a row.

    The words are composed. That several ranks can train a network is known only at its start, so one step of each is tried.

    Args:
        configs: The folder of the configuration.
    """

    def __init__(self, configs):
        self._configs = configs
        self._starts = functools.cache(self._start)
        self._composer = import_module("mptrain.config.compose").Composer()
        self._refusal = import_module("mptrain.system.errors").ConfigError

    def __call__(self, row):
        words = words_of(row, self._configs)
        if words is None:
            return False
        try:
            self._composer.compose(words)
        except self._refusal:
            return False
        return row["ranks"] == "one" or self._starts(row["family"], row["ranks"])

    def _start(self, family, ranks):
        with _folder() as folder:
            words = (*FAMILIES[family], *USUAL, *RANKS[ranks], "train.max_steps=1")
            return attempt(words, folder, lambda trace: Undisturbed()).code == 0


class Undisturbed:
    """Hooks that do nothing."""

    def install(self):
        pass


class Interrupted:
    """Sends this process a signal as soon as its first checkpoint is on the disk.

    Args:
        number: Of the signal.
    """

    def __init__(self, number):
        self._number, self._owner = number, os.getpid()

    def install(self):
        replace = Path.replace

        def replace_and_end(draft, path):
            result = replace(draft, path)
            if Path(path).match("checkpoints/step-*.json") and os.getpid() == self._owner:
                os.kill(self._owner, self._number)
            return result

        Path.replace = replace_and_end


def record_of(row, configs):
    """Train a run, and again with an interruption; return its record and what is wrong with it, one sentence each."""
    words, name = words_of(row, configs), name_of(row)
    with _folder() as folder:
        whole, broken = folder / "whole", folder / "broken"
        whole.mkdir()
        done = attempt(words, whole, lambda trace: Undisturbed())
        if done.code:
            return {"run": row, "exit_code": done.code}, [f"{name}: exit code {done.code}: {_last_lines(done)}"]
        record = {"run": row, **computed(kept_of, whole / "outputs" / "run")}
        if row["ranks"] != "one":  # the campaign of `tests.faults` breaks off those of several ranks
            return record, []
        broken.mkdir()
        number, code = ENDS[row["interruption"]]
        stopped = attempt(words, broken, lambda trace: Interrupted(number))
        if stopped.code != code:
            how = f"exit code {stopped.code}, not {code}, when it is interrupted: {_last_lines(stopped)}"
            return record, [f"{name}: {how}"]
        if not (broken / "outputs" / "run" / "checkpoints" / f"step-{SAVED:08}.json").exists():
            return record, [f"{name}: no checkpoint of step {SAVED} when it is interrupted"]
        resumed = attempt(("resume", "outputs/run"), broken, lambda trace: Undisturbed())
        if resumed.code:
            return record, [f"{name}: exit code {resumed.code} when it is resumed: {_last_lines(resumed)}"]
        after = computed(kept_of, broken / "outputs" / "run")
    begun = [event["step"] for event in after["events"] if event["event"] == "resume"]
    if begun != [SAVED]:
        return record, [f"{name}: resumed from {begun}, not from step {SAVED}"]
    record["resumed_from"] = SAVED
    differing = [
        part for part, value in outcome_of(record).items() if text_of(outcome_of(after)[part]) != text_of(value)
    ]
    return record, [f"{name}: resumed after {row['interruption']}, other {part}" for part in differing]


@contextlib.contextmanager
def _folder():
    """A folder for a while; `tempfile.TemporaryDirectory` would let each forked process remove it at its exit."""
    folder = Path(tempfile.mkdtemp())
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def _last_lines(done):
    return " / ".join(done.output.strip().splitlines()[-3:])
