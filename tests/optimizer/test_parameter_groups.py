"""Groups of parameters, rates that fall from layer to layer, and frozen parameters: as torch's own param_groups train them."""

from __future__ import annotations

import copy
from collections import OrderedDict
from functools import partial

import pytest
import torch
from torch import nn

from mptrain.optimizer.parameter_groups import describe_options, freeze, layer_factors
from mptrain.system.errors import ConfigError
from mptrain.system.torch_private import BatchNorm
from tests.loops import each
from tests.optimizer.torch_by_hand import SMALL, kept_batches, train_by_hand
from tests.small_runs import TINY, continue_loop, loop_of, parts_of, run_in_process, steps_of, whole_and_resumed

#: The last matrix with its bias, and everything in blocks 3 and 4.
GROUPS = "optimizer.groups=[{match: [12.weight, 12.bias], lr_factor: 2, weight_decay: 0.3}, {match: '[34].*', lr_factor: 0.1}]"
#: The blocks of parameters of this network: convolutions and their normalisation, and a matrix.
BLOCKS = ["0", "1", "3", "4", "7", "8", "12"]

#: Optimizers of ours and torch's: their words, and how a loop by hand makes them of groups. Fused, as ours are: on CPUs
#: without AVX512 the other kernels round differently, and dozens of steps in FP16 make that visible.
OPTIMIZERS = {
    "sgd": (
        ("optimizer=sgd", "optimizer.weight_decay=0.1"),
        lambda groups: torch.optim.SGD(groups, momentum=0.9, fused=True),
    ),
    "adam": (
        ("optimizer=adam", "optimizer.weight_decay=0.1", "optimizer.lr=0.003"),
        partial(torch.optim.Adam, fused=True),
    ),
    "adamw": (
        ("optimizer=adamw", "optimizer.weight_decay=0.1", "optimizer.lr=0.003"),
        partial(torch.optim.AdamW, fused=True),
    ),
    "adagrad": (
        ("optimizer=adagrad", "optimizer.weight_decay=0.1", "optimizer.eps=1e-3"),  # the default magnifies roundings
        lambda groups: torch.optim.Adagrad(groups, eps=1e-3, fused=True),
    ),
    "RAdam": (("optimizer=torch", "optimizer.weight_decay=0.1", "optimizer.lr=0.01"), torch.optim.RAdam),
}


def grouped(masters, options):
    """Groups of torch with one parameter each, and the factors of their rates."""
    groups = [{"params": [p], "weight_decay": options(name, p)[1]} for name, p in masters.items()]
    return groups, [options(name, p)[0] for name, p in masters.items()]


def by_groups(name, parameter):
    """Factor and weight decay, as `GROUPS` says."""
    decay = 0.1 if parameter.ndim > 1 else 0.0
    if name.startswith("12."):
        return 2.0, 0.3
    return (0.1, decay) if name.startswith(("3.", "4.")) else (1.0, decay)


def by_depth(name, parameter):
    """Factor and weight decay with ``layer_decay=0.5``."""
    return 0.5 ** BLOCKS[::-1].index(name.split(".")[0]), 0.1 if parameter.ndim > 1 else 0.0


#: Ways to group: their words, and the options of each parameter.
WAYS = {
    "groups": ((GROUPS,), by_groups),
    "layer_decay": (("optimizer.layer_decay=0.5",), by_depth),
    "both": (
        (GROUPS, "optimizer.layer_decay=0.5"),
        lambda n, p: (by_groups(n, p)[0] * by_depth(n, p)[0], by_groups(n, p)[1]),
    ),
    "frozen": (("model.freeze=['0.*', '1.*', '3.weight']",), lambda n, p: (1.0, 0.1 if p.ndim > 1 else 0.0)),
}


PAIRS = [
    *((name, "groups") for name in OPTIMIZERS),
    ("sgd", "layer_decay"),
    ("adamw", "both"),
    ("RAdam", "both"),
    ("adam", "frozen"),
]


