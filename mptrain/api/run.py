"""Runs from Python: records, network, predictions, curves; errors in Python's words. Importing it imports no torch."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import math
import re
import shlex
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar

from typing_extensions import override

from mptrain.api.run_list import RunList
from mptrain.report.notebook import Shown
from mptrain.report.page import Block, facts
from mptrain.report.run_list import filtered, find_runs, ordered
from mptrain.runlog import run_reader
from mptrain.runlog.directory import find_run
from mptrain.runlog.strict_json import read_object
from mptrain.system.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    MptrainError,
    StorageError,
    UsageError,
    instance,
    suggest,
)
from mptrain.system.files import expanded
from mptrain.system.masking import masked
from mptrain.system.words import elided, number, plain

if TYPE_CHECKING:
    from torch import nn

    from mptrain.config.targets import Given
    from mptrain.engine.options import OnStep, StopFunction
    from mptrain.report.plotting import Drawing
    from mptrain.report.run_history import Points
    from mptrain.run.evaluation import ByClass, Evaluation
    from mptrain.runlog.record_writer import Sink
    from mptrain.workloads.base.new_inputs import NewInputs


#: Groups of the configuration whose part a program may give, and the argument for it.
PARTS = {"model": "model", "dataset": "data", "task": "task"}

_Arguments = ParamSpec("_Arguments")
_Returned = TypeVar("_Returned")

#: Options of commands that have another name in Python, where patterns of `mptrain.runs` have none.
_OTHERWISE = {
    "--config-dir ": "config_dirs=", "--filter ": "", ": add -m to sweep": ": call train once for each",
    "--anyway": "anyway=True", "--pair": "pair=True", "--not-inferior": "not_inferior=True", "--sort ": "sort=",
    "--best": "best=True", "--raw": "average=False", "--by-class": "by_class=True", "--fp16": "FP16",
    "--traceback shows": "the exception above shows",
}  # fmt: skip


def in_python(function: Callable[_Arguments, _Returned]) -> Callable[_Arguments, _Returned]:
    """Let the errors of a function name its arguments where those of a command would name options.

    Commands on a run become calls, with the parts that the run has of the program. Arguments that the function does not
    have are refused.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Returned:
        try:
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                names = [name for name in signature.parameters if name != "self"]
                raise UsageError(f"{function.__qualname__}: {error}", f"it has {', '.join(names)}") from None
            return function(*args, **kwargs)
        except MptrainError as error:
            own = args[0] if args and isinstance(args[0], Run) else None
            named = kwargs if "model" in signature.parameters else {}  # else data= are others than those of the run
            given = {*getattr(own, "given", ()), *(group for group in PARTS if named.get(PARTS[group]) is not None)}
            parts = [name for group, name in PARTS.items() if group in given]
            here = f".{function.__name__}" if own else f"mptrain.{function.__name__}"
            reword = functools.partial(_in_python, parts=parts, run=getattr(error, "run", None) or own, here=here)
            error.args, error.hint = (reword(str(error)),), reword(error.hint)
            if isinstance(error, ConfigError):
                error.problems = tuple(
                    replace(problem, what=reword(problem.what), hint=reword(problem.hint)) for problem in error.problems
                )
            raise

    return call


def require_words(words: Sequence[Any], given: Collection[str] = ()) -> None:
    """Raise UsageError for an override that is no text, or that names another part than the program has given.

    ``given`` has the groups of these parts.
    """
    for word in words:
        if isinstance(word, list | tuple):
            raise UsageError(f"an override is {instance(word)}", "each word is an argument of its own: (*words)")
        if not isinstance(word, str):
            hint = 'give texts, such as "seed=1"; data are one argument, data=(inputs, targets), and so is model=Net'
            raise UsageError(f"an override is {instance(word)}", hint)
        group = word.lstrip("+~").partition("=")[0].removesuffix("._target_")
        if group in given:
            raise UsageError(f"{word} has no effect beside {PARTS[group]}=", "leave one of them out")


