"""Data set of labelled texts for classification: a vocabulary, token sequences with a class each, and new texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from mptrain.system.errors import ConfigError, DataError
from mptrain.system.fields import PositiveInt
from mptrain.workloads.base.batch import Batch, padded
from mptrain.workloads.base.data_files import Faults
from mptrain.workloads.base.dataset import Split, SplitDataset, class_facts
from mptrain.workloads.base.new_inputs import NewInputs
from mptrain.workloads.base.splits import ShareOptions, first_samples, hold_out, share_sizes, stratified_order
from mptrain.workloads.text.pretrained_tokenizer import Tokenizer
from mptrain.workloads.text.subwords import PAD
from mptrain.workloads.text.tokens import RaggedTokens, Vocabulary, VocabularyOptions, bucketed_order, read_vocabulary


class Labelled(NamedTuple):
    """Text with the name of its class."""

    label: str
    text: str


@dataclass(frozen=True, kw_only=True)
class LabelledOptions(VocabularyOptions, ShareOptions):
    """Options shared by the data sets of labelled texts; the shares are of each class.

    ``sequence_length`` is the largest number of tokens of a text; the rest of longer ones is cut off.
    """

    sequence_length: PositiveInt = 64
    batch_size: PositiveInt = 32


@dataclass(eq=False)
class LabelledSplit(Split):
    """Split of labelled texts of at least one token, in batches of similar length."""

    texts: RaggedTokens
    targets: Tensor
    batch_size: int
    faults: Faults

    in_memory = True

    def __len__(self) -> int:
        return len(self.targets)

    @override
    def order(self, seed: int, epoch: int, *, shuffle: bool) -> Tensor:
        return bucketed_order(self.texts.lengths, self.batch_size, seed, epoch, shuffle=shuffle)

    def fetch(self, indices: Sequence[int], epoch: int, seed: int) -> Batch:
        """Return token numbers padded at the end, int64 ``[N, T]``, and class indices, int64 ``[N]``."""
        picked = torch.as_tensor(indices, dtype=torch.int64)
        return Batch(self.texts.padded(picked), self.targets[picked])


@dataclass(kw_only=True, eq=False)
class LabelledDataset(SplitDataset[LabelledSplit]):
    """Data set of labelled texts; token numbers in a batch are one higher than in the vocabulary: 0 is padding.

    Those of a tokenizer are its own.
    """

    class_names: tuple[str, ...]
    encoding: Vocabulary | Tokenizer
    sequence_length: int
    inputs: ClassVar[str] = "texts"

    def text_of(self, sample: Tensor) -> str:
        """Return the text of a sample, int64 ``[T]`` without padding, with the tokens that a tokenizer has added."""
        return self.encoding.text((sample if isinstance(self.encoding, Tokenizer) else sample - (PAD + 1)).tolist())

    @override
    def facts(self) -> dict[str, Any]:
        own = isinstance(self.encoding, Tokenizer)
        return {
            **class_facts(self.class_names),
            "vocabulary_size": len(self.encoding) + (not own),
            "sequence_length": self.sequence_length,
            **({"tokenizer_padding": padding_of(self.encoding)} if own else {}),
        }

    @override
    def card(self) -> dict[str, Any]:
        of_tokens = self.encoding.card()
        labels = [*self.class_names, *of_tokens.pop("labels")]
        return {"labels": labels, "class_names": list(self.class_names), **of_tokens, **super().card()}

    def describe(self) -> str:
        """Return, for example, ``texts in 8 classes (vocabulary 2,476)``."""
        return f"texts in {len(self.class_names)} classes (vocabulary {self.facts()['vocabulary_size']:,})"


def labelled_as_dataset(
    name: str,
    given: Mapping[str, Sequence[Labelled]],
    options: LabelledOptions,
    faults: Mapping[str, Faults],
    files: Mapping[str, Sequence[Path]],
) -> LabelledDataset:
    """Make a data set of labelled texts: hold out parts without files of their own, learn a vocabulary, tokenize.

    Repeated texts of a part count once. Texts without a token, and those of a part whose class has no training text,
    are unusable. DataError is raised if a text is unusable, or there is only one class; ConfigError if there are fewer
    texts than ``train_samples``, or the shares leave none to train on.
    """
    parts = {part: list(dict.fromkeys(texts)) for part, texts in given.items()}
    classes = tuple(sorted({sample.label for sample in parts["train"]}))
    if len(classes) < 2:
        raise DataError(f"{name}: all texts have the label {classes[0]!r}", "classification needs two classes or more")
    train = parts["train"]
    order = stratified_order(torch.tensor([classes.index(sample.label) for sample in train]))
    # The test part is the end of the order, so that it is the same with any val_share.
    sizes = {"train": None, **share_sizes(options.shares(parts), len(train))}
    for part, indices in hold_out(order, sizes, f"texts of {name}").items():
        parts[part] = [train[index] for index in indices.tolist()]
    texts = "\n".join(sample.text for sample in parts["train"])
    encoding = options.learn(f"{name} train", texts)
    splits = {
        part: _split(f"{name} {part}", of_part, classes, encoding, options, faults.get(part, Faults()))
        for part, of_part in parts.items()
    }
    return LabelledDataset(
        name=name,
        splits=splits,
        files=files,
        class_names=classes,
        encoding=encoding,
        sequence_length=options.sequence_length,
    )


def class_tokens(encoding: Vocabulary | Tokenizer, text: str, most: int) -> Tensor:
    """Return the first token numbers of a text to classify, int64 ``[T]``, one higher than in a vocabulary."""
    if isinstance(encoding, Tokenizer):
        return encoding.first_numbers(text, most)
    return encoding.numbers(text)[:most].long() + (PAD + 1)


def padding_of(encoding: Vocabulary | Tokenizer) -> int:
    """Return the number that pads texts; ConfigError is raised for a tokenizer that has none, nor an end of a text."""
    if not isinstance(encoding, Tokenizer):
        return PAD
    if encoding.padding is None:
        raise ConfigError(f"dataset.tokenizer={encoding.name} has neither pad_token nor eos_token", "set one of them")
    return encoding.padding


def _split(
    name: str,
    texts: Sequence[Labelled],
    classes: Sequence[str],
    encoding: Vocabulary | Tokenizer,
    options: LabelledOptions,
    faults: Faults,
) -> LabelledSplit:
    rows, targets, problems = [], [], {}
    for number, sample in enumerate(texts):
        row = class_tokens(encoding, sample.text, options.sequence_length).tolist()
        if sample.label not in classes:
            problems[f"{name} text {number}"] = f"its label {sample.label!r} does not occur in the training texts"
        elif not row:
            problems[f"{name} text {number}"] = f"no token in {sample.text[:20]!r}"
        else:
            rows.append(row)
            targets.append(classes.index(sample.label))
    faults.report(problems)
    if not rows:
        raise DataError(f"{name}: there is no usable text", "check the files of dataset.path")
    if name.endswith(" train"):
        rows, targets = first_samples(rows, options.train_samples), first_samples(targets, options.train_samples)
    return LabelledSplit(RaggedTokens(rows, padding_of(encoding)), torch.tensor(targets), options.batch_size, faults)


class NewTexts(NewInputs):
    """Texts, each a line."""

    unreadable = (ValueError,)

    def __init__(self, card: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        count, length = int(card["num_classes"]), int(card["sequence_length"])
        names = tuple(map(str, card["labels"][:count]))  # which the checkpoint knows by their digest
        if [*names] != card["class_names"] or length < 1:
            raise ValueError("classes, labels and length do not fit together")
        super().__init__(card, {**facts, "class_names": names})
        self.encoding = read_vocabulary({**card, "labels": card["labels"][count:]})
        self._length = length

    def read(self, given: str, faults: Faults) -> Tensor:
        """Return the token numbers of a text, int64 ``[T]``; raise ValueError if it has none."""
        numbers = class_tokens(self.encoding, given, self._length)
        if not len(numbers):
            raise ValueError("it has no token")
        return numbers

    def collate(self, samples: Sequence[Tensor]) -> Batch:
        """Return token numbers padded at the end, int64 ``[N, T]``."""
        return Batch(padded(samples, padding_of(self.encoding)), torch.zeros(len(samples), dtype=torch.int64))