@pytest.mark.long
@pytest.mark.parametrize(("name", "way"), PAIRS)
def test_fifty_steps_equal_torchs_groups_by_hand(name, way, tmp_path, monkeypatch):
    words, maker = OPTIMIZERS[name]
    more, options = WAYS[way]
    words = (*SMALL, *words, *more, "precision=amp_dynamic", "train.max_steps=50")
    parts, _ = parts_of(*words)
    before = {key: value.detach().clone() for key, value in parts.model.named_parameters()}
    factors = []

    def optimizers_of(masters):
        groups, found = grouped(masters, options)
        factors.extend(found)
        return [maker(groups)]

    batches = kept_batches(monkeypatch)
    loop = loop_of(tmp_path, *words, "inject.step=20", "inject.tensor=gradient:12.bias")
    loop.run()
    expected, updates = train_by_hand(parts, batches, optimizers_of, scale=2.0**16, overflows=(20,), factors=factors)
    assert updates == 49
    found = dict(loop.parts.model.named_parameters())
    for key, value in expected.items():
        assert not torch.equal(value, before[key])
        # of how far the weights have moved: Adam magnifies the last bit of gradients that are nearly zero
        moved, off = torch.linalg.vector_norm(value - before[key]), torch.linalg.vector_norm(found[key] - value)
        assert off <= 3e-3 * moved, (key, off / moved)
        if name == "RAdam":  # which is torch's own
            assert torch.equal(found[key], value), key
    for key in before.keys() - expected.keys():
        assert torch.equal(found[key], before[key])
    assert (len(before) - len(expected)) == (4 if way == "frozen" else 0)


@pytest.mark.parametrize("name", ["sgd", "RAdam"])
def test_a_run_with_groups_and_frozen_layers_resumes_bit_for_bit(name, tmp_path):
    words = (*SMALL, *OPTIMIZERS[name][0], GROUPS, "optimizer.layer_decay=0.9", "model.freeze=['0.*', '1.*']")
    whole, resumed = whole_and_resumed(tmp_path, *words, "train.epochs=2", after=7)
    assert resumed.notes == []
    assert [row["loss"] for row in steps_of(whole)] == [row["loss"] for row in steps_of(resumed)]
    for key, value in whole.parts.model.state_dict().items():
        assert torch.equal(value, resumed.parts.model.state_dict()[key]), key


class Named(nn.Module):
    """Modules by name, in order."""

    def __init__(self, **modules):
        super().__init__()
        for name, module in modules.items():
            setattr(self, name, module)


def blocks(count):
    return [nn.Linear(2, 2, bias=False) for _ in range(count)]


def factors_of(model):
    return {
        name.removesuffix(".weight"): factor
        for name, factor in layer_factors(model, list(dict(model.named_parameters())), 0.5).items()
    }


def test_the_last_layer_has_the_whole_rate_and_the_first_the_least():
    model = Named(stem=blocks(1)[0], layers=nn.ModuleList(blocks(2)), head=blocks(1)[0])
    assert factors_of(model) == {"stem": 0.125, "layers.0": 0.25, "layers.1": 0.5, "head": 1.0}


def test_the_entries_of_the_outermost_list_of_modules_are_layers():
    one, other = (nn.ModuleDict({"attention": blocks(1)[0], "mlp": nn.Sequential(*blocks(2))}) for _ in range(2))
    model = Named(encoder=nn.Sequential(OrderedDict(layer_0=one, layer_1=other)), head=blocks(1)[0])
    names = [f"encoder.layer_{index}.{part}" for index in (0, 1) for part in ("attention", "mlp.0", "mlp.1")]
    assert factors_of(model) == dict(zip(names, [0.25] * 3 + [0.5] * 3, strict=True)) | {"head": 1.0}


def test_a_norm_behind_the_layers_of_its_block_is_a_layer_above_them():
    first, norm = blocks(2)
    body = Named(embedding=first, layers=nn.ModuleList(blocks(2)), norm=norm)
    expected = {"body.embedding": 0.0625, "body.layers.0": 0.125, "body.layers.1": 0.25, "body.norm": 0.5, "head": 1.0}
    assert factors_of(Named(body=body, head=blocks(1)[0])) == expected


