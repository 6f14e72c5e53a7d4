"""No step waits for the device: the sources that run in it hold nothing that reads a tensor on the host.

So what a step does only now and then is seen, too; `test_steps_on_meta` has what runs in every step, networks included.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.loops import each

PACKAGE = Path(__file__).parents[1] / "mptrain"
#: Methods that bring a tensor's values to the host, or may.
READING_METHODS = frozenset({"item", "tolist", "cpu", "numpy", "nonzero", "masked_select", "unique", "is_nonzero"})
READING_CALLS = frozenset({"bool", "float", "int", "print", "repr", "str", "max", "min", "sum", "any", "all", "sorted"})
SOURCES = [
    *(PACKAGE / "engine" / f"{name}.py" for name in ("step", "buffer_guard", "ring")),
    *sorted((PACKAGE / "numerics").glob("*.py")),
    *sorted((PACKAGE / "scaler").glob("*.py")),
    *(PACKAGE / "optimizer" / f"{name}.py" for name in ("weights", "updater", "rules")),
    PACKAGE / "schedule" / "rate_table.py",
    PACKAGE / "parallel" / "strategy.py",
    PACKAGE / "parallel" / "sync_batchnorm.py",
]
#: Functions that may read, and why: by file and name.
READING_FUNCTIONS = {
    ("ring.py", "unstack"): "its block is in host memory already, or the device lets nobody copy beside it",
    ("strategy.py", "shard"): "lists modules, once",
    ("strategy.py", "composite_members"): "likewise",
    ("strategy.py", "reduce_measure"): "counts elements, which shapes say",
    ("ring.py", "arrived"): "asks whether a list is empty",
    ("base.py", "resume"): "once, after a restart",
    ("static.py", "resume"): "once, after a restart",
    ("buffer_guard.py", "unharmed"): "around a rehearsal, before the first step",
    ("buffer_guard.py", "_host_copies"): "likewise",
    ("buffer_guard.py", "lasting_reshaped"): "of names alone",
    ("buffer_guard.py", "put_back"): "likewise",
    ("buffer_guard.py", "_restore_reshaped"): "if a buffer has changed its shape in this step",
    ("overflow_check.py", "__call__"): "of `HostJudge`, for a CPU's memory",
    ("overflow_check.py", "_squares"): "of a part of it",
    ("overflow_check.py", "_square_by_rows"): "of a part of it",
    ("overflow_check.py", "square"): "of a part of it",
    ("tensors.py", "memory_order"): "asks for strides",
    ("overflow_check.py", "__init__"): "sums shapes up",
    ("lost_updates.py", "are_lost"): "of names and options, and of what `_is_kept` reads",
    ("lost_updates.py", "_is_kept"): "once a weight, after the first look of a watch",
    ("lost_updates.py", "stuck_at"): "before the first step",
    ("lost_updates.py", "peak_rate"): "likewise",
    ("lost_updates.py", "lost_decays"): "once, after the first look of a watch",
    ("rounding.py", "_in_pieces"): "asks for strides",
    ("rounding.py", "decay_is_lost"): "of values of its own, on a CPU",
    ("tensors.py", "first_element"): "of shapes and ranks alone",
    ("tensors.py", "read_counts"): "its numbers are on the host already",
    ("dynamic.py", "_grows_at"): "where the host has judged, in a CPU's memory",
    ("weights.py", "follow"): "where the host has judged, in a CPU's memory",
    ("updater.py", "_read"): "the one read of a step that the header tells of",
    ("updater.py", "__init__"): "asks for properties of optimizers",
    ("updater.py", "checked"): "of the first updates alone, which may come from any optimizer",
    ("updater.py", "describe"): "counts parameters, before the first step",
    ("updater.py", "load_state_dict"): "once, after a restart",
}
#: Files that hold plain numbers alone.
WITHOUT_TENSORS = frozenset({"formats.py", "exponents.py", "forecast.py", "overflow_limits.py"})


def host_reads(source: str) -> list[tuple[str, int, str]]:
    """Function, line and text of every expression that may read a tensor's value on the host."""
    found: list[tuple[str, int, str]] = []

    def visit(node: ast.AST, function: str) -> None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            function = node.name
        if isinstance(node, ast.Call) and reads(node):
            found.append((function, node.lineno, ast.unparse(node)))
        for child in ast.iter_child_nodes(node):
            visit(child, function)

    visit(ast.parse(source), "")
    return found


