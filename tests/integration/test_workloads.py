"""Every workload through the whole engine: it learns, keeps the dtypes of its precision mode, and resumes bit for bit."""

from __future__ import annotations

import importlib.util
import itertools
import math
import sys
from collections import defaultdict
from typing import NamedTuple

import pytest
import torch
from PIL import Image
from torch import nn

from mptrain.config.compose import compose
from mptrain.engine.evaluate import evaluate
from mptrain.engine.ring import Ring
from mptrain.engine.step import train_step
from mptrain.lab.doctor.check import check_scaling
from mptrain.system.errors import EnvironmentRefused
from mptrain.system.records import EvalRecord, StepRecord
from tests.precision_promises import PROMISED
from tests.small_runs import Kept, continue_loop, interrupt_after, loop_of, parts_of, steps_of

pytestmark = pytest.mark.workload

LANGUAGE = ("dataset.sequence_length=8", "train.batch_size=8", "dataset.train_samples=44", "dataset.val_share=0.02",
            "dataset.test_share=0.01", "train.epochs=4")  # fmt: skip
TRANSLATION = (
    "dataset.samples=40",
    "dataset.vocabulary=80",
    "train.batch_size=8",
    "task.length_extra=3",
    "train.epochs=3",
)
PHOTOS = ("dataset.patch_size=16", "dataset.patches=80", "dataset.tile_size=32", "dataset.tiles_per_photo=2",
          "train.batch_size=8", "train.epochs=2")  # fmt: skip
BIG = ("model=big_lstm_small", "model.embedding_size=8", "model.hidden_size=16", "model.projection=8", "model.samples=20",
       "model.cutoffs=[10,20]", "dataset.max_vocabulary=50", "model.dropout=0.1", *LANGUAGE)  # fmt: skip
FEW = ("fp32", "amp_dynamic", "fp16_dynamic")
#: Modes that are not much slower than FP32.
QUICK = tuple(name for name in PROMISED if not name.endswith("_emulated"))
LONGER = ("dataset.patch_size=16", "dataset.patches=240", "dataset.tile_size=32", "dataset.tiles_per_photo=6",
         "train.batch_size=8", "train.epochs=4", "checkpoint.every_epochs=null")  # fmt: skip
ENLARGES = ("model=edsr_small", "model.blocks=1", "model.width=16", *LONGER)
DENOISES = ("model=dncnn_small", "model.depth=3", "model.width=16", "optimizer.lr=0.01", *LONGER)


class Workload(NamedTuple):
    """Words of a small run, the modules whose outputs are promised, the modes, the step of the break, and its metrics."""

    words: tuple[str, ...]
    products: tuple[type, ...]
    modes: tuple[str, ...]
    after: int
    metrics: frozenset[str]


