"""Commands of Slurm's that run a batch file at once, on this machine: enough to see what is asked of a real one."""

from __future__ import annotations

import itertools
import textwrap

SCRIPTS = {
    # Jobs get the folder number of their batch file; what was submitted is kept.
    "sbatch": """
        import os, pathlib, shutil, subprocess, sys
        home = pathlib.Path(__file__).parent
        number = str(int((home / "first").read_text()) + len(list(home.glob("*.sh"))))
        shutil.copy(sys.argv[1], home / f"{number}.sh")
        child = subprocess.Popen(
            ["bash", str(home / f"{number}.sh")], env={**os.environ, "SLURM_JOB_ID": number}, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )
        (home / f"{number}.pid").write_text(str(child.pid))
        print(f"Submitted batch job {number}")
    """,
    "srun": """
        import os, sys
        words = sys.argv[1:]
        while words[0].startswith("--"):
            del words[: 2 if words[0] in ("--output", "--error") else 1]
        os.execvp(words[0], words)
    """,
    "sacct": """
        import pathlib, sys
        home = pathlib.Path(__file__).parent
        print("JobID|State|NodeList")
        for path in home.glob("*.pid"):
            state = pathlib.Path(f"/proc/{path.read_text()}/stat")
            alive = state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z"
            again = path.with_suffix(".again").exists()
            print(f"{path.stem}|{'PENDING' if again else 'RUNNING' if alive else 'FAILED'}|here")
    """,
    "scontrol": """
        import os, pathlib, subprocess, sys
        home, number = pathlib.Path(__file__).parent, sys.argv[2]
        with (home / "requeued").open("a") as file:
            file.write(number + chr(10))
        child = subprocess.Popen(
            ["bash", str(home / f"{number}.sh")], env={**os.environ, "SLURM_JOB_ID": number}, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )
        (home / f"{number}.pid").write_text(str(child.pid))
    """,
    "scancel": """
        import os, pathlib, signal, sys
        home = pathlib.Path(__file__).parent
        os.killpg(int((home / f"{sys.argv[1]}.pid").read_text()), signal.SIGTERM)
    """,
}


#: submitit remembers of a number that its job has ended.
_NUMBERS = itertools.count(1000, 1000)


def install(folder, python):
    """Put the commands into a folder, to be the first of PATH; the file ``first`` has the number of the first job."""
    folder.mkdir()
    (folder / "first").write_text(str(next(_NUMBERS)))
    for name, text in SCRIPTS.items():
        (folder / name).write_text(f"#!{python}\n{textwrap.dedent(text).lstrip()}")
        (folder / name).chmod(0o755)
    return folder
