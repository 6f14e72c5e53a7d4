"""`mptrain.train`: a training run from Python, as the command line starts it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mptrain.api.run import Run, in_python, open_run
from mptrain.cli.messages import warn
from mptrain.cli.train import displays
from mptrain.config.compose import compose
from mptrain.run.attempt import RunInfo
from mptrain.run.resume import launch
from mptrain.runlog.record_writer import Sink
from mptrain.system.errors import ConfigError, UsageError, instance
from mptrain.system.process_state import caller_restored
from mptrain.workloads.base.map_style import MapDataset, torch_parts


@in_python
def train(
    *overrides: str,
    data: Any = None,
    callbacks: Sequence[Sink] = (),
    show: bool = True,
    config_dirs: str | Path | Sequence[str | Path] = (),
    config_name: str = "train",
) -> Run:
    """Train a run and return it, as ``mptrain OVERRIDES`` does; an error is raised, and the process never exits.

    Generators of random numbers, torch's settings, signal handlers and the current folder are as before afterwards.
    Ctrl-C, or a notebook's stop button, ends the run after its step and saves it: `Preempted` is raised, and the same
    call with ``run.resume=auto`` and its ``run.name`` goes on.

    Args:
        overrides: ``KEY=VALUE`` or ``GROUP=OPTION``, such as ``model=resnet18`` and ``precision=amp_dynamic``.
        data: Map-style datasets of torch: one to train on, or a tuple or mapping of ``train``, ``val`` and ``test``,
            whose samples are pairs (input, target). None for the configured ``dataset``.
        callbacks: Sinks of the run's records (`mptrain.runlog.record_writer.Sink`): ``take(record)``, ``close()``.
        show: Print the run's progress.
        config_dirs: Folder, or folders, with groups and options of your own.
        config_name: Name of another top-level configuration.

    Raises:
        MptrainError: The configuration is invalid, or the run failed; its directory has the reason.
    """
    if odd := [word for word in overrides if not isinstance(word, str)]:
        raise UsageError(f"an override is {instance(odd[0])}", 'give texts: mptrain.train("model=cnn", "seed=1")')
    folders = [config_dirs] if isinstance(config_dirs, str | Path) else config_dirs
    if data is not None:
        if odd := [word for word in overrides if word.lstrip("+~").startswith(("dataset=", "dataset._target_"))]:
            raise UsageError(f"{odd[0]} has no effect beside data=", "leave one of them out")
        overrides = ("dataset=from_python", *overrides)
    config = compose(overrides, config_dirs=[str(folder) for folder in folders], config_name=config_name)
    if (config.distributed.procs or 1) > 1:
        raise ConfigError(
            f"distributed.procs={config.distributed.procs}: from Python a run has one process",
            "start it with the command line, or with torchrun",
        )
    if not isinstance(callbacks, Sequence) or not all(map(_is_sink, callbacks)):
        raise UsageError("callbacks is no list of sinks", "give a list of objects with take(record) and close()")
    dataset = None if data is None else _dataset(data, config.dataset.arguments.get("workers", 0))
    if show:
        warn(config.warnings)

    def sinks(info: RunInfo) -> Sequence[Sink]:
        return [*(displays(info) if show else ()), *callbacks]

    with caller_restored():
        outcome = launch(config, sinks, dataset)
    return open_run(outcome.root)


def _is_sink(sink: Any) -> bool:
    return not isinstance(sink, type) and all(callable(getattr(sink, name, None)) for name in ("take", "close"))


def _dataset(data: Any, workers: int) -> MapDataset:
    if not (parts := torch_parts(data)):
        raise UsageError(
            f"data is {type(data).__name__}: no map-style dataset to train on",
            "give a torch.utils.data.Dataset, or a tuple or mapping of train, val and test",
        )
    return MapDataset("from_python", parts, workers)