WORKLOADS = {
    "lstm": Workload(
        ("model=word_lstm", "model.embedding_size=8", "model.hidden_size=8", "model.layers=2", "model.dropout=0.3",
         "dataset.max_vocabulary=50", *LANGUAGE),
        (nn.Linear, nn.LSTM), tuple(PROMISED), 9, frozenset({"perplexity"}),
    ),
    "transformer": Workload(
        ("model=transformer", "model.width=8", "model.heads=2", *LANGUAGE),
        (nn.Linear,), tuple(PROMISED), 9, frozenset({"perplexity"}),
    ),
    **{f"big lstm, {softmax} softmax": Workload((*BIG, f"model.softmax={softmax}"), (), FEW, 9, frozenset({"perplexity"}))
       for softmax in ("sampled", "adaptive", "full")},
    "seq2seq": Workload(
        ("model=seq2seq_small", "model.width=16", "model.dropout=0.2", *TRANSLATION),
        (nn.Linear,), (*FEW, "bf16"), 4, frozenset({"bleu", "exact", "perplexity"}),
    ),
    "translator": Workload(
        ("model=transformer_small_translation", "model.width=16", "model.heads=2", "model.inner=32", "model.layers=1",
         "schedule.warmup=2", *TRANSLATION),
        (nn.Linear,), (*FEW, "bf16"), 4, frozenset({"bleu", "exact", "perplexity"}),
    ),
    "speech": Workload(
        ("model=deepspeech2_small", "model.channels=2", "model.hidden_size=8", "dataset.train_samples=20", "model.dropout=0.2",
         "dataset.val_samples=4", "dataset.test_samples=4", "dataset.hop_ms=20", "train.batch_size=8", "train.epochs=3"),
        (nn.Linear, nn.Conv2d), tuple(PROMISED), 4, frozenset({"loss", "cer", "wer"}),
    ),
    "raw audio": Workload(
        ("model=wavenet_small", "model.stacks=1", "model.layers=4", "model.residual=8", "model.skip=12", "model.condition=4",
         "dataset.train_samples=12", "dataset.val_samples=4", "dataset.test_samples=4", "dataset.window=1000",
         "dataset.context=15", "train.batch_size=8", "train.epochs=4", "optimizer.lr=0.02", "task.seconds=0.004"),
        (nn.Conv1d,), FEW, 9, frozenset({"bits"}),
    ),
    "enlarger": Workload(
        ("model=edsr_small", "model.blocks=1", "model.width=16", *PHOTOS),
        (), ("fp16_dynamic",), 4, frozenset({"psnr", "psnr_gain", "ssim"}),
    ),
    "denoiser": Workload(
        ("model=dncnn_small", "model.depth=3", "model.width=16", "optimizer.lr=0.01", *PHOTOS),
        (), FEW, 4, frozenset({"psnr", "psnr_gain", "ssim"}),
    ),
    "detector": Workload(
        ("model=ssd_small", "model.width=4", "dataset.image_size=32", "dataset.train_samples=96", "dataset.val_samples=20",
         "dataset.test_samples=20", "train.batch_size=16", "train.epochs=2", "optimizer.lr=0.005", "scaler.init_scale=1024"),
        (), ("fp16_dynamic",), 5, frozenset({"map50", "map"}),
    ),
    **{
        name: Workload(
            (f"model={name}", "train.batch_size=8", "dataset.train_samples=80", "train.epochs=2", "dataset.val_samples=20"),
            (nn.Conv2d, nn.Linear), QUICK if name == "resnet18" else tuple(PROMISED), 13, frozenset({"loss", "top1"}),
        )
        for name in ("cnn", "resnet18", "plain16")
    },
    "gan": Workload(
        ("model=dcgan", "model.width=4", "model.latent=8", "dataset.image_size=16", "dataset.train_samples=96",
         "train.batch_size=32", "train.epochs=3"),
        (nn.Conv2d, nn.ConvTranspose2d), tuple(PROMISED), 4, frozenset({"discriminator_loss", "generator_loss"}),
    ),
}  # fmt: skip


def words_of(name, precision):
    words = (*WORKLOADS[name].words, f"precision={precision}", "checkpoint.every_epochs=null")
    if precision == "fp16_pure" and name in ("lstm", "transformer", "speech"):
        words += ("optimizer.eps=1e-4",)
    if precision.endswith("static") and name == "speech":
        words += ("scaler.scale=128",)
    if precision.endswith("dynamic") and name == "gan":
        words += ("scaler.init_scale=1024", "scaler.growth_interval=3")
    return words


def outputs_of(model, kinds):
    """The set of dtypes of the outputs of some kinds of modules, filled while the model runs."""
    seen = set()
    for module in model.modules():
        if isinstance(module, kinds):
            module.register_forward_hook(
                lambda _, __, output: seen.add((output[0] if isinstance(output, tuple) else output).dtype)
            )
    return seen


def require_learned(steps):
    epochs = defaultdict(float)
    for step in steps:
        epochs[step.epoch] += step.loss
    assert epochs[max(epochs)] < epochs[0]  # single steps have short or long samples


