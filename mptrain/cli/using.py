"""``mptrain export`` and ``mptrain predict``: a trained network as a file, and its answers to new inputs."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, Literal

import torch

from mptrain.cli.command import WRITING, run_folder
from mptrain.cli.messages import print_rows, say, warn
from mptrain.config.catalogue import Catalogue, configs_folder
from mptrain.config.compose import is_allow_override, search_path
from mptrain.config.targets import facts_in, parameters
from mptrain.run.evaluation import Export, export_run
from mptrain.run.network_export import ExportedNetwork
from mptrain.run.prediction import Prediction, predictor
from mptrain.runlog.atomic_files import readable_bytes, remove_drafts, storage_errors, write_atomically
from mptrain.runlog.directory import require_outside_runs
from mptrain.runlog.strict_json import read_object
from mptrain.system.errors import EXIT_DATA, EXIT_OK, DataError, StorageError, UsageError
from mptrain.system.files import expanded, open_to_read, read_text
from mptrain.system.records import as_json
from mptrain.system.words import counted, elided, listed, number, plain
from mptrain.workloads.base.data_files import Faults, files_below, hidden_noted
from mptrain.workloads.images.picture_files import read_picture

if TYPE_CHECKING:
    from argparse import Namespace

    from PIL.Image import Image

    from mptrain.config.schema import Config
    from mptrain.workloads.base.new_inputs import NewInputs


def export(arguments: Namespace) -> int:
    """Write the weights or the network of a run's checkpoint to a file, and print how to load it.

    Args:
        arguments: Parsed command line: the run, options such as ``--fp16``, and ``extensions.allow=``.

    Returns:
        The exit code 0.

    Raises:
        MptrainError: An argument is invalid, the run has no usable checkpoint, or the file cannot be written.
    """
    if odd := [word for word in arguments.overrides if not is_allow_override(word)]:
        raise UsageError(f"export takes no KEY=VALUE but extensions.allow, and got '{odd[0]}'", "remove it")
    done = export_run(
        arguments.words[0],
        "best" if arguments.best else "last",
        torch.float16 if arguments.fp16 else torch.float32,
        average=not arguments.raw,
        form=arguments.format,
        output=None if arguments.output is None else Path(arguments.output),
        trusted=arguments.overrides,
    )
    warn(done.warnings)
    kind = "averaged weights" if done.averaged else "weights"
    dtype = "float16" if arguments.fp16 else "float32"
    rows = [
        ("file", str(done.path)),
        ("content", f"{kind} of step {done.step:,}, {done.tensors} tensors, {dtype}, {readable_bytes(done.bytes)}"),
        *(_weights(done) if done.network is None else _network(done.path, done.network)),
        ("data", f"{done.data}: labels and input preparation" if done.data.exists() else ""),
    ]
    if done.network is None:
        line = shlex.join(["mptrain", *_words(done.config), f"model.weights={done.path}"])
        rows.append(("fine-tune", search_path(done.config.extensions.allow) + line))
    print_rows("exported", rows)
    return EXIT_OK


def _weights(done: Export) -> list[tuple[str, str]]:
    """Return rows that show how to load exported weights."""
    reader = f"torch.load({str(done.path)!r}, weights_only=True)"
    if done.form == "safetensors":
        reader = f"safetensors.torch.load_file({str(done.path)!r})"
    return [("load", f"model.load_state_dict({reader})"), ("model", _call(done))]


def _network(path: Path, network: ExportedNetwork) -> list[tuple[str, str]]:
    """Return rows about an exported network: what it takes and returns, its check, and how to run it."""
    load, run = f"network = torch.export.load({str(path)!r}).module()", f"network({network.arguments})"
    if path.suffix == ".onnx":
        named = ", ".join(f"{name!r}: {name}" for name in network.inputs)
        load, run = f"session = onnxruntime.InferenceSession({str(path)!r})", f"session.run(None, {{{named}}})"
    inputs = "; ".join(f"{name} {described}" for name, described in network.inputs.items())
    by, allowed = number(network.difference), number(network.tolerance)
    check = f"answers differ from torch's by {by} at most ({allowed} is allowed), for 1, 3 and 4 samples, "
    check += f"in {network.checked_with}"
    rows = {"inputs": inputs, "outputs": "; ".join(network.outputs), "checked": check, "load": load, "run": run}
    return [*rows.items()]


def _call(done: Export) -> str:
    """Return the call that constructs the model, including the arguments that depend on the data."""
    model = done.config.model
    known = facts_in(read_object(done.data)) if done.data.exists() else {}
    facts = {
        name: known[name] for name in parameters(model.resolve())[0] if name in known and name not in model.arguments
    }
    arguments = ", ".join(f"{name}={value!r}" for name, value in {**model.arguments, **facts}.items())
    return f"{model.path}({arguments})"


def _words(config: Config) -> list[str]:
    """Return the overrides that select the same model and data, as far as the run records them."""
    groups = ("model.", "dataset", "task", "extensions.")
    words = [word for word in config.overrides if word.lstrip("+~").startswith(groups)]
    words = [word for word in words if not word.startswith("model.weights=")]
    chosen = config.chosen.get("model", "cnn")
    if chosen == config.model.path:  # model= names a target instead of an option
        return [*(word for word in config.overrides if word.startswith("model=")), *words]
    known = chosen in Catalogue([configs_folder()]).groups["model"]
    return [*([] if known else ["--config-dir", "DIR"]), f"model={chosen}", *words]


#: File in the folder of ``--output`` while pictures are missing: which command writes them.
_UNFINISHED = ".unfinished"

#: Columns of the input in lines of text.
_WIDTH = 48

#: Side in pixels to which smaller pictures are enlarged to be annotated, and the colour of annotations.
_SMALLEST, _INK = 256, (200, 48, 0)


def predict(arguments: Namespace) -> int:
    """Print the answers of a run's network to the inputs that the user names.

    Args:
        arguments: Parsed command line: the run, the inputs, overrides, and options such as ``--best``.

    Returns:
        The exit code: 0, or that of unusable data if an input is unusable.

    Raises:
        MptrainError: The run cannot predict, or an input does not exist.
    """
    run, *words = arguments.words
    run = run_folder(run, arguments.overrides)
    if not words:
        raise UsageError("predict needs inputs", "name files or folders, or - for lines of standard input")
    which: Literal["last", "best"] = "best" if arguments.best else "last"
    with contextlib.ExitStack() as stack:
        given = {option.name[2:]: getattr(arguments, option.name[2:]) for option in WRITING}
        writing = {name: value for name, value in given.items() if value is not None}
        loaded = stack.enter_context(
            predictor(run, arguments.overrides, which, average=not arguments.raw, writing=writing)
        )
        if loaded.source.card().get("inputs") == "tensors":
            call = f"mptrain.open_run({run!r}).predict(tensor)"
            raise UsageError(f"{run} takes tensors, and neither files nor texts", f"from Python: {call}")
        with hidden_noted() as hidden:
            files = _files(words, loaded.source, arguments.output) if loaded.source.suffixes else None
        warn(hidden)
        folder = _output(arguments, loaded.source, files)
        unread: list[str] = []
        inputs = _lines(words, loaded.source, unread) if files is None else [path for path, _ in files]
        answers = stack.enter_context(contextlib.closing(loaded.predict(inputs)))
        failed = total = 0
        for total, prediction in enumerate(_with_progress(answers, files), 1):
            answer = {name: value for name, value in prediction.answer.items() if name != "picture"}
            if folder is not None and not prediction.error:
                assert files is not None
                answer["file"] = str(_draw(prediction, folder / files[total - 1][1].with_suffix(".png")))
            if prediction.error:
                failed += 1
                if not arguments.jsonl:
                    warn([f"{elided(prediction.given, 200)}: {prediction.error}"])
                    continue
            if arguments.jsonl:
                messages = {"error": prediction.error, "remark": prediction.remark}
                fields = {
                    "input": prediction.given,
                    **answer,
                    **{name: text for name, text in messages.items() if text},
                }
                say(as_json(fields))
            else:
                say(f"{elided(prediction.given, _WIDTH):<{_WIDTH}}  {_in_words(answer)}")
        if folder is not None:
            (folder / _UNFINISHED).unlink(missing_ok=True)
    warn(unread)
    failed, total = failed + len(unread), total + len(unread)
    if failed:
        warn([f"{counted(failed, 'input')} of {total:,} cannot be used"])
    return EXIT_DATA if failed else EXIT_OK


def _files(words: Sequence[str], source: NewInputs, output: str | None) -> list[tuple[str, PurePath]]:
    """Return the files in their order, each with its path below the argument; raise DataError if there is none."""
    written = None if output is None else expanded(output).absolute()  # by this command, when it was killed
    files: list[tuple[str, PurePath]] = []
    problems = []
    for word in words:
        if word == "-":
            lines = [os.fsdecode(line.strip(b"\r\n")) for line in sys.stdin.buffer if line.strip()]
            problems += [f"{line} is no file" for line in lines if not PurePath(line).name]
            files += [(line, PurePath(PurePath(line).name)) for line in lines]
            continue
        path = expanded(word)
        if os.path.isdir(path):  # noqa: PTH112 (Path.is_dir raises for names that no file can have)
            inside = files_below(path, tuple(source.suffixes), special=True)
            if written != path.absolute():
                inside = [file for file in inside if written not in file.absolute().parents]
            files += [(str(file), file.relative_to(path)) for file in inside]
            if not inside:
                problems.append(f"no file in {path} ends in {', '.join(sorted(source.suffixes))}")
        else:
            files.append((str(path), PurePath(path.name)))
    paths = [path for path, _ in files]
    if not problems and not any(map(os.path.exists, paths)):  # of a name that no file can have it is False
        problems = [f"there is no {path}" for path in paths] or ["standard input names no file"]
    if problems:
        raise DataError(listed(problems, 5, "; "), "check the paths")
    return files


def _lines(words: Sequence[str], source: NewInputs, unread: list[str]) -> Iterator[str]:
    """Yield the lines of text files, or those that the source reads from a file.

    Of several files, ``unread`` gets what is wrong with those that have none.
    """
    for word in words:
        try:
            yield from source.inputs_in(word) or lines_of(word)
        except (DataError, StorageError) as error:
            if len(words) == 1:
                raise
            unread.append(str(error))


def lines_of(word: str) -> Iterator[str]:
    """Yield the lines of a text file, or of standard input; bytes that are not UTF-8 become lone surrogates."""
    if word == "-":
        yield from _decoded(sys.stdin.buffer, "standard input")
        return
    file = expanded(word)
    if not os.path.exists(file):  # noqa: PTH110 (Path.exists raises for names that no file can have)
        raise DataError(f"there is no file {word}", "give files with a text in each line, or - for standard input")
    with storage_errors(file, "read"), open_to_read(file) as lines:
        yield from _decoded(lines, word)


def _decoded(lines: Iterable[bytes], name: str) -> Iterator[str]:
    empty = True
    for line_number, line in enumerate(lines, 1):
        text = line.decode("utf-8-sig" if line_number == 1 else "utf-8", "surrogateescape").rstrip("\r\n")
        if text.strip():  # a blank line is no text
            empty = False
            yield text
    if empty:
        raise DataError(f"{name} has no text", "give a text in each line")


def _with_progress(answers: Iterator[Prediction], files: Sequence[object] | None) -> Iterator[Prediction]:
    """Yield the answers, with a progress bar on standard error if only that is a terminal."""
    if sys.stdout.isatty() or not sys.stderr.isatty() or files is None:
        yield from answers
        return
    from rich.console import Console
    from rich.progress import Progress

    console = Console(file=sys.stderr)
    with Progress(console=console, transient=True, redirect_stdout=False, redirect_stderr=False) as bar:
        yield from bar.track(answers, len(files), description="predicting")


def _in_words(answer: Mapping[str, Any]) -> str:
    if "class" in answer:
        return f"{answer['class'] or 'not finite'}  {number(answer['probability'])}"
    if "objects" in answer:
        objects = [f"{detection['class']} {number(detection['score'])}" for detection in answer["objects"]]
        return listed(objects, 8) if objects else "no objects"
    if "loss" in answer:
        return f"perplexity {number(answer['perplexity'])}  {plain(answer.get('continuation', ''))}"
    return plain("  ".join(map(str, answer.values())))


def _output(arguments: Namespace, source: NewInputs, files: Sequence[tuple[str, PurePath]] | None) -> Path | None:
    """Return the folder for pictures, made if missing; raise UsageError if it is needed or cannot be used.

    It is new or empty, or holds a part of the pictures of the same command, which was killed or failed.
    """
    name: str | None = arguments.output
    makes_pictures = source.card().get("inputs") == "photos"
    if name is None:
        if makes_pictures:
            raise UsageError("the answers of this run are pictures", "give a folder for them: --output FOLDER")
        return None
    if files is None or source.card().get("inputs") == "recordings":
        raise UsageError("--output is for pictures", "leave it out, and redirect the output: > FILE")
    folder = expanded(name)
    if len({name.with_suffix("") for _, name in files}) < len(files):
        raise UsageError("two inputs have the same name", "name one folder that has them all, each with its own name")
    require_outside_runs(folder)
    same = [arguments.words[0], arguments.overrides, arguments.best, arguments.raw, [given for given, _ in files]]
    command, marker = hashlib.sha256(json.dumps(same).encode()).hexdigest(), folder / _UNFINISHED
    for directory in {folder, *(folder / name.parent for _, name in files)}:
        remove_drafts(directory)
    if folder.is_dir() and any(folder.iterdir()) and not (marker.is_file() and read_text(marker) == command):
        raise UsageError(f"--output {folder} is not empty", "choose a new folder")
    with storage_errors(folder, "create"):
        folder.mkdir(parents=True, exist_ok=True)
    write_atomically(marker, command)
    return folder


def _draw(prediction: Prediction, file: Path) -> Path:
    """Write the picture that is the answer, or the input with the answer drawn into it."""
    from PIL import Image

    if prediction.picture is not None:
        pixels = prediction.picture.permute(1, 2, 0).squeeze(2).numpy()
        picture = Image.fromarray(pixels)
    else:
        picture = _annotated(prediction)
    picture.save(content := io.BytesIO(), format="PNG")
    with storage_errors(file):
        file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, content.getvalue(), durable=False)
    return file


def _annotated(prediction: Prediction) -> Image:
    """Return the picture of an input with its class, or its objects and their boxes, small ones enlarged."""
    from PIL import ImageDraw, ImageFont

    picture = read_picture(prediction.given, 3, Faults("skip"))
    by = max(1, _SMALLEST // max(picture.size))
    picture = picture.resize((picture.width * by, picture.height * by), 0)
    side = min(picture.size)
    pen, font = ImageDraw.Draw(picture), ImageFont.load_default(max(12, side // 25))
    whole = {"class": prediction.answer.get("class"), "score": prediction.answer.get("probability"), "box": None}
    for detection in prediction.answer.get("objects", [whole]):
        corner = (0.0, 0.0)
        if detection["box"] is not None:
            box = [edge * by for edge in detection["box"]]
            pen.rectangle(box, outline=_INK, width=max(2, side // 200))
            corner = (max(0.0, box[0]), max(0.0, box[1]))
        text = f"{detection['class'] or 'not finite'} {number(detection['score'])}"
        pen.rectangle(pen.textbbox(corner, text, font), fill=_INK)
        pen.text(corner, text, (255, 255, 255), font)
    return picture
