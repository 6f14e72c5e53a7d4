"""A function of a dataclass of options is called, and described, by the fields of the dataclass."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import pytest

from mptrain.config.targets import Parameter, parameters
from mptrain.system.fields import PositiveInt
from mptrain.workloads.base.dataset import takes_fields_of


@dataclass(frozen=True, kw_only=True)
class General:
    size: PositiveInt = 3


@dataclass(frozen=True, kw_only=True)
class Special(General):
    size: PositiveInt = 4
    name: str


@takes_fields_of(Special)
def made(options: Special) -> tuple[str, int]:
    """Make something."""
    return options.name, options.size


def test_fields_are_given_by_keyword_and_have_their_defaults():
    assert made(name="a") == ("a", 4)
    assert made(name="a", size=5) == ("a", 5)
    with pytest.raises(TypeError, match="nosuch"):
        made(name="a", nosuch=1)


def test_configuration_reads_annotations_ranges_and_defaults():
    accepted, open_ended = parameters(made)
    assert accepted == {"size": Parameter(PositiveInt, required=False), "name": Parameter(str, required=True)}
    assert not open_ended
    assert inspect.signature(made).parameters["size"].default == 4


def test_it_keeps_its_name_and_place():
    assert (made.__name__, made.__module__, made.__doc__) == ("made", __name__, "Make something.")