@pytest.mark.parametrize(
    ("name", "precision"), [pair for name, one in WORKLOADS.items() for pair in itertools.product([name], one.modes)]
)
def test_a_workload_learns_in_the_promised_dtypes_and_resumes(tmp_path, name, precision):
    workload, words, kept = WORKLOADS[name], words_of(name, precision), Kept()
    parameters, products, _ = PROMISED[precision]
    whole = loop_of(tmp_path / "whole", *words, kept=kept)
    seen = outputs_of(whole.parts.model, workload.products)
    whole.run()
    assert seen == ({products} if workload.products else set())
    norms = {id(own) for module in whole.parts.kept.values() for own in module.parameters()}
    for parameter_name, parameter in whole.parts.model.named_parameters():
        expected = torch.float32 if id(parameter) in norms else parameters
        assert parameter.dtype == expected, parameter_name
    steps, last = kept.of(StepRecord), kept.of(EvalRecord)[-1].metrics
    assert all(math.isfinite(step.loss) for step in steps)
    assert sum(not step.skipped for step in steps) > len(steps) / 3
    if name not in ("gan", "plain16"):  # which needs more steps, and a scale
        require_learned(steps)
    assert workload.metrics <= last.keys()
    broken = loop_of(tmp_path / "broken", *words)  # not before: building seeds the generators that noise comes from
    interrupt_after(broken, workload.after)
    again = Kept()
    resumed = continue_loop(broken, *words, kept=again)
    resumed.run()
    assert again.of(StepRecord) == [step for step in steps if step.step > workload.after]
    require_equal(whole, resumed)


def require_equal(whole, resumed):
    for one, other in zip(whole.parts.model.buffers(), resumed.parts.model.buffers(), strict=True):
        assert torch.equal(one, other)
    theirs = resumed.parts.full_precision()
    assert all(torch.equal(value, theirs[name]) for name, value in whole.parts.full_precision().items())
    samples = [
        {path.name: path.read_bytes() for path in loop.storage.paths.samples.glob("*.*")} for loop in (whole, resumed)
    ]
    assert samples[0] == samples[1]


def test_keep_fp32_by_name_computes_there_in_float32(tmp_path):
    loop = loop_of(
        tmp_path, "model=resnet18", "precision=fp16_dynamic", "precision.keep_fp32=[norms,layer4]", "train.max_steps=2",
        "train.batch_size=4", "dataset.train_samples=8",
    )  # fmt: skip
    dtypes = {}
    for name, module in loop.parts.model.named_modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(lambda m, args, out, name=name: dtypes.__setitem__(name, out.dtype))
    loop.run()
    assert {dtype for name, dtype in dtypes.items() if name.startswith("layer4")} == {torch.float32}
    assert {dtype for name, dtype in dtypes.items() if not name.startswith("layer4")} == {torch.float16}


def test_evaluation_in_fp32_uses_the_masters_and_leaves_the_model_alone(tmp_path):
    loop = loop_of(
        tmp_path, "model=cnn", "precision=fp16_dynamic", "precision.eval=fp32", "train.max_steps=3",
        "dataset.train_samples=96",
    )  # fmt: skip
    dtypes = set()
    loop.parts.model.register_forward_hook(lambda m, args, out: dtypes.add((m.training, out.dtype)))
    before = {name: parameter.dtype for name, parameter in loop.parts.model.named_parameters()}
    loop.run()
    assert dtypes == {(True, torch.float16), (False, torch.float32)}
    assert {name: parameter.dtype for name, parameter in loop.parts.model.named_parameters()} == before
    assert loop.parts.model.training