def reads(call: ast.Call) -> bool:
    if isinstance(call.func, ast.Attribute):
        return call.func.attr in READING_METHODS or (call.func.attr == "to" and any(map(is_cpu, arguments(call))))
    return isinstance(call.func, ast.Name) and call.func.id in READING_CALLS and bool(arguments(call))


def arguments(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def is_cpu(argument: ast.expr) -> bool:
    """``"cpu"`` or ``torch.device("cpu")``."""
    return any(isinstance(node, ast.Constant) and node.value == "cpu" for node in ast.walk(argument))


def is_allowed(file: str, function: str) -> bool:
    return (file, function) in READING_FUNCTIONS or file in WITHOUT_TENSORS


@each("path", SOURCES)
def test_a_source_of_the_step_reads_nothing_on_the_host(path):
    found = [
        f"{path.name}:{line} in {function}: {text}"
        for function, line, text in host_reads(path.read_text())
        if not is_allowed(path.name, function)
    ]
    assert found == []


def test_every_function_that_may_read_does_so_and_none_of_them_runs_in_a_step():
    reading = {(path.name, function) for path in SOURCES for function, _, _ in host_reads(path.read_text())}
    assert set(READING_FUNCTIONS) <= reading
    in_a_step = {
        *[
            "train_step",
            "judge",
            "update",
            "copy_to_params",
            "copy_from_params",
            "accumulate",
            "zero_grad",
            "after",
            "apply",
            "snapshot",
            "restore",
            "record",
        ],
        *[
            "loss",
            "gradient_norms",
            "clip_coefficient",
            "tensors",
            "rate",
            "advance",
            "float32_norm",
            "_float32_total",
            "_tensor_by_tensor",
            "_moved",
        ],
    }
    assert not in_a_step & {function for _, function in READING_FUNCTIONS}


def test_files_without_tensors_import_no_torch():
    for path in SOURCES:
        if path.name in WITHOUT_TENSORS:
            imported = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Import)]
            assert "torch" not in {name.name.split(".")[0] for node in imported for name in node.names}


@each(
    "planted",
    [
        *("verdict.overflow.item()", "verdict.norms.tolist()", "loss.cpu()", "loss.detach().cpu()", "loss.numpy()"),
        *("loss.to('cpu')", "loss.to(device='cpu')", "loss.to(torch.device('cpu'), torch.float32)", "float(loss)"),
        *("float(loss.sum())", "int(self.updates)", "bool(verdict.skip)", "print(loss)", "norms.nonzero()"),
        *("torch.is_nonzero(flag)", "max(norms)", "sum(norms)", "any(norms.isfinite())", "str(scale)"),
    ],
)
def test_each_kind_of_host_read_is_found_where_it_is_planted(planted):
    for body in (
        f"def step(loss):\n    {planted}\n",
        f"def step(loss):\n    value = [1 + {planted} for _ in ()]\n    return value\n",
        f"class Learner:\n    def advance(self):\n        if {planted}:\n            return lambda: {planted}\n",
    ):
        reads_found = host_reads(body)
        assert planted in {text for _, _, text in reads_found}
        assert not any(is_allowed("step.py", function) for function, _, _ in reads_found)


@pytest.mark.parametrize(
    "honest", ["loss.to(torch.float32)", "scale.to(device)", "x.clamp(max=1.0)", "x.max()", "float()"]
)
def test_what_stays_on_the_device_is_not_reported(honest):
    assert host_reads(f"def step(x):\n    return {honest}\n") == []
