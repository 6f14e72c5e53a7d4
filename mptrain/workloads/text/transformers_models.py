"""Networks of the library transformers by name, as modules that take tokens and return logits.

The parameters keep the names of the library, so its weights load and exported weights load there. Code of model
repositories and kernels of the hub are never run.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from mptrain.system.errors import ConfigError, MptrainError, Problem, did_you_mean
from mptrain.system.machine import load_extra
from mptrain.system.pretrained import ATTRIBUTE, PretrainedWeights, hub_folder, require_hub, unavailable
from mptrain.workloads.text.subwords import PAD, problems_of_heads

#: ``sdpa``: torch's scaled_dot_product_attention. ``eager``: products and a softmax in FP32, as operators of their own.
Attention = Literal["sdpa", "eager"]

#: Names of a kept state among the arguments and outputs of the library's networks, the newest first.
_KEPT = ("cache", "past_key_values", "cache_params")

#: Keys of a configuration that could run code of others, or that are not the network's own.
_REFUSED = ("trust_remote_code", "auto_map", "code_revision", "quantization_config", "attn_implementation")


@dataclass(frozen=True)
class Wanted:
    """Network of the library transformers that a configuration asks for.

    Attributes:
        option: Name of the option of ``model``, for messages.
        auto: Name of the library's class that builds it, such as ``AutoModelForCausalLM``.
        names: Name of the library's table of architectures for that class.
        name: Architecture, such as ``gpt2``; with ``pretrained`` a repository of the hub, or a folder.
        sizes: Sizes in the library's words, such as ``hidden_size``, for a network without pretrained weights. Keys
            that the architecture does not have are left out.
        fixed: Values of the data set, such as ``vocab_size``, which hold with pretrained weights too.
        config: Values that the user set; they override ``sizes``, under any name that the library maps to theirs.
        attention: Kind of attention; None takes ``sdpa`` if the architecture has it.
        tokenizer_padding: Number of the padding of the data set's tokenizer; None if the data set has a vocabulary of
            its own. With a tokenizer, pretrained weights keep their embedding, which may have more tokens.
    """

    option: str
    auto: str
    names: str
    name: str
    sizes: Mapping[str, Any]
    fixed: Mapping[str, Any]
    config: Mapping[str, Any] = field(default_factory=dict)
    attention: Attention | None = None
    pretrained: bool = False
    download: bool = True
    tokenizer_padding: int | None = None


def small_sizes(width: int | None, layers: int | None, heads: int | None, *, pretrained: bool) -> dict[str, Any]:
    """Return sizes of a small network in the library's words; mixtures of experts have four, two of them for a token.

    By default the width is 64, with 2 layers and 4 heads. ConfigError is raised if the heads do not divide the width,
    or a size is given for a pretrained network, whose repository sets the sizes.
    """
    given = {"width": width, "layers": layers, "heads": heads}
    if pretrained and (typed := [f"model.{key}={value}" for key, value in given.items() if value is not None]):
        raise ConfigError(
            f"{' '.join(typed)} with model.pretrained=true: the configuration of the repository sets the sizes",
            "leave it out; model.config.KEY=VALUE sets one of its keys, such as its number of layers",
        )
    width, layers, heads = width or 64, layers or 2, heads or 4
    if problems := problems_of_heads(width, heads):
        raise ConfigError(problems)
    experts = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": width}
    attention = {"num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": width // heads}
    return {"hidden_size": width, "num_hidden_layers": layers, "intermediate_size": 4 * width, **attention, **experts}


def load_library(purpose: str) -> Any:
    """Import transformers, which then prints errors only; raise EnvironmentRefused if it is not installed."""
    # Without this the library may fetch compiled kernels from the hub when it is imported.
    os.environ.setdefault("USE_HUB_KERNELS", "0")
    library = load_extra("transformers", "transformers", purpose)
    library.logging.set_verbosity_error()
    library.logging.disable_progress_bar()
    return library


def build_network(wanted: Wanted) -> nn.Module:
    """Build a network that takes tokens, int64 ``[N, T]``, and returns logits, with random weights in FP32.

    Its `PretrainedWeights` are an attribute.

    Raises:
        EnvironmentRefused: The library is not installed.
        ConfigError: There is no such architecture, it does not have a key or a value, or its embedding is smaller than
            the vocabulary of the tokenizer.
        DataError: The configuration of pretrained weights is missing.
    """
    library = load_library(f"model={wanted.option}")
    auto = getattr(library, wanted.auto)
    if refused := [key for key in wanted.config if key in _REFUSED or key.startswith("_")]:
        raise ConfigError(
            f"model.config.{refused[0]}: mptrain runs no code from a model repository",
            "leave it out; for code of your own name its class with model._target_ and extensions.allow",
        )
    config = _loaded_config(library, wanted) if wanted.pretrained else _fresh_config(library, wanted)
    if wanted.option == "sequence_classifier" and config.is_encoder_decoder:
        raise ConfigError(f"model.name={wanted.name} has an encoder and a decoder", "choose one of them, such as bert")
    config.use_cache = False
    try:
        kind = getattr(library, wanted.names.removesuffix("_NAMES"))[type(config)]
    except KeyError:
        raise ConfigError(f"model.name={wanted.name}: {type(config).__name__} has no {wanted.auto}") from None
    attention = wanted.attention or ("sdpa" if getattr(kind, "_supports_sdpa", False) else "eager")
    options = {"attn_implementation": attention, "dtype": torch.float32}
    # Autocast leaves the library's grouped products of experts in FP32.
    if getattr(kind, "_can_set_experts_implementation", bool)():
        options["experts_implementation"] = "eager"
    try:
        network: nn.Module = auto.from_config(config, trust_remote_code=False, **options)
    except (ValueError, TypeError, AssertionError, RuntimeError, ImportError, AttributeError) as error:
        raise ConfigError(
            f"transformers cannot build {wanted.name}: {_line(error)}", "set its sizes with model.config.KEY=VALUE"
        ) from error
    tokens, embedding = wanted.fixed["vocab_size"], cast("Any", network).get_input_embeddings
    if wanted.tokenizer_padding is not None and (size := len(embedding().weight)) < tokens:
        raise ConfigError(
            f"model.name={wanted.name} has an embedding of {size:,} tokens, and dataset.tokenizer has {tokens:,}",
            "choose the tokenizer that belongs to the model",
        )
    for module in network.modules():
        if any(name in module._non_persistent_buffers_set for name in module._buffers):
            module.__class__ = _keeping_tables(type(module))  # type: ignore[arg-type]
    network.__class__ = _returning_logits(type(network), wanted.tokenizer_padding or PAD)  # type: ignore[arg-type]
    if wanted.pretrained:
        load = functools.partial(_weights, auto, wanted, options)
        setattr(network, ATTRIBUTE, PretrainedWeights(wanted.name, load))
    return network


def _fresh_config(library: Any, wanted: Wanted) -> Any:
    known = list(getattr(library.models.auto.modeling_auto, wanted.names))
    if wanted.name not in known:
        near = ", ".join(difflib.get_close_matches(wanted.name, known, n=5, cutoff=0))
        raise ConfigError(
            f"model.name={wanted.name}: transformers has no such architecture for model={wanted.option}",
            f"similar names are {near}; a repository or a folder needs model.pretrained=true",
        )
    default = library.AutoConfig.for_model(wanted.name)
    fields = _fields(default)
    dropout = {key: 0.0 for key in fields if "drop" in key and isinstance(getattr(default, key, None), float)}
    sizes = {key: value for key, value in {**wanted.sizes, **wanted.fixed}.items() if key in fields}
    if "qk_rope_head_dim" in fields:  # latent attention has other sizes of heads
        sizes.pop("head_dim", None)
    # The library maps names to an architecture's own: hidden_size to n_embd. Of two, its configuration would use one.
    values: dict[str, Any] = {}
    for some in (sizes, dropout, wanted.config):
        values |= {default.attribute_map.get(key, key): value for key, value in some.items()}
    make = functools.partial(library.AutoConfig.for_model, wanted.name, **values)
    return _checked(make, fields, default.attribute_map, wanted)


def _loaded_config(library: Any, wanted: Wanted) -> Any:
    read = functools.partial(library.AutoConfig.from_pretrained, wanted.name, trust_remote_code=False)
    config = _cached(read, "config.json", wanted)
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(f"model.name={wanted.name} has quantized weights", "choose weights that are not quantized")
    fields = _fields(config)
    own = () if wanted.tokenizer_padding is None else ("vocab_size",)
    kept = {key: value for key, value in wanted.fixed.items() if key in fields and key not in own}
    values = kept | dict(wanted.config)
    again = functools.partial(read, **values)
    return _checked(functools.partial(_cached, again, "config.json", wanted), fields, config.attribute_map, wanted)


def _fields(config: Any) -> list[str]:
    parameters = inspect.signature(type(config)).parameters
    return [*dict.fromkeys([*parameters, *config.to_dict(), *config.attribute_map, "num_labels"])]


def _checked(make: Callable[[], Any], fields: list[str], names: Mapping[str, str], wanted: Wanted) -> Any:
    """Return the configuration that a function makes, or raise an error with all keys that the user set wrongly."""
    problems = []
    for key in wanted.config:
        if key not in fields:
            guess = did_you_mean(key, fields)
            hint = f"did you mean model.config.{guess}?" if guess else "transformers documents the keys"
            problems.append(Problem(f"unknown key 'model.config.{key}': {wanted.name} has no such key", hint))
        elif (other := names.get(key, key)) != key and other in wanted.config:
            what = f"model.config.{key} and model.config.{other} are two names of one key"
            problems.append(Problem(what, "leave one of them out"))
    if problems:
        raise ConfigError(problems)
    try:
        return make()
    except MptrainError:
        raise
    except Exception as error:  # each architecture has validators of its own
        raise ConfigError(
            f"transformers rejects the configuration of {wanted.name}: {_line(error)}",
            "set other values with model.config.KEY=VALUE",
        ) from error


def _cached(read: Callable[..., Any], what: str, wanted: Wanted) -> Any:
    """Call a reader of the library for the cache only, then, if something is missing and may be downloaded, again."""
    try:
        return read(local_files_only=True)
    except OSError as error:
        if os.path.isdir(wanted.name):  # noqa: PTH112 - a name on the hub is no path
            raise unavailable(what, Path(wanted.name), f"transformers cannot read it: {_line(error)}") from error
        require_hub(wanted.name, what, download=wanted.download, cause=error)
    try:
        return read(local_files_only=False)
    except OSError as error:
        raise unavailable(what, hub_folder(wanted.name), f"it cannot be downloaded: {_line(error)}") from error


def _weights(auto: Any, wanted: Wanted, options: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the weights of a repository or folder under the names of the network; none that its files lack."""
    read = functools.partial(
        auto.from_pretrained, wanted.name, trust_remote_code=False, output_loading_info=True, **options
    )
    with torch.random.fork_rng(devices=()):
        donor, loading_info = _cached(read, "model.safetensors", wanted)
    return {name: value for name, value in donor.state_dict().items() if name not in loading_info["missing_keys"]}


