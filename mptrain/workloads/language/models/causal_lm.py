"""Language models of the library transformers by name: GPT-2, Llama, Qwen, Mixtral, Mamba and others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mptrain.system.errors import ConfigError
from mptrain.system.fields import NonNegativeInt, PositiveInt
from mptrain.workloads.text.transformers_models import Attention, Wanted, build_network, small_sizes


def causal_lm(
    *,
    name: str,
    vocabulary_size: int,
    sequence_length: int,
    lanes: NonNegativeInt = 0,
    width: PositiveInt | None = None,
    layers: PositiveInt | None = None,
    heads: PositiveInt | None = None,
    config: Mapping[str, Any] | None = None,
    attention: Attention | None = None,
    pretrained: bool = False,
    download: bool = True,
    tokenizer_padding: int | None = None,
) -> nn.Module:
    """Build a language model of the library transformers: tokens, int64 ``[N, T]``, to logits ``[N, T, V]``.

    ``name`` is an architecture, such as ``gpt2``; with ``pretrained`` a repository of the Hugging Face hub, or a
    folder. Losses that the library would add, such as the one that balances experts, are not part of the training loss.
    A network without pretrained weights has ``sequence_length`` positions and by default a ``width`` of 64, 2
    ``layers`` and 4 ``heads``, which divide the width. With ``pretrained`` a new run starts from the weights of the
    repository, whose configuration sets the sizes; an embedding of another vocabulary keeps its random weights.
    ``config`` has further keys of the configuration, such as ``rope_parameters``; ``attention`` None takes ``sdpa`` if
    the architecture has it; ``download`` allows missing files to be downloaded. With a tokenizer (``tokenizer_padding``
    is not None) the embedding is the repository's, and V may exceed the vocabulary.

    Raises:
        EnvironmentRefused: transformers is not installed.
        ConfigError: There is no such architecture, it does not have a key or a value, its logits depend on later
            tokens, its embedding is smaller than the vocabulary of the tokenizer, or ``lanes`` is not 0, although the
            network carries no state.
        DataError: Files of pretrained weights are missing.
    """
    if lanes:
        raise ConfigError(
            "dataset.stream=true: networks of transformers carry no state from batch to batch",
            "set dataset.stream=false",
        )
    special = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    # Without is_decoder BERT and its like would see the tokens that they predict.
    fixed = {"vocab_size": vocabulary_size, "is_decoder": True, **special}
    positions = {"max_position_embeddings": sequence_length}
    network = build_network(
        Wanted(
            option="causal_lm",
            auto="AutoModelForCausalLM",
            names="MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
            name=name,
            sizes={**small_sizes(width, layers, heads, pretrained=pretrained), **positions},
            fixed=fixed,
            config=config or {},
            attention=attention,
            pretrained=pretrained,
            download=download,
            tokenizer_padding=tokenizer_padding,
        )
    )
    _require_causal(network, name, vocabulary_size, sequence_length, tokenizer=tokenizer_padding is not None)
    return network


def _require_causal(network: nn.Module, name: str, tokens: int, length: int, *, tokenizer: bool) -> None:
    """Check the logits of two texts that differ in their second half only: those before it must be alike.

    If ``next_logits`` says otherwise at the position after the first half, or fails, it is removed: the architecture
    does not keep what is needed, or keeps it otherwise.
    """
    half = min(8, length) // 2
    if not half or tokens < 2 or next(network.parameters()).is_meta:
        return
    first = torch.arange(2 * half) % (tokens - 1)  # not token 0, which may be padding
    texts = torch.stack([first, first]) + 1
    texts[1, half:] = first[:half]
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=()):
            logits = network.eval()(texts)
    except Exception as error:  # each architecture has requirements of its own
        raise ConfigError(
            f"model.name={name} takes no tokens alone: {type(error).__name__}: {' '.join(str(error).split())[:200]}",
            "choose another architecture, or set its keys with model.config.KEY=VALUE",
        ) from error
    if not _keeps(network, texts, half, logits):
        network.next_logits = None  # type: ignore[assignment]
    network.train()
    width = max(tokens, logits.shape[-1]) if tokenizer else tokens
    if logits.shape != (2, 2 * half, width):
        raise ConfigError(
            f"model.name={name} returns logits {tuple(logits.shape)}, not {(2, 2 * half, width)}",
            "choose another architecture, or set its keys with model.config.KEY=VALUE",
        )
    if not torch.allclose(logits[0, :half], logits[1, :half], rtol=1e-4, atol=1e-6):
        raise ConfigError(
            f"model.name={name} is no causal language model: its logits depend on later tokens",
            "choose another architecture, such as gpt2",
        )


def _keeps(network: Any, texts: Tensor, half: int, logits: Tensor) -> bool:
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=()):
            _, state = network.next_logits(texts[:, :half], None)
            after, _ = network.next_logits(texts[:, half : half + 1], state)
    except Exception:  # each architecture has requirements of its own
        return False
    return torch.allclose(after, logits[:, half], rtol=1e-3, atol=1e-5)
