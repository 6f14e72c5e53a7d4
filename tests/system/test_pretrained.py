"""Pretrained weights: from the caches of the libraries, downloaded only where that was typed, and one line where they are missing."""

from __future__ import annotations

import sys
import time
import urllib.request

import huggingface_hub
import pytest
import safetensors.torch
import timm
import torch
import torchvision
import transformers
from PIL import Image

from mptrain.config.compose import compose, reload
from mptrain.run.build.parts import build
from mptrain.run.describe import describe_parts
from mptrain.system.errors import CheckpointError, DataError
from mptrain.system.pretrained import ATTRIBUTE
from mptrain.workloads.language.models.causal_lm import causal_lm
from tests.small_runs import parts_of, run_in_process, whole_and_resumed

TIMM = ("model=timm", "model.name=resnet10t.c3_in1k")
GPT2 = ("model=causal_lm", "dataset.train_samples=8", "train.batch_size=4")
FEW = ("precision=fp32", "train.batch_size=16", "dataset.train_samples=16")


@pytest.fixture(autouse=True)
def caches(tmp_path, monkeypatch):
    """Empty caches, and a hub that refuses connections at once."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(torch.hub, "_hub_dir", str(tmp_path / "torch"), raising=False)

    def refuse(*given, **named):
        raise OSError("no route to host")

    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    monkeypatch.setattr(torch.hub, "urlopen", refuse)
    return tmp_path


def keep(tmp_path, repository, name, tensors):
    """Put a file into the cache of the hub."""
    folder = tmp_path / "hub" / f"models--{repository.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0" * 40)
    (folder / "snapshots" / ("0" * 40)).mkdir(parents=True)
    safetensors.torch.save_file(tensors, folder / "snapshots" / ("0" * 40) / name)


@pytest.mark.long
def test_without_network_one_line_says_where_the_file_belongs_and_nobody_waits(tmp_path):
    begun = time.monotonic()
    for words, place in (
        (TIMM, f"timm/resnet10t.c3_in1k/model.safetensors is not in {tmp_path}/hub/models--timm--resnet10t.c3_in1k"),
        (("model=torchvision", "model.name=resnet18"), f"resnet18-f37072fd.pth is not in {tmp_path}/torch/checkpoints"),
        (("model=causal_lm", "model.name=gpt2"), f"gpt2/config.json is not in {tmp_path}/hub/models--gpt2"),
    ):
        done = run_in_process(*words, "model.pretrained=true", "train.max_steps=1", cwd=tmp_path)
        assert done.returncode == 6
        (line,) = [line for line in done.stderr.splitlines() if line.startswith("error:")]
        assert line.startswith(f"error: model.pretrained: {place}")
        assert "set model.weights=FILE if you have the weights elsewhere" in done.stderr
        assert "Traceback" not in done.stderr
    assert time.monotonic() - begun < 60  # the hub's client alone would retry for two minutes


def test_a_file_alone_asks_nobody_for_weights(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.utils, "get_session", lambda: pytest.fail("asked the hub"))
    folder = tmp_path / "mine" / "model"
    folder.mkdir(parents=True)
    for option, name in (("timm", "resnet18.a1_in1k"), ("torchvision", "resnet18"), ("causal_lm", "gpt2")):
        target = compose([f"model={option}"]).model.path
        (folder / "theirs.yaml").write_text(f"_target_: {target}\nname: {name}\npretrained: true\ndownload: true\n")
        data = ("dataset=python_docs", "task=language") if option == "causal_lm" else ("dataset.channels=3",)
        data = (*data, "dataset.stream=false") if option == "causal_lm" else (*data, "dataset.image_size=64")
        config = compose(["model=theirs", *data], config_dirs=[tmp_path / "mine"])
        with pytest.raises(DataError, match="only a typed override may download it") as caught:
            build(config)
        assert caught.value.hint.startswith("type model.pretrained=true on the command line")


def test_weights_of_timm_fit_channels_and_classes_and_a_resumed_run_needs_none(tmp_path):
    donor = timm.create_model("resnet10t", num_classes=1000)
    weights = {name: torch.full_like(value, 0.01) for name, value in donor.state_dict().items()}
    keep(tmp_path, "timm/resnet10t.c3_in1k", "model.safetensors", weights)
    config = compose([*TIMM, "model.pretrained=true", *FEW])
    parts, _ = build(config)
    state = parts.model.state_dict()
    assert torch.all(state["layer1.0.conv1.weight"] == 0.01)
    assert torch.allclose(state["conv1.0.weight"], torch.tensor(0.03))  # one channel: the sum over three
    assert not torch.all(state["fc.weight"] == 0.01)
    assert "not loaded: fc.weight ((1000, 512), not (10, 512))" in parts.notes[0]
    assert describe_parts(config, parts)["model"].startswith("timm resnet10t.c3_in1k, ")
    (tmp_path / "hub").rename(tmp_path / "gone")
    saved = reload(config.yaml)
    assert not hasattr(build(compose([*TIMM, *FEW]))[0].model, ATTRIBUTE)
    build(saved, weights=False)
    with pytest.raises(DataError, match="only a typed override"):
        build(saved)


def test_weights_of_torchvision_load_without_a_head_for_other_classes(tmp_path):
    folder = tmp_path / "torch" / "checkpoints"
    folder.mkdir(parents=True)
    weights = torchvision.models.squeezenet1_1(num_classes=1000).state_dict()
    torch.save(
        {name: torch.full_like(value, 0.01) for name, value in weights.items()}, folder / "squeezenet1_1-b8a52dc0.pth"
    )
    words = ("model=torchvision", "model.name=squeezenet1_1", "model.pretrained=true", *FEW)
    parts, _ = parts_of(*words)
    assert torch.all(parts.model.features[0].weight == 0.01)
    assert "not loaded: classifier.1.weight ((1000, 512, 1, 1), not (10, 512, 1, 1))" in parts.notes[0]
    torch.save(Evil(), folder / "squeezenet1_1-b8a52dc0.pth")
    with pytest.raises(DataError, match="cannot be read"):
        parts_of(*words)
    assert not (tmp_path / "owned").exists()


class Evil:
    def __reduce__(self):
        return (print, ("owned",))


def test_a_folder_of_transformers_sets_the_sizes(tmp_path):
    more = {"n_positions": 80, "resid_pdrop": 0.3, "attn_pdrop": 0.2}
    config = transformers.GPT2Config(n_embd=32, n_layer=3, n_head=2, vocab_size=300, **more)
    donor = transformers.GPT2LMHeadModel(config)
    donor.save_pretrained(tmp_path / "donor")
    parts, _ = parts_of(*GPT2, f"model.name={tmp_path / 'donor'}", "model.pretrained=true", "precision=amp_bf16")
    assert len(parts.model.transformer.h) == 3
    assert torch.equal(parts.model.transformer.h[2].mlp.c_fc.weight, donor.transformer.h[2].mlp.c_fc.weight)
    arguments = compose([*GPT2, "model.pretrained=true"]).model.arguments
    assert [arguments[key] for key in ("width", "layers", "heads")] == [None] * 3
    size = parts.dataset.facts()["vocabulary_size"]
    assert f"transformer.wte.weight ((300, 32), not ({size}, 32))" in parts.notes[0]
    assert parts.model.lm_head.weight is parts.model.transformer.wte.weight
    words = (*GPT2, f"model.name={tmp_path / 'donor'}", "model.pretrained=true", "precision=fp32")
    model = parts_of(*words, "model.config.n_layer=2", "model.config.attn_pdrop=0")[0].model
    assert len(model.transformer.h) == 2
    assert model.transformer.h[1].mlp.dropout.p == 0.3
    assert model.transformer.h[1].attn.attn_dropout.p == 0


def test_a_pretrained_encoder_does_not_see_the_tokens_that_it_predicts(tmp_path):
    config = transformers.BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=50)
    transformers.BertForMaskedLM(config).save_pretrained(tmp_path / "donor")
    model = causal_lm(name=str(tmp_path / "donor"), vocabulary_size=50, sequence_length=16, pretrained=True).eval()
    tokens = torch.randint(50, (2, 12))
    other = torch.cat([tokens[:, :8], torch.randint(50, (2, 4))], 1)
    assert torch.equal(model(tokens)[:, :8], model(other)[:, :8])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("model.name=vit_tiny_patch16_224", "dataset.image_size=32"), "here they are 0.485, 0.456, 0.406 and 0.229,"),
        (("model.name=vit_tiny_patch16_224", "dataset.image_size=32", "dataset.normalise=symmetric"), ""),
        (("model.name=resnet10t",), ""),
    ],
)
def test_images_normalised_otherwise_than_for_the_weights_are_named(tmp_path, words, said):
    for name in ("a", "b"):
        (tmp_path / "pictures" / name).mkdir(parents=True)
        for number in range(4):
            Image.new("RGB", (40, 40), (number, 0, 0)).save(tmp_path / "pictures" / name / f"{number}.png")
    data = ("dataset=image_folder", f"dataset.root={tmp_path / 'pictures'}", "train.batch_size=4", "precision=fp32")
    config = compose(["model=timm", "model.pretrained=true", *words, *data])
    parts, _ = build(config, weights=False)
    found = [warning for warning in parts.warnings if "was trained on images" in warning]
    assert bool(found) == bool(said)
    assert all(said in one and "dataset.normalise=symmetric" in one for one in found)


@pytest.mark.long
def test_a_run_from_pretrained_weights_resumes_bit_for_bit(tmp_path):
    config = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=300)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "donor")
    words = (
        *GPT2,
        f"model.name={tmp_path / 'donor'}",
        "model.pretrained=true",
        "precision=fp16_dynamic",
        "train.epochs=2",
    )
    whole, resumed = whole_and_resumed(tmp_path, *words, after=2)
    for (name, one), other in zip(
        whole.parts.model.state_dict().items(), resumed.parts.model.state_dict().values(), strict=True
    ):
        assert torch.equal(one, other), name


def test_weights_of_a_file_are_resized_as_pretrained_ones_are(tmp_path):
    donor = timm.create_model("test_vit", num_classes=7, in_chans=1, img_size=192)
    torch.save(donor.state_dict(), tmp_path / "large.pt")
    words = ("model=timm", "model.name=test_vit", "dataset.image_size=96", f"model.weights={tmp_path / 'large.pt'}")
    parts, _ = parts_of(*words, *FEW)
    expected = sys.modules[type(donor).__module__].checkpoint_filter_fn(donor.state_dict(), parts.model)["pos_embed"]
    assert expected.shape != donor.state_dict()["pos_embed"].shape
    assert torch.equal(parts.model.state_dict()["pos_embed"], expected)
    assert "not loaded: head" in parts.notes[0]
    assert parts.notes[0].count("not (") == 2  # weight and bias of the head for 7 classes


def test_weights_of_another_architecture_are_a_warning(tmp_path):
    torch.save(timm.create_model("resnet18", num_classes=10, in_chans=1).state_dict(), tmp_path / "other.pt")
    odd = {"pos_embed": torch.ones(1, 5), "cls_token": torch.zeros(1, 1, 64)}  # timm cannot convert these positions
    torch.save(odd, tmp_path / "odd.pt")
    for name, file in (("resnet50", "other.pt"), ("test_vit", "odd.pt")):
        parts, _ = parts_of("model=timm", f"model.name={name}", *FEW, f"model.weights={tmp_path / file}")
        (warning,) = [one for one in parts.warnings if "tensors loaded from" in one]
        assert "fewer than half: they look like weights of another architecture; not loaded: " in warning
        assert not any("tensors loaded" in note for note in parts.notes)


@pytest.mark.long
def test_state_dicts_of_the_libraries_are_weights_in_both_formats(tmp_path):
    donor = timm.create_model("resnet10t", num_classes=10, in_chans=1)
    safetensors.torch.save_file(donor.state_dict(), tmp_path / "timm.safetensors")
    torch.save({"state_dict": donor.state_dict()}, tmp_path / "timm.pt")
    for file in ("timm.safetensors", "timm.pt"):
        parts, _ = parts_of(*TIMM, *FEW, f"model.weights={tmp_path / file}")
        assert torch.equal(parts.model.fc.weight, donor.fc.weight)
    bert = transformers.BertModel(
        transformers.BertConfig(
            hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256, vocab_size=50
        )
    )
    safetensors.torch.save_model(bert, tmp_path / "bert.safetensors")  # of the network without its head
    parts, _ = parts_of("model=sequence_classifier", f"model.weights={tmp_path / 'bert.safetensors'}")
    assert torch.equal(parts.model.bert.encoder.layer[1].output.dense.weight, bert.encoder.layer[1].output.dense.weight)
    (tmp_path / "bad.safetensors").write_bytes(b"no tensors")
    for name in ("bad", "missing"):
        with pytest.raises(CheckpointError):
            parts_of(*TIMM, *FEW, f"model.weights={tmp_path / name}.safetensors")
