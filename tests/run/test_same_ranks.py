"""A rank that would train something else than rank 0 is refused by name, on all ranks, before anything is written."""

from __future__ import annotations

import socket
import sys
from dataclasses import replace

import pytest

from mptrain.config.compose import compose
from mptrain.run import consistency
from mptrain.run.consistency import require_same_ranks
from mptrain.system.errors import ConfigError, user_packages
from tests.parallel.warm_commands import begin_command
from tests.pretended_ranks import each_rank
from tests.small_runs import environment

WORDS = ("model=mlp", "dataset.train_samples=24", "dataset.val_samples=8", "train.batch_size=8", "train.epochs=1")


def refused(*each: tuple[str, ...]) -> list[str]:
    """What ranks say that were started with these words; the same on all of them."""
    configs = [compose([*WORDS, *words]) for words in each]

    def check(comm):
        try:
            require_same_ranks(configs[comm.rank], comm)
        except ConfigError as error:
            return [problem.what for problem in error.problems]
        return []

    said = each_rank(len(each), check)
    assert all(one == said[0] for one in said)
    return said[0]


def test_keys_that_differ_are_named_with_their_ranks():
    assert refused(("optimizer.lr=0.1",), ("optimizer.lr=0.01",), ("optimizer.lr=0.1",)) == [
        "rank 1 has optimizer.lr=0.01, rank 0 has 0.1"
    ]
    assert refused((), ("seed=3", "checkpoint.every_steps=2"), ("seed=3",)) == [
        "ranks 1, 2 have seed=3, rank 0 has 0",
        "rank 1 has checkpoint.every_steps=2, rank 0 has null",
    ]
    absent = refused(("optimizer=adamw",), ("optimizer=sgd",))
    assert "rank 1 has optimizer.momentum=0.9, rank 0 has none" in absent
    assert any(one.startswith("rank 1 has no optimizer.") for one in absent)


def test_many_differences_are_counted():
    said = refused(("model=mlp", "optimizer=adamw", "schedule=linear"), ("model=cnn", "optimizer=sgd", "seed=4"))
    assert len(said) == 9
    assert said[-1].endswith("more differences between ranks")


def test_what_each_rank_may_have_of_its_own_is_not_refused():
    own = (
        ("run.name=a", "threads=1", "device=cpu"),
        ("run.root=elsewhere", "threads=2", "logger=tensorboard", "run.resume=auto", "run.name=b"),
        ("extensions.allow=[other.*]",),
    )
    assert refused(*own) == []