class Wrapped(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net


@pytest.mark.parametrize("wrapped", [False, True])
def test_layers_of_a_model_of_timm_are_those_that_it_names(wrapped):
    timm, optim = pytest.importorskip("timm"), pytest.importorskip("timm.optim")
    net = timm.create_model("vit_tiny_patch16_224", num_classes=3, depth=2, img_size=32)
    model, prefix = (Wrapped(net), "net.") if wrapped else (net, "")
    factors = layer_factors(model, [name for name, _ in model.named_parameters()], 0.5)
    groups = optim.param_groups_layer_decay(net, layer_decay=0.5)
    theirs = {id(p): group["lr_scale"] for group in groups for p in group["params"]}
    assert {name.removeprefix(prefix): factor for name, factor in factors.items()} == {
        name: theirs[id(p)] for name, p in net.named_parameters()
    }
    assert factors[f"{prefix}pos_embed"] == 0.125


@each(
    ("words", "what", "hint"),
    [
        (("optimizer.groups=[{match: 12.wight}]",), "'12.wight' matches no parameter", "12.weight"),
        (("optimizer.groups=[{match: ['12.*', 'zzz']}]",), "'zzz' matches no", "0.weight"),
        (("model.freeze=['12']",), "'12' matches no parameter", "12.*"),
        (("model.freeze=['*']",), "no parameter of the model is trainable", "unfreeze"),
    ],
)
def test_a_pattern_that_matches_nothing_is_an_error(words, what, hint):
    with pytest.raises(ConfigError) as caught:
        parts_of(*SMALL, *words)
    assert what in str(caught.value)
    assert hint in caught.value.hint


def test_a_group_has_no_weight_decay_where_the_optimizer_has_none():
    words = ("optimizer=torch", "optimizer.name=Rprop", "optimizer.groups=[{match: '12.*', weight_decay: 0.1}]")
    with pytest.raises(ConfigError, match=r"optimizer.groups.0.weight_decay=0.1: torch.optim.Rprop"):
        parts_of(*SMALL, *words)


def test_weights_that_are_no_longer_frozen_join_the_average_as_they_are(tmp_path):
    words = (*SMALL, "train.ema_decay=0.9")
    loop = loop_of(tmp_path, *words, "model.freeze=['0.*']", "train.epochs=1")
    loop.run()
    averages = {name: value.clone() for name, value in loop.parts.averages().items()}
    resumed = continue_loop(loop, *words, "train.epochs=2")
    found = resumed.parts.averages()
    assert torch.equal(found.pop("0.weight"), loop.parts.model.state_dict()["0.weight"])
    assert all(torch.equal(value, averages[name]) for name, value in found.items())
    resumed.run()


def test_batch_norm_with_frozen_statistics_keeps_them_and_so_do_its_copies():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.BatchNorm2d(2, affine=False), nn.BatchNorm2d(2))
    freeze(model, ["1.weight", "1.bias", "2.*"])
    assert [module.training for module in model.train() if isinstance(module, BatchNorm)] == [True, False, True]
    assert [p.requires_grad for p in model[1].parameters()] == [False, False]
    for net in (model, copy.deepcopy(model)):
        before = net[2].running_mean.clone()
        net.train()(torch.randn(4, 1, 8, 8))
        assert torch.equal(net[2].running_mean, before)
        assert not torch.equal(net[1].running_mean, before)  # whose parameters alone were named
        assert not torch.equal(net[3].running_mean, before)


@pytest.mark.parametrize("precision", ["amp_dynamic", "fp16_pure"])
def test_a_frozen_beginning_remains_the_function_that_it_was(precision, tmp_path):
    loop = loop_of(tmp_path, *SMALL, "model.freeze=['0.*', '1.*']", f"precision={precision}", "train.epochs=1")
    images = loop.parts.prepare(loop.parts.dataset.val.fetch([0, 1], 0, 0)).inputs
    before = loop.parts.model[:2].train()(images)
    loop.run()
    assert torch.equal(loop.parts.model[:2].train()(images), before)
    (record,) = [r for r in loop.telemetry.sink.sinks[-1].records if getattr(r, "kind", "") == "untrained"]
    assert record.fields["frozen"] == ["0.weight", "1.weight", "1.bias"]


@pytest.mark.parametrize("precision", ["fp16_dynamic", "fp16_pure"])
def test_frozen_weights_are_saved_as_they_were_before_they_were_rounded(precision, tmp_path):
    drawn = parts_of(*SMALL, "precision=fp32")[0].model.state_dict()["0.weight"]
    words = (*SMALL, f"precision={precision}")
    loop = loop_of(tmp_path, *words, "model.freeze=['0.*']", "train.epochs=1")
    loop.run()
    assert torch.equal(loop.parts.model.state_dict()["0.weight"], drawn.half())
    again = continue_loop(loop, *words, "model.freeze=['0.*']", "train.epochs=2")
    again.run()
    assert torch.equal(again.storage.store.load_latest().state["model"]["0.weight"], drawn)
    if precision == "fp16_dynamic":  # which has master weights
        unfrozen = continue_loop(again, *words, "train.epochs=3")
        assert torch.equal(unfrozen.parts.full_precision()["0.weight"], drawn)


def test_the_header_tells_of_groups_and_of_what_is_trained(tmp_path):
    words = (*SMALL, "train.max_steps=1", "model.freeze=['0.*']", GROUPS, "optimizer.weight_decay=0.1")
    printed = run_in_process(*words, cwd=tmp_path).stdout
    assert "  groups      3 learning rates, x0.1 to x2 of the schedule's; weight decays 0, 0.1, 0.3\n" in printed
    assert " parameters, 458 trainable\n" in printed
    assert "  groups " not in run_in_process(*TINY, "train.max_steps=1", cwd=tmp_path).stdout
    assert describe_options([(0.5, 0.0)]) == "learning rate x0.5; weight decay 0"
