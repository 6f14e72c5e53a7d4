import sys

import pytest

from mptrain.config.allowed_targets import MOVED, PACKAGES, resolve
from mptrain.config.catalogue import Catalogue, configs_folder
from mptrain.config.targets import FACTS, Target, facts_in, parameters
from mptrain.system.errors import ConfigError
from tests.loops import each

MODULE = """
from __future__ import annotations
import dataclasses, functools, os, subprocess
from os import system
from dataclasses import replace as imported
from mptrain.system.errors import ConfigError, Problem
from mptrain.system.fields import PositiveInt

def net(width: PositiveInt, num_classes: int, dropout: float = 0.0):
    return ("net", width, num_classes, dropout)

def open_ended(**options):
    return options

def picky(width: int):
    raise ValueError("width must suit the moon")

@dataclasses.dataclass(frozen=True)
class Rule:
    low: PositiveInt = 1
    high: PositiveInt = 2
    def __post_init__(self):
        if self.low > self.high:
            raise ConfigError([Problem("low is above high", "swap them")])

@dataclasses.dataclass(frozen=True)
class Grumpy:
    x: int = 0
    def __post_init__(self):
        raise ValueError("not today")

shortcut = functools.partial(net, 3)
_hidden = net
"""


@pytest.fixture
def extension(tmp_path, monkeypatch):
    (tmp_path / "extension_parts.py").write_text(MODULE)
    (tmp_path / "extension_broken.py").write_text("import package_that_nobody_has\n")
    (tmp_path / "extension_raising.py").write_text("raise RuntimeError('no luck')\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield ("extension_parts.*", "extension_broken", "extension_raising")
    for name in ("extension_parts", "extension_broken", "extension_raising"):
        sys.modules.pop(name, None)


@each(
    "path",
    [
        "os.system", "builtins.eval", "subprocess.run", "mptrainevil.x", "torch.load", "torch.hub.load",
        "torchvision.io.write_png", "torchvision.datasets.utils.extract_archive",
        "torchvision.datasets.utils.download_url",
    ],
)  # fmt: skip
def test_a_target_outside_the_allow_list_is_refused_and_not_imported(path):
    with pytest.raises(
        ConfigError, match=r"not in an allowed package \(mptrain.workloads.[*].models.[*], torchvision.models.*\)"
    ) as caught:
        resolve(path, PACKAGES["model"])
    package = path.split(".")[0]
    told = f"extensions.allow=[{package}.*]" in caught.value.hint
    assert told != (package in sys.stdlib_module_names)
    assert "mptrainevil" not in sys.modules


PARTS = "cli campaign runlog config report engine compare diagnostics precision"
FUNCTIONS = ["mptrain.cli.main.main", "mptrain.runlog.atomic_files.write_atomically", "mptrain.system.records.as_json"]


@each("path", [*FUNCTIONS, *(f"mptrain.{part}.main.main" for part in PARTS.split())])
def test_no_group_admits_what_mptrain_itself_is_made_of(path):
    for packages in PACKAGES.values():
        with pytest.raises(ConfigError, match="not in an allowed package") as caught:
            resolve(path, packages)
        assert caught.value.hint == f"name a class or function of {' or '.join(packages)}"


def test_a_part_of_one_group_is_none_of_another():
    resolve("mptrain.scaler.NoScaler", PACKAGES["scaler"])
    with pytest.raises(ConfigError, match="not in an allowed package"):
        resolve("mptrain.scaler.NoScaler", PACKAGES["optimizer"])


@each(
    "path",
    [
        "mptrain.cli.os.system", "mptrain.cli.main.os", "mptrain.cli.main.sys.exit", "mptrain.system.errors.difflib",
        "mptrain.config.allowed_targets.importlib.import_module", "mptrain.config.targets.dataclass",
        "mptrain.config.yaml_files.Path", "mptrain.system.errors.MptrainError.__init__.__globals__",
        "mptrain.system.errors.MptrainError.with_traceback", "mptrain.system.errors.__builtins__",
        "mptrain.system.errors.EXIT_OK", "mptrain", "", "..", "mptrain.system.errors.",
        "mptrain.system.errors.did you mean",
    ],
)  # fmt: skip
def test_no_attribute_leads_out_of_the_allowed_packages(path):
    with pytest.raises(ConfigError):
        resolve(path, ("mptrain.*",))


def test_what_an_extension_imported_from_elsewhere_is_refused(extension):
    with pytest.raises(ConfigError, match=r"is defined as dataclasses.replace") as caught:
        resolve("extension_parts.imported", extension)
    assert "not in an allowed package" in str(caught.value)
    with pytest.raises(ConfigError, match=r"is a builtin_function_or_method"):
        resolve("extension_parts.system", extension)


def test_only_classes_and_functions_are_targets(extension):
    with pytest.raises(ConfigError, match=r"is a partial, not a class or function"):
        resolve("extension_parts.shortcut", extension)
    with pytest.raises(ConfigError, match=r"private"):
        resolve("extension_parts._hidden", extension)


def test_an_extension_is_allowed_by_name_or_pattern(extension):
    assert resolve("extension_parts.net", ("extension_parts",)) is resolve("extension_parts.net", extension)
    with pytest.raises(ConfigError, match=r"not in an allowed package"):
        resolve("extension_parts.net", ("extension_part.*",))


def test_a_misspelt_target_is_answered_with_the_nearest_name():
    with pytest.raises(ConfigError, match=r"has no 'DynamicScalr'") as caught:
        resolve("mptrain.scaler.DynamicScalr", PACKAGES["scaler"])
    assert caught.value.hint == "did you mean mptrain.scaler.DynamicScaler?"


def test_what_was_tried_is_said_when_an_import_fails(extension):
    with pytest.raises(ConfigError, match=r"importing mptrain.workloads.gan.models.nowhere failed"):
        resolve("mptrain.workloads.gan.models.nowhere.Thing", PACKAGES["model"])
    with pytest.raises(ConfigError) as caught:
        resolve("extension_broken.Thing", extension)
    assert caught.value.hint == "install package_that_nobody_has, which extension_broken needs"
    with pytest.raises(ConfigError, match=r"importing extension_raising failed: RuntimeError: no luck"):
        resolve("extension_raising.Thing", extension)


def test_all_wrong_arguments_are_reported_together(extension):
    target = Target("extension_parts.net", {"width": 0, "dropout": "much", "widht": 3}, extension)
    with pytest.raises(ConfigError) as caught:
        target.check("model")
    problems = {problem.what: problem.hint for problem in caught.value.problems}
    assert "model.width=0: must be a whole number, at least 1" in problems
    assert "model.dropout=much: must be a number" in problems
    unknown = "unknown key 'model.widht': extension_parts.net has no such argument"
    assert problems[unknown] == "did you mean model.width=3?"


def test_a_missing_argument_is_a_problem_unless_the_program_knows_it(extension):
    with pytest.raises(ConfigError, match=r"model.width is required"):
        Target("extension_parts.net", {}, extension).check("model")
    assert "num_classes" in FACTS["model"]


def test_build_passes_the_facts_that_are_accepted_and_not_given(extension):
    target = Target("extension_parts.net", {"width": 4}, extension).check("model")
    assert target.build(num_classes=10, image_size=8) == ("net", 4, 10, 0.0)
    given = Target("extension_parts.net", {"width": 4, "num_classes": 3}, extension)
    assert given.build(num_classes=10) == ("net", 4, 3, 0.0)


def test_a_target_that_takes_any_keywords_gets_only_the_facts_that_it_was_told_to_take(extension):
    facts = {"num_classes": 10, "in_channels": 3}
    plain = Target("extension_parts.open_ended", {"a": 1}, extension)
    assert plain.build(**facts) == {"a": 1}
    told = Target("extension_parts.open_ended", {"a": 1}, extension, facts={"classes": "num_classes"})
    assert told.check("model").build(**facts) == {"a": 1, "classes": 10}
    renamed = Target("extension_parts.net", {}, extension, facts={"width": "in_channels"})
    assert renamed.check("model").build(**facts) == ("net", 3, 10, 0.0)
    with pytest.raises(ConfigError, match=r"model.facts names depth, but extension_parts.net has no such argument"):
        Target("extension_parts.net", {"width": 1}, extension, facts={"depth": "in_channels"}).check("model")


def test_a_value_error_while_building_is_a_configuration_error(extension):
    with pytest.raises(ConfigError, match=r"width must suit the moon"):
        Target("extension_parts.picky", {"width": 1}, extension).build()


def test_what_a_dataclass_says_about_its_fields_together_is_reported(extension):
    with pytest.raises(ConfigError, match=r"low is above high"):
        Target("extension_parts.Rule", {"low": 3}, extension).check("scaler")
    with pytest.raises(ConfigError, match=r"scaler: not today"):
        Target("extension_parts.Grumpy", {}, extension).check("scaler")
    assert Target("extension_parts.Rule", {"low": 2}, extension).check("scaler").arguments == {"low": 2}
    assert Target("extension_parts.Grumpy", {}, extension).check("dataset").path == "extension_parts.Grumpy"


def _shipped_targets():
    for group, options in Catalogue([configs_folder()]).groups.items():
        for option in options.values():
            for entry in option.entries:
                if entry.key.endswith("_target_"):
                    yield group, entry.value


@each(("group", "path"), list(_shipped_targets()))
def test_every_shipped_target_exists_and_annotates_all_its_arguments(group, path):
    accepted, open_ended = parameters(resolve(path, PACKAGES[group]))
    assert not open_ended
    for name, parameter in accepted.items():
        assert parameter.annotation is not None, f"{path}.{name}"
        assert not parameter.required or name in FACTS.get(group, ()) or name in _given(group, path)


def _given(group, path):
    for option in Catalogue([configs_folder()]).groups[group].values():
        if any(entry.value == path for entry in option.entries):
            yield from (entry.key.rpartition(".")[2] for entry in option.entries)


@each("old", sorted(MOVED))
def test_a_saved_configuration_names_what_has_moved(old):
    group = PACKAGES["diagnostics"]
    assert resolve(old, group) is resolve(MOVED[old], group)


def test_facts_that_older_versions_did_not_write_follow_from_others():
    old = {"name": "digits", "labels": ["0"], "num_classes": 10, "in_channels": 1, "image_size": 8}
    known = {"num_classes": 10, "in_channels": 1, "image_size": 8}
    assert facts_in(old) == {**known, "num_outputs": 10, "input_shape": (1, 8, 8)}
    assert facts_in({"num_classes": 4, "num_outputs": 2, "output_names": ["a", "b"], "input_shape": [5]}) == {
        "num_classes": 4, "num_outputs": 2, "output_names": ("a", "b"), "input_shape": (5,),
    }  # fmt: skip
    assert facts_in({"in_channels": 3, "upscale": 2}) == {"in_channels": 3, "upscale": 2}
