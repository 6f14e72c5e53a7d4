"""Predictions are those of the evaluation, sample by sample, whatever the workload; the data need not be there."""

from __future__ import annotations

import json
import math
import shutil
import wave

import pytest
import torch
from PIL import Image

import mptrain
from mptrain.config.compose import reload
from mptrain.engine.checkpointing import load_weights
from mptrain.engine.evaluate import measuring
from mptrain.run.build.parts import build
from mptrain.run.prediction import predictor
from mptrain.runlog.checkpoints import CheckpointStore
from mptrain.runlog.directory import find_run
from mptrain.system.errors import DataError, UsageError
from mptrain.workloads.language.task import continued
from tests.small_runs import run_command, run_in_process

SHORT = ("train.epochs=1", "train.batch_size=8", "run.name=run", "threads=1", "device=cpu")


def save(image, path):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image.permute(1, 2, 0).squeeze(2).numpy()).save(path)
    return str(path)


def noise(*shape, seed=0):
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def class_folders(folder):
    for part, count in (("train", 8), ("val", 3), ("test", 4)):
        for name in ("cat", "dog"):
            for number in range(count):
                save(noise(3, 40 + number, 50, seed=number), folder / "data" / part / name / f"{number}.png")
    words = ("dataset=image_folder", "dataset.root=data", "dataset.image_size=32", "model=cnn", *SHORT)
    return words, lambda split: list(split.listing.paths)


def stored_pictures(folder):
    words = ("dataset.train_samples=64", "dataset.image_size=16", "dataset.channels=3", "model=cnn", *SHORT)
    return words, lambda split: [save(one, folder / f"{n}.png") for n, one in enumerate(split.images[:20])]


def texts(folder):
    lines = [f"{'ab'[n % 2]}\tword{n % 5} and {['yes', 'no', 'maybe'][n % 3]} {'so ' * (n % 4)}" for n in range(40)]
    for part in ("train", "val", "test"):
        (folder / "data").mkdir(exist_ok=True)
        (folder / "data" / f"{part}.tsv").write_text("\n".join(lines[: 40 if part == "train" else 9]) + "\n")
    words = ("model=sequence_classifier", "dataset=labelled_text", "dataset.path=data", "dataset.min_count=1", *SHORT)
    return words, lambda split: [line.split("\t")[1] for line in dict.fromkeys(lines[:9])]


def sentences(folder):
    pairs = [f"the {one} sees the {other}\t{other} {one} der" for one in "abcdefgh" for other in "abcde"]
    (folder / "data").mkdir()
    for part in ("train", "val", "test"):
        (folder / "data" / f"{part}.tsv").write_text("\n".join(pairs[: 40 if part == "train" else 9]) + "\n")
    words = ("model=seq2seq_small", "dataset=pairs", "dataset.path=data", "dataset.vocabulary=40", *SHORT)
    return words, lambda split: [pair.split("\t")[0] for pair in pairs[:9]]


def recordings(folder):
    (folder / "data").mkdir()
    for part in ("train", "val", "test"):
        rows = []
        for number in range(8):
            samples = (noise(4000 + 300 * number, seed=number).to(torch.int16) - 128) * 50
            name = f"{part}{number}.wav"
            with wave.open(str(folder / "data" / name), "wb") as file:
                file.setparams((1, 2, 8000, 0, "NONE", ""))
                file.writeframes(samples.numpy().tobytes())
            rows.append(f"{name}\t{['yes', 'no'][number % 2]}")
        (folder / "data" / f"{part}.tsv").write_text("\n".join(rows) + "\n")
    words = (
        "model=deepspeech2_small",
        "dataset=speech",
        "dataset.path=data/train.tsv",
        "dataset.val_path=data/val.tsv",
    )
    more = ("dataset.test_path=data/test.tsv", "dataset.sample_rate=8000", "dataset.workers=0", "dataset.bands=20")
    return (*words, *more, *SHORT), lambda split: [one.name for one in split.utterances]


def scenes(folder):
    words = ("model=ssd_small", "dataset.train_samples=32", "dataset.val_samples=8", "dataset.test_samples=8")
    more = ("task.shown_score=0.02",)
    return (*words, *more, *SHORT), lambda split: [save(one, folder / f"{n}.png") for n, one in enumerate(split.images)]


def prompts(folder):
    (folder / "data").mkdir()
    for part in ("train", "valid", "test"):
        (folder / "data" / f"{part}.txt").write_text("the quick brown fox jumps over the lazy dog. " * 20)
    words = ("model=transformer", "dataset=text", "dataset.path=data", "dataset.tokens=char", *SHORT)
    more = ("dataset.sequence_length=16", "dataset.stream=false")
    return (*words, *more), lambda split: []