@pytest.mark.parametrize(
    ("words", "levels"),
    [
        (("model=wavenet_small", "dataset.val_samples=4"), 256),
        (("model=big_lstm_small", "dataset.val_share=0.02"), None),
    ],
    ids=["raw audio", "big lstm"],
)
def test_the_first_loss_is_the_logarithm_of_the_choices(words, levels):
    parts, _ = parts_of(*words, "precision=fp32")
    metrics = evaluate(parts, parts.loaders["val"], "val", 0, 0, stop=lambda: False).record.metrics
    assert metrics["loss"] == pytest.approx(math.log(levels or parts.task.vocabulary_size), rel=0.02)


@pytest.mark.parametrize("accumulate", [3, 8])
@pytest.mark.parametrize("name", ["seq2seq", "translator", "raw audio"])
def test_trap_20_micro_batches_of_different_lengths_have_the_gradient_of_the_whole(name, accumulate):
    rows = []
    for count in (1, accumulate):
        more = "dataset.window=3000" if name == "raw audio" else "model.dropout=0"
        parts, _ = parts_of(*words_of(name, "fp32"), f"train.accumulate={count}", more)
        batch = next(iter(parts.loaders["train"].batches(0)))
        assert len(set(batch.counts)) > 1
        [row] = rows_of(parts, parts.prepare(batch))
        rows.append((row.loss, row.grad_norm))
    assert rows[1] == pytest.approx(rows[0], rel=1e-4)


def rows_of(parts, batch, steps=1):
    """The records of some steps of the only learner with one batch."""
    learner = parts.learners[0]
    ring = Ring(steps, len(learner.weights.names), parts.device)
    for _ in range(steps):
        ring.record(train_step(learner, parts.model.train(), batch, parts.plan))
    return ring.take(wait=True)


@pytest.mark.parametrize("missing", ["sentencepiece", "sacrebleu"])
def test_a_library_that_is_missing_is_named_before_anything_is_trained(monkeypatch, missing):
    found = importlib.util.find_spec
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *more: None if name == missing else found(name, *more))
    with pytest.raises(EnvironmentRefused, match=missing) as refused:
        parts_of(*WORKLOADS["seq2seq"].words)
    assert refused.value.hint == "pip install 'mptrain[translation]'"


@pytest.mark.parametrize(
    ("name", "precision", "rate"), [("seq2seq", "amp_dynamic", 0.02), ("translator", "fp16_dynamic", 0.01)]
)
def test_a_few_pairs_can_be_learned_by_heart(name, precision, rate):
    words = ("model.width=32", "model.dropout=0", "dataset.train_samples=4", f"optimizer.lr={rate}")
    plan = ("schedule=constant", "schedule.warmup=10", "train.max_steps=120", "train.epochs=1000")
    parts, _ = parts_of(*words_of(name, precision), *words, *plan)
    rows_of(parts, parts.prepare(next(iter(parts.loaders["train"].batches(0)))), steps=120)
    measured = evaluate(parts, parts.loaders["train"], "val", 0, 0, stop=lambda: False).record.metrics
    assert measured["exact"] == 1.0
    assert measured["bleu"] == pytest.approx(100.0)
    assert measured["perplexity"] < 1.5


@pytest.mark.parametrize("precision", FEW)
def test_a_few_utterances_are_learned_by_heart(tmp_path, precision):
    words = ("model=deepspeech2_small", "model.layers=1", "model.hidden_size=48", "dataset.train_samples=4", "train.batch_size=4",
             "dataset.val_samples=0", "dataset.test_samples=0", "dataset.hop_ms=20", "dataset.noise=0.1", "train.epochs=40",
             "schedule=constant", "checkpoint.every_epochs=null")  # fmt: skip
    loop = loop_of(tmp_path, *words, f"precision={precision}")
    loop.run()
    parts = loop.parts
    (batch,) = [parts.prepare(batch) for batch in parts.loaders["train"].batches(0)]
    parts.model.train()  # four utterances have statistics of their own
    with torch.no_grad(), parts.plan.products.context, parts.plan.autocast:
        shown = parts.task.exhibits(parts.model, batch)["transcripts"]
    assert all(reference == heard for reference, heard in shown.rows)


