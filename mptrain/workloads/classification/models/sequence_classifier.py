"""Text classifiers of the library transformers by name: BERT, RoBERTa, DistilBERT, GPT-2 and others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from mptrain.system.fields import PositiveInt
from mptrain.workloads.text.subwords import PAD
from mptrain.workloads.text.transformers_models import Attention, Wanted, build_network, small_sizes


def sequence_classifier(
    *,
    name: str,
    num_classes: int,
    vocabulary_size: int,
    sequence_length: int,
    width: PositiveInt | None = None,
    layers: PositiveInt | None = None,
    heads: PositiveInt | None = None,
    config: Mapping[str, Any] | None = None,
    attention: Attention | None = None,
    pretrained: bool = False,
    download: bool = True,
    tokenizer_padding: int | None = None,
) -> nn.Module:
    """Build a text classifier of the library transformers for the classes and the vocabulary of a data set.

    The network takes tokens, int64 ``[N, T]``, padded with 0, or ``tokenizer_padding`` if the data set has a tokenizer,
    and returns logits ``[N, num_classes]``. Padding is masked in networks that take a mask.

    ``name`` is an architecture, such as ``bert``, with further keys of its configuration in ``config``; if
    ``pretrained``, a repository of the Hugging Face hub, or a folder. Its configuration then sets the sizes, and a head
    for other classes and an embedding of another vocabulary keep their random weights. With a tokenizer the embedding
    is the repository's. Otherwise None means a ``width``
    (size of a position's vector, a multiple of ``heads``) of 64, 2 ``layers`` and 4 ``heads``. The attention is
    ``sdpa`` or ``eager``; None takes ``sdpa`` if the architecture has it.

    Raises:
        EnvironmentRefused: transformers is not installed.
        ConfigError: There is no such architecture, it does not have a key or a value, or its embedding is smaller than
            the vocabulary of the tokenizer.
        DataError: Files of pretrained weights are missing.
    """
    padding = tokenizer_padding or PAD
    # RoBERTa counts them from padding + 1, and its tokenizers have a small one; GPT-2's may be the end of a text.
    positions = {"max_position_embeddings": sequence_length + min(padding, sequence_length) + 2}
    special = {"pad_token_id": padding, "bos_token_id": None, "eos_token_id": None}
    return build_network(
        Wanted(
            option="sequence_classifier",
            auto="AutoModelForSequenceClassification",
            names="MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
            name=name,
            sizes={**small_sizes(width, layers, heads, pretrained=pretrained), **positions},
            fixed={"num_labels": num_classes, "vocab_size": vocabulary_size, **special},
            config=config or {},
            attention=attention,
            pretrained=pretrained,
            download=download,
            tokenizer_padding=tokenizer_padding,
        )
    )
