"""The event files hold what was recorded, and only that, also where an attempt goes on from a checkpoint."""

import math

import pytest

pytest.importorskip("tensorboard")

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mptrain.logger import TensorBoard
from mptrain.logger.base import TrackedRun
from mptrain.system.records import EventRecord, OverflowRecord, StepRecord


def step(number, loss=0.5):
    return StepRecord("main", number, number, 0, loss, 1024.0, False, False, math.inf, 0.1)


def tracked(tmp_path, from_step=0, **config):
    return TrackedRun("name", tmp_path, tmp_path / "samples", {"optimizer": {"lr": 0.1}, **config}, from_step)


def read(tmp_path):
    accumulator = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    accumulator.Reload()
    return accumulator


def curve(accumulator, tag):
    return [(event.step, event.value) for event in accumulator.Scalars(tag)]


def test_what_was_written_beyond_the_checkpoint_is_replaced(tmp_path):
    first = TensorBoard().open(tracked(tmp_path))
    for number in range(1, 31):
        first.take(step(number, loss=1.0))
    first.close()
    second = TensorBoard().open(tracked(tmp_path, from_step=20))
    for number in range(21, 26):
        second.take(step(number, loss=2.0))
    second.close()
    assert curve(read(tmp_path), "train/loss") == [(n, 1.0 if n <= 20 else 2.0) for n in range(1, 26)]


def test_the_configuration_becomes_hyperparameters(tmp_path):
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    TensorBoard().open(tracked(tmp_path, seed=3, names=["a"], nothing=None)).close()
    content = read(tmp_path).SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    hparams = HParamsPluginData.FromString(content).session_start_info.hparams
    assert hparams["optimizer.lr"].number_value == 0.1
    assert hparams["seed"].number_value == 3
    assert hparams["names"].string_value == '["a"]'
    assert hparams["nothing"].string_value == "null"


def test_overflows_and_the_summary_stand_there_in_words(tmp_path):
    tracker = TensorBoard().open(tracked(tmp_path))
    tensors = (("fc.weight", "inf"), ("fc.bias", "nan"))
    tracker.take(OverflowRecord("main", 5, 65536.0, "unexpected", "finite", tensors, 7, True, 0))
    tracker.take(EventRecord("summary", 9, {"metric": 0.9, "scale": {"first": 2.0}}))
    tracker.close()
    found = read(tmp_path)
    [event] = found.Tensors("overflows")
    words = b"unexpected, loss finite, scale 65536: fc.weight (inf), fc.bias (nan) and 5 more"
    assert (event.step, event.tensor_proto.string_val[0]) == (5, words)
    assert found.SummaryMetadata("overflows").plugin_data.plugin_name == "text"
    assert b"scale.first: 2.0" in found.Tensors("summary")[0].tensor_proto.string_val[0]
    assert curve(found, "overflow/unexpected") == [(5, 7.0)]


def test_pictures_are_shown_under_their_name(tmp_path):
    from PIL import Image

    (tmp_path / "samples").mkdir()
    Image.new("L", (12, 8)).save(tmp_path / "samples" / "grid-of-8-0002.png")
    tracker = TensorBoard().open(tracked(tmp_path))
    tracker.take(EventRecord("samples", 40, {"files": ["grid-of-8-0002.png"]}))
    tracker.close()
    [event] = read(tmp_path).Images("samples/grid-of-8")
    assert (event.step, event.width, event.height) == (40, 12, 8)
    assert event.encoded_image_string.startswith(b"\x89PNG")