def rows(folder):
    (folder / "data").mkdir()
    made = [(number / 7 % 3, "abc"[number % 3], ["low", "high"][number % 7 > 3]) for number in range(48)]
    for part in ("train", "val", "test"):
        lines = [f"{one},{other},{kind}" for one, other, kind in made[: 48 if part == "train" else 9]]
        (folder / "data" / f"{part}.csv").write_text("\n".join(["size,letter,kind", *lines]) + "\n")
    words = ("model=mlp", "dataset=table", "dataset.target=kind", "dataset.path=data/train.csv")
    parts = ("dataset.val_path=data/val.csv", "dataset.test_path=data/test.csv")
    given = [json.dumps({"letter": other, "size": one, "more": 3}) for one, other, _ in made[:9]]
    return (*words, *parts, *SHORT), lambda split: given


KINDS = {one.__name__: one for one in (class_folders, stored_pictures, texts, sentences, recordings, scenes, rows)}


FP32, EMA = ("precision=fp32",), ("precision=amp_dynamic", "train.ema_decay=0.9")
HALF, SHARDED = ("precision=fp16_dynamic",), ("precision=fp16_dynamic", "distributed=fsdp2", "distributed.procs=2")
CASES = [(kind, more) for kind in KINDS for more in (FP32, EMA)]
CASES += [("class_folders", HALF), pytest.param("stored_pictures", SHARDED, marks=pytest.mark.distributed)]


