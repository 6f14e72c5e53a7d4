"""timm's classifiers by name: they take the data's images, train in the modes, and what cannot be is said in its words."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import timm
import torch

from mptrain.system.errors import ConfigError
from mptrain.workloads.classification.models.timm_models import timm_classifier
from tests.loops import each
from tests.small_runs import environment, parts_of, run_command, run_in_process, whole_and_resumed

#: Small networks of many families, with the side of the images.
FAMILIES = """
resnet10t test_vit convmixer_768_32 convnext_atto deit_tiny_patch16_224 densenet121 edgenext_xx_small efficientnet_lite0
efficientvit_b0 ghostnet_050 mixer_s32_224 mobilenetv3_small_050 mobilevitv2_050 poolformer_s12 pvt_v2_b0 regnetx_002
resnet18 swin_tiny_patch4_window7_224 vit_tiny_patch16_224 xcit_nano_12_p16_224
"""
LARGER = {"eva02_tiny_patch14_224": 56, "maxvit_rmlp_pico_rw_256": 256}
NETWORKS = {**dict.fromkeys(FAMILIES.split(), 64), **LARGER}
QUICK = ("resnet10t", "test_vit")
#: Networks that a mode cannot train as they are, and the words that docs/bring-your-own.md gives for them.
NEEDS = {"efficientvit_b0": "precision.keep_fp32=[norms,LiteMLA]"}


def words_of(name, precision):
    data = ("dataset=synthetic", f"dataset.image_size={NETWORKS[name]}", "dataset.samples=8", "dataset.val_samples=2")
    needs = (NEEDS[name],) if name in NEEDS and precision != "fp32" else ()
    return ("model=timm", f"model.name={name}", *data, "dataset.test_samples=2", "train.batch_size=2", *needs)


def words_of_a_run(name, precision, *more):
    half = ("precision.cpu_kernels=upcast", "scaler.init_scale=1") if precision.startswith("fp16") else ()
    return (*words_of(name, precision), f"precision={precision}", *half, "train.max_steps=3", "device=cpu", *more)


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in NETWORKS])
def test_a_network_of_each_family_takes_three_steps(takes_three_steps, name, usual_mode):
    takes_three_steps(usual_mode, *words_of(name, usual_mode))


def test_the_documentation_names_the_networks_that_need_words():
    page = (Path(__file__).parents[3] / "docs/bring-your-own.md").read_text()
    assert all(name in page and words in page for name, words in NEEDS.items())


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_the_doctor_examines_a_network_of_each_family(tmp_path, name):
    done = run_in_process("doctor", *words_of_a_run(name, "fp16_dynamic"), "threads=1", cwd=tmp_path)
    assert done.returncode in (0, 4), done.stderr
    assert "compared: one step of 2 samples" in done.stdout


def test_channels_classes_and_size_are_the_datas(tmp_path):
    parts, _ = parts_of("model=timm", "model.name=test_vit", "precision=fp32")  # digits: 1x64x64, 10 classes
    assert parts.model.patch_embed.img_size == (64, 64)
    assert parts.model.patch_embed.proj.weight.shape[1] == 1
    assert parts.model.head.out_features == 10
    theirs = timm.create_model("test_vit", img_size=64, in_chans=1, num_classes=10)
    theirs.load_state_dict(parts.model.state_dict())  # strict: exported weights load in timm


def test_a_run_with_averages_resumes_bit_for_bit(tmp_path):
    more = ("train.ema_decay=0.9", "model.arguments.drop_path_rate=0.2")
    whole, resumed = whole_and_resumed(tmp_path, *words_of_a_run("test_vit", "fp16_dynamic", *more), after=2)
    other = resumed.parts.model.state_dict()
    assert all(torch.equal(value, other[name]) for name, value in whole.parts.model.state_dict().items())


@each(
    ("changes", "message", "hint"),
    [
        ({"name": "resnet19"}, "model.name=resnet19: timm has no such classifier", "resnet18"),
        ({"name": "resnet18.mine"}, "timm has no weights with this tag", "a1_in1k"),
        ({"arguments": {"drop_path_rat": 0.1}}, "unknown key 'model.arguments.drop_path_rat': resnet10t", "did you mean model.arguments.drop_path_rate?"),
        ({"name": "hrnet_w18_small", "arguments": {"drop_rat": 0.1}}, "model.arguments.drop_rat", "did you mean model.arguments.drop_rate?"),
        ({"name": "regnetx_002", "arguments": {"zzz": 1}}, "model.arguments.zzz", "the classes in timm.models.regnet"),
        ({"name": "vit_tiny_patch16_224", "arguments": {"embed_dim": 65}}, "embed_dim: 65", "set dataset.image_size"),
        ({"arguments": {"checkpoint_path": "x.pth"}}, "model.arguments.checkpoint_path is not for you", "model.weights=FILE"),
        ({"arguments": {"pretrained": True}}, "model.arguments.pretrained is not for you", "model.pretrained=true"),
        ({"name": "hf-hub:someone/model"}, "timm has no such classifier", "similar names"),
        ({"name": "vit_tiny_patch16_224", "image_size": 8}, "dataset.image_size=8|8 pixels", "dataset.image_size"),
    ],
)  # fmt: skip
def test_what_cannot_be_built_is_refused_with_what_to_do(changes, message, hint):
    given = {"name": "resnet10t", "num_classes": 10, "in_channels": 3, "image_size": 64, **changes}
    with pytest.raises(ConfigError, match=message) as caught:
        timm_classifier(**given)
    assert hint in caught.value.hint


@pytest.mark.process
def test_starting_listing_and_composing_import_no_library(tmp_path):
    code = (
        "import sys\nfrom mptrain.cli.main import main\nfrom mptrain.config.compose import compose\n"
        "for words in (['--help'], ['list', 'model'], ['help', 'model=timm']):\n    main(words)\n"
        "for name in ('timm', 'causal_lm', 'sequence_classifier'):\n    compose(['model=' + name])\n"
        "print([name for name in ('timm', 'transformers', 'huggingface_hub', 'safetensors') if name in sys.modules])"
    )
    (tmp_path / "look.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "look.py"], cwd=tmp_path, env=environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.slow
def test_compiled_networks_train(tmp_path):
    words = words_of_a_run("test_vit", "fp32", "train.compile=true", "threads=1")
    done = run_command(*words, cwd=tmp_path, timeout=280)
    assert done.returncode == 0, done.stderr