@functools.cache
def _returning_logits(kind: type[Any], padding: int) -> type[Any]:
    """Return a subclass whose forward returns only the logits; padding is masked if the configuration names it.

    If the library keeps keys and values, or a state, for the kind, it also has ``next_logits``, as
    `mptrain.workloads.language.task.continued` calls it.
    """
    takes = inspect.signature(kind.forward).parameters
    last = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}
    kept = next((name for name in _KEPT if name in takes), "")

    def forward(self: Any, tokens: Tensor) -> Tensor:
        padded = "attention_mask" in takes and getattr(self.config, "pad_token_id", None) == padding
        more = {"attention_mask": (tokens != padding).long()} if padded else {}
        return cast("Tensor", kind.forward(self, input_ids=tokens, **more).logits)

    def next_logits(self: Any, tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        output = kind.forward(self, input_ids=tokens, use_cache=True, **{kept: state}, **last)
        return output.logits[:, -1], output[kept]

    more = {"next_logits": next_logits} if kept else {}
    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__, **more})


@functools.cache
def _keeping_tables(kind: type[Any]) -> type[Any]:
    """Return a subclass of a module's class whose non-persistent buffers stay in their dtype when the module is cast.

    They are tables that the configuration determines, such as the frequencies of rotary positions. In FP16 the smallest
    ones are subnormal, and in BF16 the angle of position 1,000 would be off by up to two radians.
    """

    def _apply(self: Any, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> nn.Module:
        tables = {name: self._buffers[name] for name in self._non_persistent_buffers_set}
        kind._apply(self, fn, *args, **kwargs)
        for name, table in tables.items():
            if table is not None and self._buffers[name].dtype != table.dtype:
                self._buffers[name] = table.to(self._buffers[name].device)
        return cast("nn.Module", self)

    return type(kind.__name__, (kind,), {"_apply": _apply, "__module__": kind.__module__})


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
