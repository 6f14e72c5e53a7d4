"""The tests that look at a module: its own file, the folder of its package, and tests of other folders by this table."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[2]

#: Tests of whole runs, or of other packages, that look at the modules of a package: files without their ending, and folders.
BESIDES = {
    "engine": "integration/test_workloads integration/test_giving_up integration/test_classification integration/test_killed "
    "lab/test_diagnose integration/test_diagnose",
    "precision": "engine/test_rehearsal engine/test_step integration/test_workloads",
    "scaler": "engine/test_step engine/test_resume integration/test_giving_up",
    "optimizer": "engine/test_step engine/test_step_runner engine/test_resume integration/test_workloads",
    "numerics": "engine/test_step engine/test_histograms integration/test_recommended_scales",
    "schedule": "engine/test_step",
    "runlog": "engine/test_saving engine/test_resume security/test_odd_files integration/test_killed",
    "parallel": "engine/test_sample_metrics engine/test_step",
    "lab": "integration/test_diagnose",
    "study": "study/comparison/logs study/sweep/test_comparisons integration/test_sweeps integration/test_compare cli/test_reproduce",
    "run": "integration/test_giving_up integration/test_killed engine/test_fingerprints integration/test_obstacles engine/test_resume integration/test_workloads",
    "report": "security/test_odd_files",
    "api": "api/test_train docs/test_examples",
    "cli": "security/test_terminals integration/test_command_line",
    "config": "cli/test_bad_input security/test_strangers_files integration/test_obstacles",
    "workloads": "engine/test_step engine/test_evaluate integration/test_other_data integration/test_language "
    "integration/test_detect integration/test_workloads",
    "integrations": "engine/test_overflow_attribution",
    "logger": "integration/test_command_line",
    "system": "engine/test_resume engine/test_evaluate security cli",
}


def stages_of(fault):
    """Return the tests that look at a fault, cheapest first, as three lists of paths below the root.

    The first has the file that is named after the module and what the fault names, the second the rest of the package's folder, the
    third what the table adds.
    """
    module = PurePosixPath(fault.file)
    package = module.parts[0].removesuffix(".py")
    room = module.parts[: 2 if package in ("workloads", "study") else 1] if len(module.parts) > 1 else ()
    own = "/".join(["tests", *room, f"test_{module.stem}.py"])
    named = [own] if (ROOT / own).exists() else []
    named += [f"tests/{name}" for name in fault.tests]
    folder = _files("/".join(["tests", *room])) if room else []
    besides = [path for name in BESIDES[package].split() for path in _files(f"tests/{name}")]
    stages, seen = [], set()
    for stage in (named, folder, besides):
        stages.append([path for path in dict.fromkeys(stage) if path not in seen])
        seen |= set(stage)
    return stages


def _files(path):
    """Return the test files of a folder, or a test file, which need not exist."""
    if (ROOT / path).is_dir():
        return sorted(one.relative_to(ROOT).as_posix() for one in (ROOT / path).glob("test_*.py"))
    return [f"{path}.py"]