@pytest.mark.long
@pytest.mark.parametrize(("kind", "more"), CASES)
def test_predictions_are_those_of_the_evaluation_sample_by_sample(kind, more, tmp_path, monkeypatch):
    words, inputs_of = KINDS[kind](tmp_path)
    train = run_command if more is SHARDED else run_in_process
    done = train(*words, *more, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    run = find_run(str(tmp_path / "outputs/run"))
    monkeypatch.chdir(tmp_path)
    config = reload(run.read_config(), ())
    parts, _ = build(config, weights=False, trains=False)
    load_weights(parts, CheckpointStore(run.paths.checkpoints, config.checkpoint.keep).load("last").state)
    split = parts.loaders["test"].split
    given = inputs_of(split)
    expected = []
    with measuring(parts, average=True) as (model, prepare, autocast):
        for begin in range(0, len(given), 8):
            batch = prepare(split.fetch(range(begin, min(begin + 8, len(given))), 0, 0))
            if kind == "scenes":
                batch.extras["scale"] = torch.ones(batch.samples, 2)
            with autocast:
                expected += parts.task.predict(model, batch)
    assert len(expected) == len(given) > 4
    if kind in ("texts", "sentences", "rows"):  # whose inputs are not files
        shutil.rmtree(tmp_path / "data")
    with predictor(str(run.root)) as loaded:
        found = list(loaded.predict(given))
    assert [one.given for one in found] == given
    assert [one.answer for one in found] == expected


@pytest.mark.long
def test_a_prompt_is_measured_as_a_window_of_the_evaluation_and_continued(tmp_path):
    words, _ = prompts(tmp_path)
    done = run_in_process(*words, "precision=fp32", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    text = "the quick brown fox jumps over the lazy dog. "[:17]
    with predictor(str(tmp_path / "outputs/run")) as loaded:
        short, long, none = loaded.predict([text, text + "and more", "x"])
        numbers = loaded.source.vocabulary.numbers(text).long()
        logits = loaded.parts.model.eval()(numbers[None, :-1]).log_softmax(2)
        known = torch.arange(1, len(loaded.source.vocabulary))
        whole = continued(loaded.parts.model, numbers[None], 32, 16, seed=1, choices=known)[0].tolist()
    expected = -logits[0].gather(1, numbers[1:, None]).mean().item()
    assert short.answer["loss"] == pytest.approx(expected, rel=1e-5)
    assert short.answer["perplexity"] == pytest.approx(math.exp(expected), rel=1e-5)
    assert short.answer["continuation"] == loaded.source.vocabulary.text(whole)
    assert (long.remark, none.error) == ("its last 17 of 25 tokens were used", "it has fewer than two tokens")


@pytest.mark.long
def test_texts_are_written_alike_from_python_and_by_the_command(tmp_path, monkeypatch):
    words, _ = prompts(tmp_path)
    assert run_in_process(*words, "precision=fp32", cwd=tmp_path).returncode == 0
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.txt").write_text("the quick\nfox\n")
    run = mptrain.open_run("run")
    for options in ({}, {"length": 5}, {"length": 40, "temperature": 0}, {"temperature": 0.5, "seed": 7}):
        flags = [text for name, value in options.items() for text in (f"--{name}", str(value))]
        done = run_in_process("predict", "run", "prompts.txt", "--jsonl", *flags, cwd=tmp_path)
        expected = [json.loads(line)["continuation"] for line in done.stdout.splitlines()]
        assert [answer["continuation"] for answer in run.predict(["the quick", "fox"], **options)] == expected
        assert len(expected) == 2


@pytest.mark.long
def test_prompts_have_random_numbers_of_their_own_and_the_same_in_every_batch(tmp_path, monkeypatch):
    words, _ = prompts(tmp_path)
    assert run_in_process(*words, "precision=fp32", cwd=tmp_path).returncode == 0
    texts = ["the quick", "fox", "a lazy dog jumps over", "fox", "the quicz"]

    def written(*given, **writing):
        with predictor(str(tmp_path / "outputs/run"), writing=writing) as loaded:
            return [one.answer["continuation"] for one in loaded.predict(given)]

    together = written(*texts)
    assert together == [written(text)[0] for text in texts]
    assert together[1] == together[3]
    assert len(set(together)) == 4
    assert written(*texts, seed=2) != together
    assert len(written("fox", length=5)[0]) == 5
    cold = written("fox", "dog", temperature=0)
    assert cold == written("fox", "dog", temperature=1e-4, seed=7)  # always the likeliest
    with pytest.raises(UsageError, match="--heat is about written text"):
        written("fox", heat=3)


@pytest.mark.long
def test_an_enhanced_picture_is_the_networks_output_in_8_bits(tmp_path):
    words = (
        "model=dncnn_small",
        "dataset=photos",
        "dataset.patches=16",
        "dataset.tiles_per_photo=1",
        "precision=fp32",
        *SHORT,
    )
    done = run_in_process(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    given = [save(noise(3, 20, 30), tmp_path / "a.png"), save(noise(3, 31, 17), tmp_path / "b.png")]
    with predictor(str(tmp_path / "outputs/run")) as loaded:
        found = list(loaded.predict(given))
        output = loaded.parts.model.eval()(noise(3, 20, 30)[None].float() / 255)
    assert [tuple(one.picture.shape) for one in found] == [(3, 20, 30), (3, 31, 17)]
    assert torch.equal(found[0].picture, (output[0].clamp(0, 1) * 255).round().byte())


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    words, _ = stored_pictures(folder)
    done = run_in_process(*words, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_an_unusable_input_is_said_and_all_others_are_answered(trained, tmp_path):
    given = [save(noise(1, 9 + n, 9), tmp_path / f"{n}.png") for n in range(3)]
    bad = [str(tmp_path / f"bad{n}.png") for n in range(10)]
    for path in bad[1:]:
        (tmp_path / path).write_text("x")
    order = [given[0], *bad, *given[1:]]  # a whole batch is unusable
    with predictor(str(trained / "outputs/run")) as loaded:
        found = list(loaded.predict(order))
    assert [one.given for one in found] == order
    assert [bool(one.error) for one in found] == [False, *[True] * 10, False, False]
    assert all(one.answer["class"] in "0123456789" for one in found if not one.error)


def test_what_cannot_predict_is_refused_by_name(trained, tmp_path):
    copy = shutil.copytree(trained / "outputs/run", tmp_path / "run")
    card = json.loads((copy / "data.json").read_text())
    for change, said in (
        ({"inputs": ""}, "does not say how new inputs are read"),
        ({"preparation": {}}, "is damaged: KeyError"),
        ({"inputs": ["pictures"]}, "does not say how new inputs are read"),
        ({"stored_size": 10**9}, "is damaged: ValueError"),
        ({"decode": "fast"}, "is damaged: ValueError"),
        *(
            ({"preparation": {**card["preparation"], **change}}, "is damaged: ValueError")
            for change in (
                {"mean": ["x"]},
                {"mean": [0.5, 0.5]},
                {"std": [0]},
                {"mean": [], "std": []},
                {"divide_by": 0},
                {"channels": 7},
                {"resize": {"side": 0}},
                {"resize": {"side": 10**6}},
                {"std": [-1]},
            )
        ),
    ):
        (copy / "data.json").write_text(json.dumps(card | change))
        with pytest.raises(DataError, match=said), predictor(str(copy)):
            pass
    with pytest.raises(UsageError, match="has no effect on predictions"), predictor(str(copy), ["dataset.root=x"]):
        pass


@pytest.mark.long
def test_classes_are_those_that_the_checkpoint_was_trained_on(tmp_path):
    words, _ = texts(tmp_path)
    done = run_in_process(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    file = tmp_path / "outputs/run/data.json"
    card = json.loads(file.read_text())
    for names in (["b", "a"], ["a", "b", "x"], ["a"]):
        file.write_text(json.dumps(card | {"class_names": names}))
        with pytest.raises(DataError, match="is damaged: ValueError"), predictor(str(file.parent)):
            pass
