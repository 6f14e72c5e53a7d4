import pytest

from mptrain.config.launcher import Launcher, read_launcher
from mptrain.system.errors import ConfigError


def written(tmp_path, text):
    path = tmp_path / "slurm.yaml"
    path.write_text(text)
    return str(path)


def test_a_file_says_what_jobs_ask_for_and_slurm_alone_is_enough(tmp_path):
    found = read_launcher(written(tmp_path, "partition: gpu\ntimeout_min: 240\nmem_gb: 16\nconstraint: a100&ib\n"))
    assert found == Launcher(partition="gpu", timeout_min=240, mem_gb=16.0, constraint="a100&ib")
    assert read_launcher("slurm") == Launcher()


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("partition: |\n  gpu\n  rm -rf ~\n", "partition=gpu"),  # what submitit writes is a script
        ("partition: |\n  gpu\n", "must be letters"),  # the end of a line alone, too
        ("partition: gpu --wrap=id\n", "partition=gpu --wrap=id: must be letters"),
        ("comment: $(id)\n", "comment="),
        ("job_name: -x\n", "job_name=-x: must be"),
        ("setup: [module load x]\n", "unknown key 'setup'"),
        ("python: evil\n", "unknown key 'python'"),
        ("srun_args: [--task-prolog=x]\n", "unknown key 'srun_args'"),
        ("additional_parameters: {prolog: x}\n", "unknown key 'additional_parameters'"),
        ("word: local\n", "unknown key 'word'"),
        ("partitoin: gpu\n", "unknown key 'partitoin'"),
        ("timeout_min: 0\n", "timeout_min=0: must be a whole number, at least 1"),
        ("timeout_min: 2\nsignal_delay_s: 120\n", "120 seconds is not less than timeout_min"),
        ("executor: kubernetes\n", "executor=kubernetes: must be"),
        ("executor: local\n", "executor=local: must be"),
        ("partition: ${oc.env:HOME}\n", "partition="),
        ("- gpu\n", "not a mapping"),
        ("a: &a [1,1,1,1]\n" + "".join(f"{y}: &{y} [*{x},*{x},*{x},*{x}]\n" for x, y in zip("abcdefghijk", "bcdefghijkl", strict=True)), "expand"),
    ],
)  # fmt: skip
def test_what_is_refused(tmp_path, text, what):
    with pytest.raises(ConfigError) as refused:
        read_launcher(written(tmp_path, text))
    assert what in str(refused.value)


def test_a_missing_file_names_what_there_is():
    with pytest.raises(ConfigError) as refused:
        read_launcher("nowhere.yaml")
    assert refused.value.problems[0].hint == "name a YAML file, or slurm; without --launcher, --jobs N trains here"