def test_sources_are_compared_by_content_wherever_they_lie(tmp_path, monkeypatch):
    """A class that is named, a module of its package, and one beside it."""
    files = {
        "own/__init__.py": "",
        "own/net.py": "from own import parts\nimport beside\n",
        "own/parts.py": "",
        "beside.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    __import__("own.net")
    user_packages.add("own")
    try:
        found = consistency._code_of_user()
        assert {name: file for name, (_, file) in found.items() if name.partition(".")[0] in ("own", "beside")} == {
            "own": "__init__.py", "own.net": "net.py", "own.parts": "parts.py", "beside": "beside.py",
        }  # fmt: skip
        ours = consistency._Ingredients("", found, {})
        for name, file in (("own.parts", "parts.py"), ("beside", "beside.py")):
            theirs = replace(ours, code={**found, name: ("another digest", file)})
            assert list(theirs.differences(ours)) == [f"other code of {name} ({file}) than rank 0"]
        (tmp_path / "own/parts.py").write_text("# changed")
        assert list(consistency._Ingredients("", consistency._code_of_user(), {}).differences(ours)) == [
            "other code of own.parts (parts.py) than rank 0"
        ]
        one_more = replace(ours, code={**found, "own.tracker": ("of rank 0 alone", "tracker.py")})
        assert list(ours.differences(one_more)) == list(one_more.differences(ours)) == []
    finally:
        user_packages.discard("own")
        for name in ("own", "own.net", "own.parts", "beside"):
            sys.modules.pop(name, None)


def test_versions_that_differ_are_named():
    ours = consistency._Ingredients("", {}, consistency._versions())
    assert {"mptrain", "torch", "python", "numpy"} <= ours.versions.keys()
    theirs = replace(ours, versions={**ours.versions, "torch": "2.11.0"})
    assert list(theirs.differences(ours)) == [f"torch 2.11.0, rank 0 has {ours.versions['torch']}"]


NET = """
from torch import nn

class Net(nn.Module):
    def __init__(self, num_classes, **facts):
        super().__init__()
        import late
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), late.activation(), nn.Linear(16, num_classes))

    def forward(self, images):
        return self.layers(images)
"""
LATE = "from torch.nn import ReLU as activation\n"
OWN = ("model._target_=net.Net", "extensions.allow=[net]", "dataset.image_size=8", "dataset.channels=1")


def started(folder, ranks: list[tuple[str, ...]], files: list[dict[str, str]], first: tuple[str, ...] = WORDS):
    """Ranks as torchrun starts them, each with words and files of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    begun = []
    for rank, (words, texts) in enumerate(zip(ranks, files, strict=True)):
        (code := folder / f"code-{rank}").mkdir(exist_ok=True)
        for name, text in texts.items():
            (code / name).write_text(text)
        there = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": len(ranks), "LOCAL_WORLD_SIZE": len(ranks)}
        there |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
        path = f"{environment()['PYTHONPATH']}:{code}"
        variables = {name: str(value) for name, value in there.items()}
        begun.append(begin_command(*first, *words, cwd=folder, PYTHONPATH=path, **variables))
    return [one.finish(120) for one in begun]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("ranks", "files", "said"),
    [
        ([(), ("train.epochs=2",)], [{}, {}], ["rank 1 has train.epochs=2, rank 0 has 1"]),
        (
            [("distributed=fsdp2",)] * 2 + [("distributed=fsdp2", "optimizer.momentum=0.5")],
            [{}] * 3,
            ["rank 2 has optimizer.momentum=0.5, rank 0 has 0.9"],
        ),
        (
            [OWN, OWN],
            [{"net.py": NET, "late.py": LATE}, {"net.py": NET, "late.py": LATE.replace("ReLU", "Tanh")}],
            ["rank 1 has other code of late (late.py) than rank 0"],
        ),
        (
            [OWN, OWN, OWN],
            [{"net.py": NET, "late.py": LATE}] * 2
            + [{"net.py": NET + "\nimport torch\ntorch.__version__ = '2.11.0'\n", "late.py": LATE}],
            ["rank 2 has torch 2.11.0, rank 0 has", "rank 2 has other code of net (net.py) than rank 0"],
        ),
    ],
    ids=["epochs", "key under fsdp2", "code imported late", "version and code"],
)
def test_a_rank_that_differs_ends_all_ranks_before_a_step(tmp_path, ranks, files, said):
    ended = started(tmp_path, ranks, files)
    assert [one.returncode for one in ended] == [2] * len(ranks), [one.stderr for one in ended]
    for words in said:
        assert ended[0].stderr.count(words) == 1, ended[0].stderr
    assert ended[0].stderr.count("error: ") == len(said)
    assert not any(one.stderr for one in ended[1:])
    assert not (tmp_path / "outputs").exists()


@pytest.mark.distributed
def test_a_resumed_rank_that_differs_is_refused_and_the_run_goes_on_without_it(tmp_path):
    code = {"net.py": NET, "late.py": LATE}
    words = (*OWN, "run.name=r")
    ended = started(tmp_path, [words, (*words, "threads=1")], [code, code])
    assert [one.returncode for one in ended] == [0, 0], ended[0].stderr
    before = (tmp_path / "outputs/r/run.json").read_bytes()
    again = ("resume", "r", "train.epochs=2", "extensions.allow=[net]")
    other = started(tmp_path, [(), ("optimizer.lr=0.5",)], [code, code], again)
    assert [one.returncode for one in other] == [2, 2]
    assert "error: rank 1 has optimizer.lr=0.5, rank 0 has 0.05" in other[0].stderr
    assert (tmp_path / "outputs/r/run.json").read_bytes() == before
    ended = started(tmp_path, [(), ()], [code, code], again)
    assert [one.returncode for one in ended] == [0, 0], ended[0].stderr
