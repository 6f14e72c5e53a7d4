"""Answers by class count every sample once, agree with the accuracy, and show the mistakes themselves."""

from __future__ import annotations

import io
import re

import pytest
import torch
from PIL import Image

from mptrain.report.run_page import by_class_page, class_table
from mptrain.run.evaluation import ByClass, evaluate_run
from mptrain.system.errors import UsageError
from mptrain.system.words import UNKNOWN
from tests.small_runs import TINY, run_in_process


def trained(folder, *words):
    done = run_in_process(*words, "run.name=run", "threads=1", cwd=folder)
    assert done.returncode == 0, done.stderr
    return str(folder / "outputs/run")


def test_the_confusion_matrix_has_every_sample_and_the_accuracy(tmp_path):
    run = trained(tmp_path, *TINY, "precision=amp_dynamic", "train.ema_decay=0.5")
    found = evaluate_run(run, (), "last", average=True, by_classes=True)
    confusion = torch.tensor(found.by_class.confusion)
    (record,) = [one for one in found.records if one.split == "test"]
    assert confusion.sum() == record.samples == 397
    assert confusion.trace() / 397 == pytest.approx(record.metrics["top1"])
    assert confusion.sum(1).tolist() == [39, 40, 39, 40, 40, 40, 40, 40, 39, 40]
    assert found.by_class.not_finite == 0
    shares = [one.probability for one in found.by_class.mistakes]
    assert shares == sorted(shares, reverse=True)
    assert all(one.true != one.predicted for one in found.by_class.mistakes)
    with Image.open(io.BytesIO(found.by_class.pictures)) as picture:
        assert picture.size == (960, 462)
    lead, _, *rows = repr(found.by_class).splitlines()
    assert lead == f"{confusion.trace()} of 397 samples of test are right ({100 * confusion.trace() / 397:.2f} %)."
    assert [[int(cell) for cell in row.split()[1:]] for row in rows] == confusion.tolist()
    assert found.by_class.matrix == found.by_class.confusion


@pytest.mark.long
def test_pictures_are_named_by_their_files_and_unusable_ones_are_left_out(tmp_path):
    for part in ("train", "test"):
        for name in ("cat", "dog"):
            (tmp_path / "data" / part / name).mkdir(parents=True)
            for number in range(12):
                pixels = torch.randint(0, 256, (40, 40, 3), dtype=torch.uint8).numpy()
                Image.fromarray(pixels).save(tmp_path / "data" / part / name / f"{number}.png")
    (tmp_path / "data/test/cat/5.png").write_text("x")
    words = ("dataset=image_folder", "dataset.root=data", "dataset.image_size=32", "dataset.on_error=skip", "model=cnn")
    run = trained(tmp_path, *words, "train.epochs=1", "train.batch_size=8", "dataset.workers=0")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        found = evaluate_run(run, (), "last", average=True, by_classes=True).by_class
    assert sum(map(sum, found.confusion)) == 23
    assert all(re.fullmatch(r"\S*data/test/(cat|dog)/\d+\.png", one.sample) for one in found.mistakes)


@pytest.mark.long
def test_texts_are_shown(tmp_path):
    lines = [f"{'ab'[n % 2]}\tword{n % 5} and {['yes', 'no', 'maybe'][n % 3]}" for n in range(60)]
    (tmp_path / "data.tsv").write_text("\n".join(lines) + "\n")
    words = (
        "model=sequence_classifier",
        "dataset=labelled_text",
        f"dataset.path={tmp_path}/data.tsv",
        "train.epochs=1",
    )
    run = trained(tmp_path, *words, "dataset.min_count=1", "train.batch_size=8", "dataset.test_share=0.5")
    found = evaluate_run(run, (), "last", average=True, by_classes=True).by_class
    assert found.pictures == b""
    assert all(re.fullmatch(r"word\d and (yes|no|maybe)", one.text) for one in found.mistakes)
    assert found.mistakes


@pytest.mark.long
def test_other_tasks_are_refused_and_the_page_is_written_and_printed(tmp_path):
    words = ("model=ssd_small", "dataset.train_samples=16", "dataset.val_samples=4", "dataset.test_samples=4")
    run = trained(tmp_path, *words, "train.epochs=1", "train.batch_size=8")
    with pytest.raises(UsageError, match="a confusion matrix is for classification"):
        evaluate_run(run, (), "last", average=True, by_classes=True)
    (tmp_path / "digits").mkdir()
    trained(tmp_path / "digits", *TINY)
    done = run_in_process("eval", "run", "--by-class", cwd=tmp_path / "digits")
    assert done.returncode == 0, done.stderr
    assert "class  samples  precision  recall" in done.stdout
    page = (tmp_path / "digits/outputs/run/by-class.html").read_text()
    assert "Most certain mistakes" in page
    assert (tmp_path / "digits/outputs/run/by-class-mistakes.png").exists()


def test_figures_of_classes_are_those_of_their_definitions():
    table = class_table(["a", "b", "c"], [[3, 1, 0], [0, 4, 0], [0, 0, 0]])
    rows = [[cell.text for cell in row] for row in table.rows]
    assert rows == [
        ["a", "4", "1.000", "0.750", "0.857"],
        ["b", "4", "0.800", "1.000", "0.889"],
        ["c", "0", *[UNKNOWN] * 3],
    ]
    names = ["<script>", "b" * 60]
    page = by_class_page("run", "test", names, [[0, 2], [0, 3]], 1, [("x", names[0], names[1], 0.9, "")], b"")
    assert page.lead == "3 of 6 samples of test are right (50.00 %)."
    assert len(page.plots()) == 1


def answers(count):
    rows = tuple(tuple(10 * (at == to) + (to == at + 1) for to in range(count)) for at in range(count))
    return ByClass("val", tuple(f"<class {at}>" for at in range(count)), rows, 2, (), b"")


def test_a_confusion_matrix_is_a_table_and_of_many_classes_the_most_frequent_confusions():
    few, many = answers(20), answers(21)
    lead, lost, _, *rows = repr(few).splitlines()
    assert lead == "200 of 221 samples of val are right (90.50 %)."
    assert lost == "2 outputs are not finite, so in no class."
    assert len(rows) == 20
    assert '<td class="">&lt;class 0&gt;</td>' in few._repr_html_()
    assert repr(many).splitlines()[2].split() == ["is", "said", "samples"]
    assert repr(many).splitlines()[3].split() == ["<class", "0>", "<class", "1>", "1"]
    pytest.importorskip("pandas")
    table = few.to_dataframe()
    assert (table.loc["<class 0>", "<class 1>"], table.loc["<class 1>", "<class 0>"]) == (1, 0)


@pytest.mark.parametrize(
    ("count", "counts", "named"), [(3, 9, 3), (30, 900, 30), pytest.param(41, 0, 21, marks=pytest.mark.long)]
)
def test_a_figure_has_counts_for_up_to_30_classes_and_names_at_most_40(count, counts, named):
    figure = answers(count).plot()
    (axes,) = figure.figure.axes
    assert len(axes.texts) == counts
    assert len(axes.get_xticks()) == len(axes.get_yticks()) == named
    assert "2 outputs are not finite" in figure._repr_svg_()
