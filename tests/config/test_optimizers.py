"""Optimizers of torch and timm in a configuration: found by name, checked against their classes, or refused with the reason."""

from __future__ import annotations

import sys

import pytest
import torch

from mptrain.config.compose import compose, reload
from mptrain.optimizer.torch_rule import ELEMENTWISE, adapt, timm_optimizer, torch_optimizer
from mptrain.run.build.parallelism import check_parallelism
from mptrain.system.errors import ConfigError, EnvironmentRefused
from tests.loops import each

TORCH, TIMM = "optimizer=torch", "optimizer=timm"


def rule_of(*words):
    return compose(words).optimizer.build()


def test_a_name_and_the_arguments_of_its_class():
    rule = rule_of(TORCH, "optimizer.name=NAdam", "optimizer.betas=[0.8,0.99]", "optimizer.lr=1")
    assert (rule.kind, rule.lr, rule.weight_decay) == (torch.optim.NAdam, 1.0, 0.0)
    assert rule.arguments == {"betas": (0.8, 0.99), "lr": 1}
    assert not rule.decay_norms_and_biases


def test_a_name_of_timm_implies_what_it_implies_there():
    assert rule_of(TIMM, "optimizer.name=clion").arguments == {"caution": True}
    assert rule_of(TIMM, "optimizer.name=sgd").arguments == {"momentum": 0.9, "nesterov": True}
    assert rule_of(TIMM, "optimizer.name=sgd", "optimizer.momentum=0.5").arguments["momentum"] == 0.5
    assert rule_of(TIMM, "optimizer.name=adamuon").arguments == {"momentum": 0.9, "algo": "adamuon"}


def test_a_target_of_torch_or_timm_needs_no_permission():
    rule = rule_of(TORCH, "optimizer._target_=torch.optim.RMSprop", "+optimizer.alpha=0.9")
    assert (rule.kind, rule.arguments) == (torch.optim.RMSprop, {"alpha": 0.9})
    assert rule_of(TORCH, "optimizer._target_=timm.optim.Adan").name == "timm.optim.Adan"


