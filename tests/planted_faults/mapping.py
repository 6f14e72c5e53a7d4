"""The tests that look at a module: its own file, the folder of its package, and tests of other folders by this table."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[2]

#: Tests of whole runs, or of other packages, that look at the modules of a package; at a module where its name is given.
BESIDES = {
    "engine": (
        "integration/test_workloads.py",
        "integration/test_giving_up.py",
        "integration/test_classification.py",
        "integration/test_killed.py",
    ),
    "precision": ("engine/test_rehearsal.py", "engine/test_step.py", "integration/test_workloads.py"),
    "scaler": ("engine/test_step.py", "engine/test_resume.py", "integration/test_giving_up.py"),
    "optimizer": (
        "engine/test_step.py",
        "engine/test_step_runner.py",
        "engine/test_resume.py",
        "integration/test_workloads.py",
    ),
    "numerics": ("engine/test_step.py", "probe/test_histograms.py", "integration/test_recommended_scales.py"),
    "schedule": ("engine/test_step.py",),
    "runlog": (
        "engine/test_saving.py",
        "engine/test_resume.py",
        "security/test_odd_files.py",
        "integration/test_killed.py",
    ),
    "parallel": ("engine/test_sample_metrics.py", "engine/test_step.py"),
    "comparison": ("sweep/test_comparisons.py", "integration/test_compare.py"),
    "probe": ("engine/test_step_log.py", "inspection/test_diagnosis.py", "integration/test_diagnose.py"),
    "inspection": ("integration/test_diagnose.py",),
    "run": ("integration/test_giving_up.py", "integration/test_killed.py"),
    "sweep": ("integration/test_sweeps.py", "integration/test_compare.py"),
    "recipe": ("cli/test_reproduce.py",),
    "report": ("security/test_odd_files.py",),
    "cli": ("security/test_terminals.py", "integration/test_command_line.py"),
    "build": ("integration/test_obstacles.py", "engine/test_resume.py", "integration/test_workloads.py"),
    "config": ("cli/test_bad_input.py", "security/test_strangers_files.py", "integration/test_obstacles.py"),
    "workloads": (
        "engine/test_step.py",
        "engine/test_evaluate.py",
        "integration/test_other_data.py",
        "integration/test_language.py",
        "integration/test_detect.py",
        "integration/test_workloads.py",
    ),
    "logger": ("integration/test_command_line.py",),
    "system": ("engine/test_resume.py", "engine/test_evaluate.py", "security", "cli"),
}


def stages_of(fault):
    """Return the tests that look at a fault, cheapest first, as three lists of paths below the root.

    The first has the file that is named after the module and what the fault names, the second the rest of the package's folder, the
    third what the table adds.
    """
    module = PurePosixPath(fault.file)
    package = module.parts[0].removesuffix(".py")
    room = module.parts[: 2 if package == "workloads" else 1] if len(module.parts) > 1 else ()
    own = "/".join(["tests", *room, f"test_{module.stem}.py"])
    named = [own] if (ROOT / own).exists() else []
    named += [f"tests/{name}" for name in fault.tests]
    folder = _files("/".join(["tests", *room])) if room else []
    besides = [path for name in BESIDES[package] for path in _files(f"tests/{name}")]
    stages, seen = [], set()
    for stage in (named, folder, besides):
        stages.append([path for path in dict.fromkeys(stage) if path not in seen])
        seen |= set(stage)
    return stages


def _files(path):
    """Return a test file, or those of a folder; a path that does not exist stays, for whoever reports it."""
    if (ROOT / path).is_dir():
        return sorted(one.relative_to(ROOT).as_posix() for one in (ROOT / path).glob("test_*.py"))
    return [path]