def _in_python(text: str, parts: Sequence[str], run: Any, here: str) -> str:
    """Return a message with arguments for options, but for commands that it names (``mptrain ... --html``).

    Commands on runs become calls, which name the ``parts`` of the program. No command can diagnose a run that has some:
    it becomes the function for a loop. The root of ``run``, if it is known, may have blanks. A permission is one more
    argument of the call that was made ``here``.

    It has neither control characters nor secrets, as on the command line: a traceback shows it in a terminal or a log.
    """
    text, given = plain(masked(text), lines=True), "".join(f", {name}=..." for name in parts)
    root = re.escape(str(run.paths.root)) if isinstance(run, Run) else r"[^\s;,]*/[^\s;,]*"
    if parts:
        text = re.sub(rf"mptrain diagnose(?: {root})?", "mptrain.diagnose(model, loss_fn, batch)", text)

    def call(command: re.Match[str]) -> str:
        name, words = command[2].strip("'"), ", ".join(map(json.dumps, shlex.split(command[3])))
        return f"mptrain.open_run({name!r}{given}).{command[1].replace('eval', 'evaluate')}({words})"

    allow = r"add '(extensions\.allow=[^']*)'(?: to the command line)?"
    text = re.sub(allow, lambda word: f'call {here}(..., "{word[1]}")', text)
    prefix = r"(?:PYTHONPATH=(?:'[^']*'|\S+) )?(?:torchrun [^;]*-m )?"
    word = r"(?: '[\w.]+=[^']*'| [\w.]+=[^\s;'\"\\]+)"
    text = re.sub(rf"{prefix}mptrain (resume|eval) ({root}|'[^']*'|[^\s;,]+)({word}*)", call, text)
    for option, argument in _OTHERWISE.items():
        text = text.replace(option, argument)
    before, *command = re.split(r"((?<!\S)mptrain )", text, maxsplit=1)
    option_word = r"--([a-z]+(?:-[a-z]+)*)(?:=| (?=\d|[-\w.]+:))?"  # with the blank before a value
    before = re.sub(option_word, lambda option: option[1].replace("-", "_") + "=", before)
    return "".join((before, *command))