OWN = """
import torch


class Signs(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.sign_()
        return super().step(closure)


def make(params, lr: float = 0.5, **more):
    return Signs(params, lr=lr, **more)


def no_optimizer(params):
    return list(params)
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "signs_of_mine.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mine" / "optimizer").mkdir(parents=True)

    def composed(target, *words, keys=""):
        (tmp_path / "mine" / "optimizer" / "signs.yaml").write_text(f"_target_: signs_of_mine.{target}\n{keys}")
        allow = "extensions.allow=[signs_of_mine]"
        return compose(["optimizer=signs", allow, *words], config_dirs=[tmp_path / "mine"])

    return composed


def test_a_class_or_function_of_ones_own(own):
    rule = own("Signs", "optimizer.momentum=0.5", keys="lr: 0.25\n").optimizer.build()
    assert (rule.name, rule.lr, rule.arguments) == ("signs_of_mine.Signs", 0.25, {"lr": 0.25, "momentum": 0.5})
    rule = own("make", "optimizer.momentum=0.75").optimizer.build()
    assert (rule.name, rule.lr, rule.arguments) == ("signs_of_mine.Signs", 0.5, {"momentum": 0.75})
    assert not rule.elementwise  # nobody has said so
    with pytest.raises(ConfigError, match=r"unknown key 'optimizer\.momentun'"):
        own("Signs", "optimizer.momentun=0.5")
    with pytest.raises(ConfigError, match="returned a list, not a torch"):
        own("no_optimizer")


GRAPH, HALF_STATE = "train.engine=graph", "precision.optimizer_state=parameters"


@each(
    ("words", "what", "hint"),
    [
        ((TORCH, "optimizer.name=RAdm"), "torch.optim has no optimizer RAdm", "did you mean optimizer.name=RAdam?"),
        ((TORCH, "optimizer.name=Optimizer"), "torch.optim has no optimizer Optimizer", "its optimizers are ASGD"),
        ((TORCH, "optimizer.name=lr_scheduler"), "torch.optim has no optimizer lr_scheduler", "its optimizers"),
        ((TORCH, "optimizer.name=null"), "optimizer.name=null: must be the name of an optimizer", "set optimizer.name"),
        ((TIMM, "optimizer.name=lino"), "timm has no optimizer lino", "did you mean optimizer.name=lion?"),
        ((TIMM, "optimizer.name=fusedadam"), "apex.optimizers.FusedAdam", "extensions.allow=[apex]"),
        ((TORCH, "optimizer.beta=[0.9,0.99]"), "unknown key 'optimizer.beta': torch.optim.RAdam", "optimizer.betas="),
        ((TORCH, "optimizer.betas=[0.9,1.5]"), "torch.optim.RAdam rejects its arguments", "it takes lr, betas"),
        ((TORCH, "optimizer.nothing=1"), "unknown key 'optimizer.nothing': torch.optim.RAdam", "it takes lr, betas"),
        ((TORCH, "optimizer.param_groups=[]"), "unknown key 'optimizer.param_groups'", "optimizer.groups=[]?"),
        (
            (TORCH, "optimizer.decay_norms_and_biases=3"),
            "optimizer.decay_norms_and_biases=3: must be true or false",
            "",
        ),
        ((TORCH, "optimizer.name=LBFGS"), "torch.optim.LBFGS evaluates the loss several times", "choose another"),
        ((TORCH, "optimizer.name=SparseAdam"), "torch.optim.SparseAdam takes sparse gradients only", "choose another"),
        ((TIMM, "optimizer.name=adahessian"), "timm.optim.Adahessian needs second derivatives", "choose another"),
        ((TIMM, "optimizer.name=adafactor"), "timm.optim.Adafactor sets its own learning rate", "set optimizer.lr"),
        (("optimizer._target_=torch.optim.swa_utils.update_bn", TORCH), "it takes no params", "name a class"),
        ((TORCH, GRAPH), "train.engine=graph with torch.optim.RAdam", "set train.engine=eager"),
        ((TORCH, "precision=fp16_pure", HALF_STATE), f"{HALF_STATE} in float16 with torch.optim.RAdam", "float32"),
        (("optimizer.groups=[{mach: a}]",), "unknown key 'optimizer.groups.0.mach'", "optimizer.groups.0.match"),
        (("optimizer._target_=torch.optim.RAdam", "optimizer.groups=[{match: 3}]"), "optimizer.groups.0.match=3", ""),
        (("optimizer.groups=[{match: a, lr_factor: -1}]",), "optimizer.groups.0.lr_factor=-1: must be a number", ""),
        (("optimizer.groups=[3]",), "optimizer.groups.0=3: must be a mapping", ""),
        (("optimizer.layer_decay=1.5",), "optimizer.layer_decay=1.5: must be a number above 0 and at most 1", ""),
        (("model.freeze=layers.*",), "model.freeze=layers.*: must be a list", "write model.freeze=[layers.*]"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_built(words, what, hint):
    with pytest.raises(ConfigError) as caught:
        compose(words)
    assert what in str(caught.value)
    assert hint in caught.value.problems[0].hint


class KeepsTwo(torch.optim.SGD):
    def train(self):
        """Go back to the weights that are trained."""

    def eval(self):
        """Use the averaged weights."""


def test_an_optimizer_with_weights_of_its_own_for_evaluation_is_refused():
    with pytest.raises(ConfigError, match="keeps other weights for evaluation"):
        adapt(KeepsTwo, {"lr": 0.1})


GROUPS = "optimizer.groups=[{match: ['a.*', b], lr_factor: 0.5}, {match: c, weight_decay: 0}]"


def test_a_saved_configuration_says_the_same_and_can_be_changed():
    words = (TORCH, "optimizer.name=NAdam", "optimizer.betas=[0.8,0.9]", GROUPS, "optimizer.layer_decay=0.75")
    config = compose((*words, "model.freeze=[a.*]"))
    again = reload(config.yaml)
    assert again.yaml == config.yaml
    assert (again.optimizer, again.freeze) == (config.optimizer, ("a.*",))
    assert again.optimizer.build() == config.optimizer.build()
    assert again.optimizer.options["groups"][0].patterns == ("a.*", "b")
    changed = reload(config.yaml, ["optimizer.weight_decay=0.5", "optimizer.layer_decay=null", "optimizer.groups=[]"])
    assert changed.optimizer.build().weight_decay == 0.5
    assert changed.optimizer.options == {}
    other = reload(config.yaml, ["optimizer.name=Adamax"])
    assert other.optimizer.build().kind is torch.optim.Adamax


def test_a_learner_of_its_own_has_what_the_others_have_and_what_it_says():
    words = ("model=dcgan", TORCH, "optimizer.lr=0.5", GROUPS)
    own = ("learners.generator.optimizer.name=NAdam", "learners.generator.optimizer.momentum_decay=0.1")
    config = compose([*words, *own, "learners.discriminator.optimizer.layer_decay=0.5"])
    generator, discriminator = (config.for_learner(name).optimizer for name in ("generator", "discriminator"))
    assert generator.build().arguments == {"lr": 0.5, "momentum_decay": 0.1}
    assert (generator.build().kind, discriminator.build().kind) == (torch.optim.NAdam, torch.optim.RAdam)
    assert set(generator.options) == {"groups"}
    assert set(discriminator.options) == {"groups", "layer_decay"}


@each(
    ("words", "sharded", "what"),
    [
        ((TORCH,), True, ""),
        ((TIMM,), True, ""),
        ((TORCH, "optimizer.name=Muon"), False, ""),
        ((TORCH, "optimizer.name=Muon"), True, "distributed=fsdp2 with torch.optim.Muon"),
        ((TIMM, "optimizer.name=lamb"), True, "distributed=fsdp2 with timm.optim.Lamb"),
        ((TIMM, "optimizer.name=clion"), True, "distributed=fsdp2 with timm.optim.Lion"),
        ((TORCH, "optimizer.name=Adafactor"), True, "distributed=fsdp2 with torch.optim.Adafactor"),
        ((TIMM, "optimizer.name=nadamw", "optimizer.clipping_threshold=1.0"), True, "with timm.optim.NAdamW"),
    ],
)
def test_only_optimizers_of_single_elements_are_for_shards(words, sharded, what):
    config = compose([*words, f"distributed={'fsdp2' if sharded else 'ddp'}", "distributed.procs=2"])
    check_parallelism(config, 1)
    if not what:
        return check_parallelism(config, 2)
    with pytest.raises(ConfigError, match=what):
        check_parallelism(config, 2)
    return None


def test_random_updates_are_for_one_rank_unless_all_ranks_draw_the_same(monkeypatch):
    monkeypatch.setattr("timm.optim.kron.has_opt_einsum", True)  # which it warns of
    check_parallelism(compose([TIMM, "optimizer.name=kron"]), 1)
    with pytest.raises(ConfigError, match="Kron on several ranks"):
        check_parallelism(compose([TIMM, "optimizer.name=kron"]), 2)
    check_parallelism(compose([TIMM, "optimizer.name=kron", "optimizer.deterministic=true"]), 2)


def test_every_optimizer_of_single_elements_is_one():
    """Half of a tensor, updated alone, is half of the updated tensor."""
    import timm.optim

    for name in ELEMENTWISE:
        package, kind = name.split(".")[0], name.rpartition(".")[2]
        rule = adapt(
            torch_optimizer(kind)[0] if package == "torch" else getattr(timm.optim, kind),
            {"lr": 0.01, "weight_decay": 0.1} if kind != "Rprop" else {},
        )
        assert rule.elementwise, name
        whole = torch.nn.Parameter(torch.linspace(-1, 1, 24).view(6, 4))
        part = torch.nn.Parameter(whole.detach()[:3].clone())
        empty = torch.nn.Parameter(torch.zeros(0, 4))
        one, other = rule.kind([whole], **rule.arguments), rule.kind([part, empty], **rule.arguments)
        for step in range(8):
            whole.grad = torch.randn(6, 4, generator=torch.Generator().manual_seed(step))
            part.grad, empty.grad = whole.grad[:3].clone(), torch.zeros(0, 4)
            one.step()
            other.step()
        torch.testing.assert_close(whole.detach()[:3], part.detach(), rtol=1e-6, atol=1e-7, msg=name)


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    monkeypatch.setitem(sys.modules, "timm.optim", None)
    with pytest.raises(EnvironmentRefused) as caught:
        timm_optimizer("lion")
    assert "optimizer=timm needs the package timm" in str(caught.value)
    assert caught.value.hint == "pip install 'mptrain[timm]'"
