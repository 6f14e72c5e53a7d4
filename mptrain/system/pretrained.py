"""Pretrained weights: files in the caches of torch.hub and of the Hugging Face hub, downloaded only if allowed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mptrain.system.errors import DataError, MptrainError, out_of_memory
from mptrain.system.machine import load_extra

#: Attribute in which the function of a model leaves the `PretrainedWeights` that a new run starts from.
ATTRIBUTE = "pretrained_weights"

#: Attribute in which the function of a model leaves a `Fit`, through which weights from a file or a run then pass.
FIT = "fit_weights"

#: Function that returns a state dict fitted to a network, for example positions resized to its image size.
Fit = Callable[[nn.Module, Mapping[str, Tensor]], Mapping[str, Tensor]]

#: Seconds after which a server counts as unreachable. The hub's client alone would retry for half a minute a file.
_PATIENCE = 10.0

_OWN_FILE = "set model.weights=FILE if you have the weights elsewhere, or model.pretrained=false to start without them"


@dataclass(frozen=True)
class PretrainedWeights:
    """Pretrained weights of a network, which are not loaded before `read` is called: a resumed run needs none.

    Attributes:
        source: Where they come from, for the user.
        load: Function that returns them as a state dict. Tensors of other shapes than in the network are ignored.
        statistics: Mean and standard deviation of each channel with which the images that they were trained on were
            normalised, as fractions of white; None if they are not for images.
    """

    source: str
    load: Callable[[], Mapping[str, Tensor]]
    statistics: tuple[tuple[float, ...], tuple[float, ...]] | None = None

    def read(self) -> Mapping[str, Tensor]:
        """Return the state dict; raise DataError if the weights are missing, or a file is damaged."""
        try:
            return self.load()
        except MptrainError:
            raise
        except Exception as error:  # of the libraries that read them, and of pickle
            if refused := out_of_memory(error, f"reading {self.source}"):
                raise refused from error
            raise DataError(
                f"model.pretrained: {self.source} cannot be read: {type(error).__name__}: {_line(error)}",
                f"remove a damaged file from the cache, or {_OWN_FILE}",
            ) from error


def hub_file(repository: str, name: str, *, download: bool) -> Path:
    """Return the path of a file of the Hugging Face hub in its cache, after downloading it if necessary and allowed.

    The repository has a name such as ``timm/resnet18.a1_in1k``. Raise DataError if the file is not in the cache, and
    must not or cannot be downloaded.
    """
    hub = load_extra("huggingface_hub", "timm", "model.pretrained=true")
    try:
        return Path(hub.hf_hub_download(repository, name, local_files_only=True))
    except (OSError, ValueError) as error:
        require_hub(repository, name, download=download, cause=error)
    try:
        return Path(hub.hf_hub_download(repository, name))
    except (OSError, ValueError) as error:
        raise unavailable(name, hub_folder(repository), f"it cannot be downloaded: {_line(error)}") from error


def hub_folder(repository: str) -> Path:
    """Return the folder of a repository in the cache of the Hugging Face hub."""
    hub = load_extra("huggingface_hub", "timm", "model.pretrained=true")
    return Path(hub.constants.HF_HUB_CACHE) / f"models--{repository.replace('/', '--')}"


def require_hub(repository: str, name: str, *, download: bool, cause: Exception) -> None:
    """Raise DataError if a file that the Hugging Face cache lacks must not be downloaded, or the hub cannot be reached.

    ``cause`` is the error of the search in the cache.
    """
    if not download:
        raise not_typed(name, hub_folder(repository)) from cause
    hub = load_extra("huggingface_hub", "timm", "model.pretrained=true")
    endpoint = hub.constants.ENDPOINT
    try:
        hub.utils.get_session().head(endpoint, timeout=_PATIENCE)
    except Exception as error:  # of the library that the hub's client uses, which differs between its versions
        why = f"{endpoint} cannot be reached: {_line(error)}"
        raise unavailable(f"{repository}/{name}", hub_folder(repository), why) from error


def url_file(url: str, *, download: bool) -> Path:
    """Return the path of a file in the cache of torch.hub, after downloading it if necessary and allowed.

    If its name ends in ``-HASH``, the digest of a download is checked. Raise DataError if the file is not in the cache,
    and must not or cannot be downloaded.
    """
    name = url.rpartition("/")[2]
    path = Path(torch.hub.get_dir()) / "checkpoints" / name
    if path.exists():
        return path
    if not download:
        raise not_typed(name, path)
    digest = torch.hub.HASH_REGEX.search(name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.hub.download_url_to_file(url, str(path), digest[1] if digest else None, progress=False)
    except (OSError, RuntimeError) as error:
        raise unavailable(name, path, f"{url} cannot be downloaded: {_line(error)}") from error
    return path


def not_typed(what: str, path: Path) -> DataError:
    """Return the error for pretrained weights that are missing in a cache and that no typed override asked for."""
    return DataError(
        f"model.pretrained: {what} is not in {path}, and only a typed override may download it",
        f"type model.pretrained=true on the command line, or {_OWN_FILE}",
    )


def unavailable(what: str, path: Path, why: str) -> DataError:
    """Return the error for pretrained weights that are neither in a cache nor can be downloaded."""
    return DataError(
        f"model.pretrained: {what} is not in {path}, and {why}",
        f"copy it there from a machine with network, or {_OWN_FILE}",
    )


def _line(error: Any) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