@pytest.mark.parametrize("precision", FEW)
def test_a_refused_step_leaves_running_statistics_of_speech_bit_unchanged(precision):
    parts, _ = parts_of(*words_of("speech", precision), "scaler=dynamic")
    before = {name: value.clone() for name, value in parts.model.state_dict().items()}
    parts.model.letters.weight.register_hook(lambda gradient: gradient * float("inf"))
    [row] = rows_of(parts, parts.prepare(next(iter(parts.loaders["train"].batches(0)))))
    assert row.overflow
    assert all(torch.equal(value, before[name]) for name, value in parts.model.state_dict().items())


def test_accumulated_micro_batches_cut_padded_batches_anywhere(tmp_path):
    kept = Kept()
    loop_of(tmp_path, *words_of("speech", "fp32"), "train.accumulate=3", kept=kept).run()
    assert all(math.isfinite(step.loss) for step in kept.of(StepRecord))


@pytest.mark.parametrize("precision", ["fp32", "amp_dynamic", "fp16_dynamic"])
def test_taking_out_noise_is_learnt_in_every_precision_and_shown(tmp_path, precision):
    kept = Kept()
    loop = loop_of(tmp_path, *DENOISES, f"precision={precision}", kept=kept)
    loop.run()
    records = [record for record in kept.of(EvalRecord) if record.split == "val"]
    assert set(records[-1].metrics) == {"loss", "psnr", "psnr_gain", "ssim"}
    assert records[-1].metrics["psnr_gain"] > 2.0
    assert records[-1].metrics["psnr"] > records[0].metrics["psnr"]
    assert all(math.isfinite(step["loss"]) for step in steps_of(loop))
    grids = sorted((loop.storage.paths.root / "samples").glob("enhanced-*.png"))
    assert len(grids) == 4
    with Image.open(grids[-1]) as grid:
        assert grid.size == (3 * (32 + 1) + 1, 6 * (32 + 1) + 1)  # before, after and truth of six pictures


@pytest.mark.parametrize("precision", ["fp32", "amp_dynamic", "fp16_dynamic"])
def test_enlarging_begins_at_bicubic_interpolation_and_gets_better_in_every_precision(tmp_path, precision):
    loop = loop_of(tmp_path, *ENLARGES, f"precision={precision}", "optimizer.lr=0.003")
    loop.run()
    assert loop.progress.last["val"]["psnr_gain"] > 0.05
    assert loop.parts.task.upscale == 2


def test_targets_stay_in_full_precision_while_inputs_are_halved():
    parts, _ = parts_of(*ENLARGES, "precision=fp16_dynamic")
    batch = parts.prepare(next(parts.loaders["train"].batches(0)))
    assert (batch.inputs.dtype, batch.targets.dtype) == (torch.float16, torch.float32)
    assert batch.targets.unique().numel() > 100


def test_the_evaluation_sees_the_same_noise_whatever_the_seed():
    one, other = (parts_of(*DENOISES, f"seed={seed}")[0] for seed in (0, 1))
    batches = [parts.prepare(next(parts.loaders["val"].batches(0))) for parts in (one, other)]
    assert torch.equal(batches[0].inputs, batches[1].inputs)
    trained = [parts.prepare(next(parts.loaders["train"].batches(0))) for parts in (one, other)]
    assert not torch.equal(trained[0].inputs, trained[1].inputs)


@pytest.mark.parametrize("words", [ENLARGES, DENOISES], ids=["enlarging", "denoising"])
def test_the_doctor_finds_nothing_wrong_with_half_precision(words):
    """The bicubic enlargement is a module: beside its roundings, those of the sum would look like a fault."""
    report = check_scaling(compose([*words, "precision=fp16_dynamic"]), lambda _: None)
    assert not report.findings