class Run(Shown, run_reader.Run):
    """Run directory at the time of reading: the records of `mptrain.runlog.run_reader.Run`, and its trained network.

    Attributes:
        given: What the program gives in place of what the run's configuration names, by group: its model, its data.
    """

    __slots__ = ("given",)

    given: Mapping[str, Given]

    def with_parts(self, given: Mapping[str, Given]) -> Run:
        """Return the run with what the program gives: in place of, or besides, what it had."""
        run = Run(*(getattr(self, field.name) for field in fields(run_reader.Run)))
        object.__setattr__(run, "given", {**getattr(self, "given", {}), **given})
        return run

    @in_python
    def model(self, *overrides: str, best: bool = False, average: bool = True) -> nn.Module:
        """Return the trained network in FP32, on the CPU, in evaluation mode.

        Args:
            overrides: Changes of the run's configuration, such as ``extensions.allow=[my_package]``.
            best: Take the best checkpoint instead of the last one.
            average: Take the running average of the weights (``train.ema_decay``) if there is one.

        Raises:
            MptrainError: There is no usable checkpoint, or the network cannot be built.
        """
        from mptrain.config.compose import reload
        from mptrain.engine.checkpointing import require_same_schema
        from mptrain.engine.weights_io import load_matching, plain_weights
        from mptrain.run.new_inputs import saved_facts
        from mptrain.runlog.checkpoints import CheckpointStore
        from mptrain.system.process_state import caller_restored

        require_words(overrides, self.given)
        config = reload(self.config, overrides, given=self.given)
        loaded = CheckpointStore(self.paths.checkpoints, config.checkpoint.keep).load(_which(best))
        require_same_schema(loaded.state)
        with caller_restored():
            model: nn.Module = config.model.build(**saved_facts(self.paths.data))
        fit = load_matching(model, plain_weights(loaded.state, average=average), str(self.paths.root))
        if fit.fresh:
            raise CheckpointError(
                f"{self.paths.root}: its weights do not fit the network of its configuration, such as {fit.fresh[0]}",
                "use the mptrain version, and the code, that trained it",
            )
        return model.float().eval()

    @in_python
    def predict(
        self,
        inputs: Any,
        *overrides: str,
        best: bool = False,
        average: bool = True,
        length: int | None = None,
        temperature: float | None = None,
        seed: int | None = None,
    ) -> list[dict[str, Any]]:
        """Return the network's answers to new inputs, as ``mptrain predict`` does.

        Args:
            inputs: Paths of pictures or recordings, or of folders of them; or texts. One, or several. For texts a
                `Path` is a file with a text in each line. For data of tensors a sample, a batch or an iterable of
                samples; for tables a `pandas.DataFrame`, a row as a mapping, or the path of a file.
            overrides: Changes of the run's configuration, such as ``device=cpu``.
            best: Take the best checkpoint instead of the last one.
            average: Take the running average of the weights if there is one.
            length: Number of tokens with which a language model continues a text, 32 if None.
            temperature: Below 1 it favours likely tokens, at 0 it takes the likeliest; 1 if None.
            seed: Another one draws other tokens; 1 if None.

        Returns:
            For each input its answer, values by name, such as ``class`` and ``probability``; ``picture`` is a uint8
            tensor ``[C, H, W]``, and ``remark`` says what of the input was changed or not known.

        Raises:
            DataError: An input is unusable.
            MptrainError: The run cannot predict.
        """
        from mptrain.cli.command import WRITING
        from mptrain.run.prediction import predictor
        from mptrain.system.process_state import caller_restored

        if odd := [word for word in overrides if isinstance(word, str) and "=" not in word]:
            raise UsageError(f"{odd[0]} is no KEY=VALUE", "give several inputs as a list: predict([...])")
        require_words(overrides, self.given)
        chosen = {"--length": length, "--temperature": temperature, "--seed": seed}
        texts = {name: str(value) for name, value in chosen.items() if value is not None}
        writing = {option.name[2:]: option.parse(texts[option.name]) for option in WRITING if option.name in texts}
        opened = predictor(
            str(self.paths.root), overrides, _which(best), average=average, writing=writing, given=self.given
        )
        with caller_restored(), opened as loaded:
            for note in loaded.notes:
                warnings.warn(note, stacklevel=3)
            predictions = list(loaded.predict(_inputs(inputs, loaded.source)))
        if bad := [prediction for prediction in predictions if prediction.error]:
            raise DataError(
                f"{elided(bad[0].given, 200)}: {bad[0].error}", f"{len(bad)} of {len(predictions)} inputs are unusable"
            )
        remarks = [{"remark": prediction.remark} if prediction.remark else {} for prediction in predictions]
        return [prediction.answer | remark for prediction, remark in zip(predictions, remarks, strict=True)]

    @in_python
    def export(
        self, output: str | Path | None = None, *overrides: str, best: bool = False, average: bool = True
    ) -> Path:
        """Write the weights, or the network with them, to a file, as ``mptrain export`` does, and return its path.

        Args:
            output: The file; its ending says the form: ``.pt``, ``.safetensors``, ``.onnx`` or ``.pt2``. None for a
                file of weights in the run's own folder.
            overrides: ``extensions.allow`` for a network of your own.
            best: Take the best checkpoint instead of the last one.
            average: Take the running average of the weights if there is one.

        Raises:
            MptrainError: There is no usable checkpoint, the network cannot be exported, or the file not written.
        """
        from mptrain.run.evaluation import export_run
        from mptrain.system.process_state import caller_restored

        require_words(overrides, self.given)
        folder, file = str(self.paths.root), None if output is None else expanded(output)
        with caller_restored():
            exported = export_run(
                folder, _which(best), average=average, output=file, trusted=overrides, given=self.given
            )
            return exported.path

    @in_python
    def evaluate(
        self, data: Any = None, *overrides: str, by_class: bool = False, best: bool = False, average: bool = True
    ) -> Evaluation:
        """Evaluate the network as ``mptrain eval`` does, and return its metrics with confidence intervals.

        Args:
            data: Data to evaluate on, as `mptrain.train` takes them; a single data set, or ``test``. None for the run's
                own validation and test data.
            overrides: Changes of the run's configuration, such as ``precision.eval=fp32``.
            by_class: Measure a classifier's answers by class, too (`confusion`).
            best: Take the best checkpoint instead of the last one.
            average: Take the running average of the weights if there is one.

        Raises:
            MptrainError: There is no usable checkpoint, or its data are missing.
        """
        from mptrain.api.given import data_of_run
        from mptrain.run.evaluation import evaluate_run
        from mptrain.system.process_state import caller_restored

        if not all(isinstance(word, str) for word in overrides):
            raise UsageError("evaluate takes data as one argument", "give a pair: evaluate((inputs, targets))")
        if isinstance(data, str):  # the data of a program are no text: this is an override
            data, overrides = None, (data, *overrides)
        require_words(overrides, self.given)
        with caller_restored():
            dataset = None if data is None else data_of_run(data, read_object(self.paths.data))
            return evaluate_run(
                str(self.paths.root),
                overrides,
                _which(best),
                average=average,
                by_classes=by_class,
                given=self.given,
                dataset=dataset,
            )

    @in_python
    def confusion(self, data: Any = None, *overrides: str, best: bool = False, average: bool = True) -> ByClass:
        """Return the answers of a classifier by class, which a notebook shows as a table; see `evaluate`."""
        measured = self.evaluate(data, *overrides, by_class=True, best=best, average=average).by_class
        assert measured is not None  # else an error was raised
        return measured

    @in_python
    def resume(
        self,
        *overrides: str,
        epochs: int | None = None,
        model: Any = None,
        data: Any = None,
        task: Any = None,
        stop: StopFunction | None = None,
        on_step: OnStep | None = None,
        callbacks: Sequence[Sink] = (),
        update_model: bool = True,
        show: bool = True,
    ) -> Run:
        """Train the run on from its last checkpoint, as ``mptrain resume`` does, and return it as it is then.

        The arguments are those of `mptrain.train`. A run of `mptrain.train` has its model and data still; one of
        `mptrain.open_run` gets them there, or here. ``epochs`` is the total of passes over the data.

        Raises:
            MptrainError: There is nothing left to train, the run does not fit, or it failed.
        """
        from mptrain.api.given import given_parts
        from mptrain.api.training import function_of_program, trained
        from mptrain.run.resume import resume

        words = overrides if epochs is None else (*overrides, f"train.epochs={epochs}")
        functions = function_of_program("stop", stop), function_of_program("on_step", on_step)
        run = self.with_parts(given_parts(model, data, task))
        require_words(words, run.given)
        with run_in_errors(run.given):
            trained(
                lambda sinks: resume(str(self.paths.root), words, sinks, run.given, *functions),
                run.given,
                callbacks,
                update=update_model,
                show=show,
            )
        return open_run(self.paths.root).with_parts(run.given)

    @in_python
    def plot(self, *names: str, learner: str | None = None) -> Drawing:
        """Return a figure of quantities over the steps, one below the other: ``loss`` and ``loss_scale`` by default.

        A notebook shows it; its ``figure`` is matplotlib's, and ``svg`` the text of a file. Skipped steps are marked.

        Args:
            names: Fields of the steps, such as ``grad_norm``; metrics of evaluations, such as ``top1`` (all splits),
                ``val_loss`` and ``test_top1``; and ``train_loss``, the mean over each epoch.
            learner: One of several, for fields of steps and ``train_loss``; None for the first.

        Raises:
            UsageError: There is no such quantity or learner.
            StorageError: The run has neither steps nor evaluations.
        """
        from mptrain.report.plotting import step_figure

        columns, panels = self.columns("steps"), self._measured(learner)
        learners = dict.fromkeys(columns.get("learner", ()))
        if learner is not None and columns and learner not in learners:
            raise UsageError(f"steps have no learner {learner}", f"the learners are {', '.join(learners)}")
        rows = [row for row, name in enumerate(columns.get("learner", ())) if name == (learner or next(iter(learners)))]
        steps = [float(columns["step"][row]) for row in rows]
        for name, values in columns.items():
            if isinstance(values[0], int | float):
                panels[name] = {"": (steps, [float(values[row]) for row in rows])}
        if not panels:
            raise StorageError(f"{self.paths.root} has no step", "train it first")
        wanted = names or ("loss", "loss_scale")
        for name in wanted:
            if name not in [*panels]:
                hint = suggest(str(name), panels, f"there are {', '.join(panels)}")
                raise UsageError(f"steps have no {name}, and evaluations neither", hint)
        skipped = [columns["step"][row] for row in rows if columns["skipped"][row]]
        return step_figure({name: panels[name] for name in wanted}, skipped)

    def _measured(self, learner: str | None) -> dict[str, dict[str, Points]]:
        """Return the points by split of each metric of evaluations, by name with and without the split.

        ``train_loss`` is the mean over each epoch of a learner, by default of the first.
        """
        measured: dict[str, dict[str, Points]] = {}

        def add(name: str, split: str, step: int, value: float) -> None:
            steps, values = measured.setdefault(name, {}).setdefault(split, ([], []))
            steps.append(float(step))
            values.append(float(value))

        for epoch in self.epochs():
            if epoch.learner == (learner := learner or epoch.learner):
                add("train_loss", "train", epoch.step, epoch.train_loss)
        for event in (event for event in self.events() if event["event"] == "evaluation"):
            try:
                for name, value in event["metrics"].items():
                    for shown in (name, f"{event['split']}_{name}"):
                        add(shown, event["split"], event["step"], math.nan if value is None else value)
            except (LookupError, TypeError, ValueError, AttributeError):  # as a run's page does
                warnings.warn("an evaluation has missing or invalid fields and is left out", stacklevel=4)
        return measured

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings of the run, of its configuration and device too, each sentence once, also if it printed nothing."""
        events = [event for event in self.events() if event["event"] in ("warning", "resume")]
        messages = (
            [event["message"]] if event["event"] == "warning" else event.get("warnings", ()) for event in events
        )
        return tuple(dict.fromkeys(sentence for some in messages for sentence in some))

    @override
    def __repr__(self) -> str:
        shown = ", ".join(f"{name} {value}" for name, value in self._facts())
        return plain(masked(f"<mptrain run {self.paths.root}: {shown}>"))

    @override
    def blocks(self) -> Sequence[Block]:
        return (facts(("run", str(self.paths.root)), *self._facts(), ("overrides", " ".join(self.overrides))),)

    def _facts(self) -> list[tuple[str, str]]:
        last = self.state.attempts[-1] if self.state.attempts else None
        steps = last.to_step if last else None
        metric = self.summary.get("metric_name")
        facts = [("status", self.state.status), ("steps", "" if steps is None else f"{steps:,}")]
        facts += [(metric, number(self.summary.get("metric")))] if metric else []
        facts += [("warnings", str(len(warned)))] if (warned := self.warnings) else []
        return [(name, value) for name, value in facts if value]


@contextlib.contextmanager
def run_in_errors(given: Mapping[str, Given]) -> Iterator[None]:
    """Let an error that ends training have the run, opened with what the program gives, as its ``run``."""
    try:
        yield
    except MptrainError as error:
        if isinstance(error.run, Path):
            with contextlib.suppress(MptrainError):  # report the original failure
                error.run = open_run(error.run).with_parts(given)
        raise


def _inputs(inputs: Any, source: NewInputs) -> Iterator[str]:
    """Yield texts, and for texts the lines of files; the paths of files, those in folders too; or tensors and rows."""
    from mptrain.cli.using import lines_of
    from mptrain.workloads.base.data_files import files_below

    if (own := source.inputs_in(inputs)) is not None:
        yield from own
        return
    for given in inputs if isinstance(inputs, Iterable) and not isinstance(inputs, str | Path) else [inputs]:
        if not isinstance(given, str | Path):
            raise UsageError(
                f"an input is {type(given).__name__}, not a text or a path", "save it as a file, or call Run.model()"
            )
        if source.suffixes and Path(given).is_dir():
            yield from map(str, files_below(Path(given), tuple(source.suffixes), special=True))
        elif not source.suffixes and isinstance(given, Path):
            yield from lines_of(str(given))
        elif not source.suffixes and len(text := str(given)) < 200 and Path(text).is_file():
            raise UsageError(f"{text} is a file, and this run answers texts", f"write Path({text!r}) for its lines")
        else:
            yield str(given)


@in_python
def open_run(run: str | Path, *, model: Any = None, data: Any = None, task: Any = None) -> Run:
    """Open a run by its directory, its name below ``outputs``, or ``last`` for the run that was started last.

    ``model``, ``data`` and ``task`` are what a Python program gave `mptrain.train` to train it, of which its directory
    has the names and no code or samples.

    Raises:
        StorageError: There is no such run, or it is damaged; its subclass OtherVersion if another version wrote it.
    """
    opened = _as_run(run_reader.read_run(find_run(str(run)).root))
    if model is data is task is None:
        return opened  # without torch, which makes and checks parts
    from mptrain.api.given import given_parts

    return opened.with_parts(given_parts(model, data, task))


@in_python
def runs(root: str | Path = "outputs", *patterns: str, sort: str = "started") -> RunList[Run]:
    """Return the runs below a folder, as ``mptrain runs`` lists them: the newest first, or the best by a metric.

    The list prints as a table, and its ``to_dataframe()`` is one of pandas. ``patterns`` are those of ``--filter``,
    such as ``precision=fp16*`` and ``status=done``. A damaged run is left out with a warning. StorageError is raised if
    there is no such folder, UsageError if no run has a key.
    """
    if odd := [pattern for pattern in patterns if not isinstance(pattern, str)]:
        raise UsageError(f"a pattern is {instance(odd[0])}", 'give texts, such as mptrain.runs("outputs", "seed=1")')
    found_runs, notes = find_runs(expanded(root))
    for note in notes:
        warnings.warn(note, stacklevel=2)
    found_runs = ordered(filtered(found_runs, patterns), sort)
    killed = [found_run.path for found_run in found_runs if found_run.status == "killed"]
    return RunList((_as_run(found_run.run) for found_run in found_runs), killed, sort)


def _as_run(read: run_reader.Run) -> Run:
    return Run.with_parts(read, {})  # type: ignore[arg-type]


def _which(best: bool) -> Literal["last", "best"]:
    return "best" if best else "last"
