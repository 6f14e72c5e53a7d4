"""Sizes that files of models state are those of the networks that they build, with the facts that the line names.

The second comment line of such a file is ``# Size: N parameters with FACTS.`` (or ``in``, or ``for``); where a model is
several networks, N is their numbers with a plus between them. Behind the facts may stand what else there is to say. A
family adds its words to `FACTS`.
"""

from __future__ import annotations

import re

import pytest
import torch

from mptrain.config.catalogue import Catalogue, configs_folder
from mptrain.config.compose import compose
from tests.loops import each

SIZE = re.compile(r"# Size: (?P<count>[\d,]+(?: \+ [\d,]+)*) parameters (?P<facts>(?:with|in|for) .+)\.")


def number(text):
    return int(text.replace(",", ""))


def images(classes, channels, side):
    return {"num_classes": number(classes), "in_channels": 1 if channels == "1x" else 3, "image_size": int(side)}


def pictures(colour, side):
    return {"in_channels": 1 if colour == "grey" else 3, "image_size": int(side)}


def tokens(source, target=None, shared=False):
    sizes = {"source_vocabulary_size": number(source), "target_vocabulary_size": number(target or source)}
    return {**sizes, "shared_vocabulary": shared}


TIMES = {"twice": 2, "four times": 4}


def texts(size, **others):
    return {"vocabulary_size": number(size), "sequence_length": 64, **others}


def recordings(levels, speakers):
    return {"levels": int(levels), "speakers": int(speakers) if (speakers or "no") != "no" else 0}


def speech(numbers, letters):
    return {"feature_size": int(numbers), "vocabulary_size": int(letters) + 1}  # and the blank


#: What the words of a size line mean to the network: how they begin, and the facts that follow from what was found.
FACTS = {
    r"with ([\d,]+) classes of (1x|3x)?(\d+)x\3\b": images,
    r"with the (90) class numbers of (COCO)": lambda classes, _: images(classes, "3x", 300),
    r"with (grey|colour) pictures of (\d+)x\2\b": pictures,
    r"in (grey|colour)\b": lambda colour: pictures(colour, 64),
    r"for pictures (twice|four times) as large": lambda times: {"in_channels": 3, "upscale": TIMES[times]},
    r"with (\d+) classes of texts in a vocabulary of ([\d,]+)": lambda classes, size: texts(
        size, num_classes=int(classes)
    ),
    r"with a vocabulary of ([\d,]+)": lambda size: texts(size, lanes=0),
    r"with a shared vocabulary of ([\d,]+)": lambda size: tokens(size, shared=True),
    r"with ([\d,]+) tokens on each side": tokens,
    r"with ([\d,]+) and ([\d,]+) tokens": tokens,
    r"with (\d+) (?:bands|frequencies)(?: \([^)]*\))? and (\d+) letters": speech,
    r"with (\d+) levels(?:,? (?:and )?(\d+|no) speakers)?": recordings,
}


def facts_of(words):
    for pattern, facts in FACTS.items():
        if found := re.match(pattern, words):
            return facts(*found.groups())
    raise AssertionError(f"say in FACTS of tests/config/test_sizes.py what '{words}' means")


CATALOGUE = Catalogue([configs_folder()])
MODELS, DATASETS = CATALOGUE.groups["model"], CATALOGUE.groups["dataset"]

#: Parameters as the literature has them. torchvision's documentation counts what its pretrained weights have, which for
#: GoogLeNet is without its auxiliary heads (6,624,904). Inception v2: the 11,295,240 of Caffe's and MXNet's
#: BN-Inception without the biases of its 10,016 filters.
PUBLISHED = {
    "alexnet": 61_100_840,
    "vgg16": 138_357_544,
    "googlenet": 6_624_904 + 6_379_984,
    "inception_v2": 11_295_240 - 10_016,
    "inception_v3": 27_161_264,
    "resnet18": 11_689_512,
    "resnet50": 25_557_032,
    "resnext50_32x4d": 25_028_904,
    "torchvision": 7_978_856,  # densenet121
}


def comment(option, kind):
    """The one comment line of this kind at the top of a file."""
    (line,) = [line for line in option.lines if line.startswith(f"# {kind}:")]
    return line


def stated(option):
    """Number and words of a file's size line; the sum where it is of several networks."""
    found = SIZE.fullmatch(comment(option, "Size"))
    assert found, f"{option.path}: not of the form '# Size: N parameters with FACTS.'"
    return sum(number(part) for part in found["count"].split(" + ")), found["facts"]


@pytest.mark.slow
@each("name", MODELS)
def test_a_model_has_as_many_parameters_as_its_file_says(name):
    count, words = stated(MODELS[name])
    facts = facts_of(words)
    with torch.device("meta"):
        model = compose((f"model={name}",)).model.build(**facts)
    assert sum(parameter.numel() for parameter in model.parameters()) == count


@each("name", PUBLISHED)
def test_published_classifiers_have_the_literatures_number_of_parameters(name):
    assert stated(MODELS[name])[0] == PUBLISHED[name]


@each("option", [*MODELS.values(), *DATASETS.values()])
def test_models_and_data_say_their_size_and_what_they_need_below_what_they_are(option):
    lines = [line for line in option.lines if "@package" not in line][:3]
    assert lines[1:] == [comment(option, "Size"), comment(option, "Needs")]
    assert all(line.endswith(".") for line in lines)


def test_a_size_line_in_other_words_is_found(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("# Mine.\n# Size: about 3 million parameters.\n_target_: mine.Net\n")
    with pytest.raises(AssertionError, match="not of the form"):
        stated(Catalogue([tmp_path]).groups["model"]["mine"])
