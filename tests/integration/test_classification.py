"""The small families of classifiers learn in every mode; what varies images changes nothing else."""

from __future__ import annotations

import pytest
from PIL import Image

from mptrain.system.records import EvalRecord
from tests.small_runs import Kept, continue_loop, interrupt_after, loop_of, steps_of

pytestmark = pytest.mark.workload

#: Each network narrower still, on 40 digits that it can learn by heart.
NETWORKS = {
    "alexnet_small": ("model.width=8", "model.hidden=32", "model.dropout=0", "dataset.image_size=16"),
    "vgg_small": ("model.widths=[8,16]", "model.hidden=32", "model.dropout=0", "dataset.image_size=8"),
    "inception_v2_small": ("model.width=0.125", "dataset.image_size=32", "train.epochs=60"),
    "resnext_small": ("model.widths=[32,64]", "dataset.image_size=8"),
}
BY_HEART = (
    "dataset.train_samples=40",
    "dataset.val_samples=0",
    "train.batch_size=20",
    "train.epochs=40",
    "optimizer=adam",
    "optimizer.lr=0.003",
    "schedule=constant",
    "checkpoint.every_epochs=null",
)


@pytest.mark.parametrize("precision", ["fp32", "amp_dynamic", "fp16_dynamic"])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_small_network_learns_forty_digits_by_heart(tmp_path, name, precision):
    loop = loop_of(tmp_path, f"model={name}", *BY_HEART, *NETWORKS[name], f"precision={precision}")
    loop.run()
    losses = [step["loss"] for step in steps_of(loop)]
    assert losses[0] > 1.5
    assert sum(losses[-4:]) / 4 < 0.2


@pytest.fixture
def root(tmp_path):
    for part, count in (("train", 8), ("val", 12)):
        for shade, name in ((60, "dark"), (190, "light")):
            folder = tmp_path / "data" / part / name
            folder.mkdir(parents=True)
            for item in range(count):
                Image.new("RGB", (24, 20), (shade + item, shade, shade - item)).save(folder / f"{item}.png")
    return tmp_path / "data"


def test_a_run_on_a_folder_with_everything_that_varies_images_resumes_bit_for_bit(tmp_path, root):
    words = (
        *("model=resnext_small", "model.widths=[32,64]", "dataset=image_folder", f"dataset.root={root}"),
        *(
            "dataset.image_size=16",
            "dataset.augment=trivial_augment",
            "dataset.random_erasing=0.5",
            "dataset.workers=0",
        ),
        *("task.mixup=0.2", "precision=fp16_dynamic", "train.batch_size=8", "train.epochs=4"),
    )
    kept = Kept()
    whole = loop_of(tmp_path / "whole", *words, kept=kept)
    whole.run()
    broken = loop_of(tmp_path / "broken", *words)
    interrupt_after(broken, 3)
    rest = continue_loop(broken, *words)
    rest.run()
    losses = [step["loss"] for step in steps_of(whole)]
    assert len(losses) == 8
    assert [step["loss"] for step in steps_of(rest)] == losses
    last = kept.of(EvalRecord)[-1]
    assert last.samples == 24
    assert set(last.metrics) == {"loss", "top1"}  # of two classes
