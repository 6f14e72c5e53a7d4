"""The pieces of a run on several ranks, each by itself."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from mptrain.engine.batch_sync import DistributedBatchSync
from mptrain.engine.fingerprints import digest_of_samples, sample_digests
from mptrain.engine.interrupt import SignalListener
from mptrain.engine.sample_metrics import SampleMetrics
from mptrain.numerics.overflow_check import LargestMagnitude, ShareAbove
from mptrain.parallel.communicator import SINGLE_PROCESS
from mptrain.parallel.launch import reap
from mptrain.parallel.torchrun import RankFailed, describe_ended_rank, error_for_other_ranks, is_rank_loss
from mptrain.runlog.checkpoint_data import insert_shards, write_shards
from mptrain.runlog.manifest import Manifest, manifest_name, read_manifest
from mptrain.system.errors import CheckpointError, ConfigError, DataError, StorageError
from mptrain.workloads.base.batch import Batch
from mptrain.workloads.base.data_files import Faults
from mptrain.workloads.base.loader import Loader, fetch_part
from mptrain.workloads.images.datasets.digits import load_digits
from tests.pretended_ranks import Pretended, each_rank
from tests.small_runs import TINY, environment, parts_of


@pytest.mark.parametrize("ranks", [2, 3, 7])
def test_the_parts_of_a_batch_are_the_batch_in_its_order(ranks):
    split = load_digits(image_size=8, train_samples=50).train
    whole = list(Loader(split, 16, 3, shuffle=True).batches(1))
    parts = [list(Loader(split, 16, 3, shuffle=True, rank=rank, world_size=ranks).batches(1)) for rank in range(ranks)]
    for batch, *own in zip(whole, *parts, strict=True):
        real = [part for part in own if not part.is_dummy]
        assert torch.equal(torch.cat([part.targets for part in real]), batch.targets)
        assert max(part.samples for part in real) - min(part.samples for part in real) <= 1
        assert all(part.samples == 1 for part in own if part.is_dummy)
        assert len(own) == ranks


def test_shares_of_parts_add_up_to_one_and_a_stand_in_has_none():
    tokens = torch.zeros(5, 2)
    one, other = (Batch(tokens, tokens, counts, whole=20) for counts in ((1, 2, 3, 4, 5), (1, 1, 1, 1, 1)))
    assert one.share(one) + other.share(other) == 1.0
    assert sum(one.share(part) for part in one.split(2)) + other.share(other) == pytest.approx(1.0)
    assert one.share(replace(one, is_dummy=True)) == 0.0


def test_a_sample_has_one_digest_whatever_pads_it():
    row = torch.tensor([[5, 0, 7, 0]])
    assert sample_digests(Batch(row, row)) == sample_digests(Batch(row[:, :3], row[:, :3]))
    wide = torch.rand(1, 2000)
    padded = torch.cat([wide, torch.zeros(1, 800)], 1)
    assert sample_digests(Batch(wide, row)) == sample_digests(Batch(padded, row))
    assert sample_digests(Batch(wide, row)) != sample_digests(Batch(wide, row + 1))


def test_what_ranks_have_gathered_is_put_in_the_order_of_one():
    def batch(first, count):
        values = torch.arange(first, first + count, dtype=torch.float64)
        return Batch(values, values)

    alone = SampleMetrics()
    for one in (batch(0, 5), batch(5, 2)):
        alone.add(one, {"loss": one.inputs}, one.inputs.tolist(), sample_digests(one))

    def gather(ranks):
        own = SampleMetrics()
        for first, counts in ((0, (2, 2, 1)), (5, (1, 1, 0))):
            begin, count = first + sum(counts[: ranks.rank]), counts[ranks.rank]
            if count:
                part = batch(begin, count)
                own.add(part, {"loss": part.inputs}, part.inputs.tolist(), sample_digests(part))
            else:
                own.skip()
        return own.over(ranks)

    for whole in each_rank(3, gather):
        assert whole._answers == alone._answers == list(range(7))
        assert whole.samples == 7
        assert whole.digest == alone.digest == digest_of_samples(sample_digests(batch(0, 7)))
        assert torch.equal(whole._on_host()["loss"], alone._on_host()["loss"])


def strategy_and_guard(ranks, gathered, sizes):
    buffers = {name: torch.full((size,), ranks.rank) for name, size in sizes.items()}
    strategy = SimpleNamespace(
        comm=ranks,
        gathered=gathered,
        broadcast_buffers=lambda tensors: [one.copy_(ranks.broadcast_object(one)) for one in tensors],
    )
    return strategy, SimpleNamespace(lasting_reshaped=buffers, agree=lambda: None)


def turns_of(ranks, batches, heard=None, late=False, gathered=None, sizes=None):
    interrupts = SignalListener()
    interrupts.received = heard
    turns = DistributedBatchSync(interrupts, lambda: late, *strategy_and_guard(ranks, gathered or [], sizes or {}))
    return turns, turns.next(iter(batches))


def a_batch(samples):
    return Batch(torch.zeros(samples, 1), torch.zeros(samples))


def test_turns_are_of_all_ranks():
    answers = each_rank(3, lambda ranks: turns_of(ranks, [replace(a_batch(2), is_dummy=ranks.rank == 2)])[1])
    assert [(turn.samples, turn.terms, turn.batch.whole) for turn in answers] == [(4, 4, 4)] * 3


def test_who_has_no_batch_ends_the_epoch_of_all():
    assert each_rank(2, lambda ranks: turns_of(ranks, [a_batch(2)] if ranks.is_rank_zero else [])[1]) == [None, None]


@pytest.mark.parametrize(("heard", "expected"), [("SIGTERM", "SIGTERM"), ("SIGINT", "SIGINT"), ("SIGUSR1", "SIGTERM")])
def test_a_signal_to_one_rank_is_heard_by_all(heard, expected):
    found = each_rank(2, lambda ranks: turns_of(ranks, [a_batch(1)], None if ranks.is_rank_zero else heard)[0].asked)
    assert found[0] == expected
    assert found[1] == heard


def test_ranks_that_gather_weights_of_other_modules_are_refused():
    def turn(ranks, names, same):
        gathered = [*names] if same or ranks.rank != 1 else [*names[:-1], "experts.1", *names[:1]]
        with contextlib.nullcontext() if same else pytest.raises(ConfigError) as caught:
            turns_of(ranks, [a_batch(1)], gathered=gathered)
        assert not same or gathered == []
        return "" if same else str(caught.value)

    for names in ([], ["a"], ["", "a", "experts.0"]):
        assert each_rank(3, functools.partial(turn, names=names, same=True)) == [""] * 3
        told = f"rank 0 ran {names[-1] if names else 'no other module'} where rank 1 ran experts.1, and each"
        assert all(told in said for said in each_rank(3, functools.partial(turn, names=names, same=False)))


def test_buffers_that_grow_are_those_of_rank_0_or_are_refused():
    def turn(ranks, own):
        turns, _ = turns_of(ranks, [a_batch(1)], sizes={"bank": own(ranks.rank), "cache": 3})
        return [one.tolist() for one in turns._guard.lasting_reshaped.values()]

    assert each_rank(3, lambda ranks: turn(ranks, lambda rank: 2)) == [[[0, 0], [0, 0, 0]]] * 3

    def refused(ranks):
        with pytest.raises(
            ConfigError, match="the buffer bank was given another size or dtype on rank 1 than on rank 0"
        ):
            turn(ranks, lambda rank: 2 + rank)
        return True

    assert all(each_rank(3, refused))


def test_the_clock_of_the_first_rank_counts():
    assert each_rank(2, lambda ranks: turns_of(ranks, [a_batch(1)], late=not ranks.is_rank_zero)[0].late) == [
        False,
        False,
    ]
    assert each_rank(2, lambda ranks: turns_of(ranks, [a_batch(1)], late=ranks.is_rank_zero)[0].late) == [True, True]


def test_an_error_of_one_rank_is_raised_by_all_and_says_whose_it_is():
    def fail(ranks):
        def batches():
            if ranks.rank == 1:
                raise DataError("a picture is damaged", "mend it")
            yield a_batch(1)

        with pytest.raises(DataError) as raised:
            turns_of(ranks, batches())
        return str(raised.value), raised.value.hint, raised.value.exit_code

    first, second = each_rank(2, fail)
    assert first == ("rank 1: a picture is damaged", "mend it", 6)
    assert second == ("a picture is damaged", "mend it", 6)


def test_an_error_of_no_kind_of_ours_is_told_in_a_line():
    error = error_for_other_ranks(ZeroDivisionError("division by zero"), 3)
    assert isinstance(error, RankFailed)
    assert str(error) == "rank 3: ZeroDivisionError: division by zero"
    assert pickle.loads(pickle.dumps(error)).exit_code == error.exit_code


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("[pair.cc:547] Connection closed by peer [127.0.0.1]:2345"), True),
        (RuntimeError("Timed out waiting 1800000ms for recv operation to complete"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("Connection closed by peer"), False),
    ],
)
def test_a_lost_rank_is_told_from_other_trouble(error, expected):
    assert is_rank_loss(error) == expected


def test_measures_of_parts_are_those_of_the_whole():
    grads = [torch.randn(7), torch.randn(4)]
    elements = torch.tensor([7.0, 4.0], dtype=torch.float64)
    for measure in (LargestMagnitude(), ShareAbove(0.5)):
        parts = torch.cat([measure([grad]) for grad in grads])
        assert measure.of_parts(parts, elements).item() == pytest.approx(measure(grads).item())
    assert LargestMagnitude().of_parts(torch.tensor([1.0, torch.nan]), elements).isnan()


def test_alone_every_question_is_answered_by_oneself():
    assert (
        SINGLE_PROCESS.all_reduce_ints([1, 2]),
        SINGLE_PROCESS.all_gather_object(3),
        SINGLE_PROCESS.broadcast_object(4),
        SINGLE_PROCESS.is_rank_zero,
    ) == ([1, 2], [3], 4, True)
    with SINGLE_PROCESS.together(), SINGLE_PROCESS.main_process_first():
        pass


def test_a_manifest_names_parts_in_its_own_folder_only(tmp_path):
    digest = "0" * 64
    manifest = Manifest(
        3, "step-00000003.pt", digest, 1, {}, None, "", parts="step-00000003.parts", part_files={"a": digest}
    )
    path = tmp_path / manifest_name(3)
    path.write_text(manifest.to_json())
    assert read_manifest(path) == manifest
    for wrong in ({"parts": "../x"}, {"parts": ".."}, {"part_files": {"../../a": digest}}):
        path.write_text(replace(manifest, **wrong).to_json())
        with pytest.raises(CheckpointError, match="its fields are inconsistent"):
            read_manifest(path)
    whole = replace(manifest, parts="", part_files={})
    path.write_text(whole.to_json())
    assert read_manifest(path) == whole


def test_of_several_ranks_that_have_ended_the_one_is_named_that_the_others_have_lost():
    children = {}
    for rank, code in ((0, 0), (1, 75), (2, -9), (3, 75)):
        pid = os.fork()
        if pid == 0:
            os.kill(os.getpid(), -code) if code < 0 else os._exit(code)
        children[pid] = rank
    for pid in children:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert describe_ended_rank(children) == "rank 2 was killed by SIGKILL"
    survivors = {pid: rank for pid, rank in children.items() if rank != 2}
    assert describe_ended_rank(survivors) == "rank 1 exited with exit code 75"
    done = {pid: rank for pid, rank in children.items() if rank == 0}
    assert describe_ended_rank(done) == ""  # it has done its work
    reap(list(children))
    assert describe_ended_rank(children) == ""


def test_pretended_ranks_exchange_as_real_ones():
    assert each_rank(3, lambda ranks: ranks.all_reduce_ints([ranks.rank, 1])) == [[3, 3]] * 3
    assert each_rank(2, lambda ranks: ranks.broadcast_object(f"rank {ranks.rank}")) == ["rank 0"] * 2
    assert isinstance(each_rank(1, lambda ranks: ranks)[0], Pretended)


class Forgetful:
    """A data set that makes new batches, as one of a user's may."""

    def prepare(self, batch, device, memory_format):
        return Batch(batch.inputs + 1, batch.targets)


def test_no_data_set_can_lose_whose_part_a_batch_is(monkeypatch):
    parts, _ = parts_of(*TINY)
    parts = replace(parts, dataset=Forgetful())
    prepared = parts.prepare(replace(a_batch(2), whole=7, is_dummy=True))
    assert (prepared.whole, prepared.is_dummy) == (7, True)
    assert parts.prepare(a_batch(2)).whole is None


class Some:
    """A split of which some samples can be used."""

    def __init__(self, usable, on_error="skip"):
        self.usable, self.faults = usable, Faults(on_error)

    def fetch(self, indices, epoch, seed):
        found = [index for index in indices if index in self.usable]
        self.faults.report({str(index): "damaged" for index in indices if index not in self.usable})
        if not found:
            raise DataError("no sample of a batch can be used")
        return Batch(torch.tensor(found), torch.tensor(found))


def test_a_part_of_which_nothing_can_be_used_has_a_stand_in():
    batch = fetch_part(Some({4}), [0, 1], [2, 3, 4], 0, 0)
    assert (batch.inputs.tolist(), batch.is_dummy) == ([4], True)
    batch = fetch_part(Some({1, 4}), [0, 1], [2, 3, 4], 0, 0)
    assert (batch.inputs.tolist(), batch.is_dummy) == ([1], False)
    with pytest.raises(DataError, match="no sample"):
        fetch_part(Some(set()), [0, 1], [2, 3], 0, 0)
    with pytest.raises(DataError, match="damaged"):
        fetch_part(Some({4}, "stop"), [0, 1], [2, 3, 4], 0, 0)


ERROR_ON_ONE = """
from mptrain.cli.messages import report
from mptrain.parallel.launch import launch_ranks
from mptrain.parallel.torchrun import DistributedOptions
from mptrain.system.errors import DataError, MptrainError
try:
    with launch_ranks(DistributedOptions(procs=3, timeout=60.0)) as ranks, ranks.together():
        if "{where}" == "before" and ranks.rank == {rank}:
            raise DataError("nothing there", "put it there")
        with ranks.main_process_first():
            if "{where}" == "inside" and ranks.rank == {rank}:
                raise DataError("nothing there", "put it there")
        ranks.all_gather_object("weights")
        if "{where}" == "behind" and ranks.rank == {rank}:
            raise {error}("nothing there")
except MptrainError as error:
    raise SystemExit(report(error))
"""


@pytest.mark.distributed
@pytest.mark.timeout(100)
@pytest.mark.parametrize(
    ("where", "rank", "error", "code"),
    [
        ("before", 1, "DataError", 6),
        ("inside", 2, "DataError", 6),
        ("inside", 0, "DataError", 6),
        ("behind", 1, "ValueError", 1),
    ],
)
def test_an_error_of_one_rank_while_all_prepare_is_the_runs(where, rank, error, code):
    finished = subprocess.run(
        [sys.executable, "-c", ERROR_ON_ONE.format(where=where, rank=rank, error=error)],
        env=environment(TORCH_CPP_LOG_LEVEL="ERROR"),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert finished.returncode == code, finished.stderr
    assert finished.stderr.count("nothing there") == 1
    assert (f"rank {rank}: " in finished.stderr) == (rank > 0)


def test_a_part_that_is_missing_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"rank-0\.pt is missing"):
        insert_shards({}, tmp_path, {"rank-1.pt": "0" * 64})


def test_a_tensor_that_one_file_lacks_is_told(tmp_path):
    files = {}
    for rank, names in enumerate((["/a", "/b"], ["/a"])):
        torch.save({name: torch.ones(2) for name in names}, tmp_path / f"rank-{rank}.pt")
        files[f"rank-{rank}.pt"] = hashlib.sha256((tmp_path / f"rank-{rank}.pt").read_bytes()).hexdigest()
    with pytest.raises(CheckpointError, match="hold shards of different tensors"):
        insert_shards({}, tmp_path, files)


def test_parts_take_no_more_room_than_their_own(tmp_path):
    taken = torch.arange(4096.0)[1024:1028]  # as of a whole tensor that was loaded and cut
    ((name, digest),) = write_shards(tmp_path / "x.parts", {"/weight": taken}, SINGLE_PROCESS).items()
    assert name == "rank-0.pt"
    assert (tmp_path / "x.parts" / name).stat().st_size < 4096
    marked = {"weight": {"__part__": "/weight", "shape": [4]}}
    assert torch.equal(insert_shards(marked, tmp_path / "x.parts", {name: digest})["weight"], taken)


def test_a_disk_that_refuses_one_rank_refuses_all(tmp_path, monkeypatch):
    def refuse_one(state, tensors, path):
        if path.name == "rank-1.pt":
            raise StorageError(f"cannot write {path}")
        return "", 0

    def write(ranks):
        with pytest.raises(StorageError, match=r"cannot write .*rank-1\.pt") as refused:
            write_shards(tmp_path / "x.parts", {"/weight": torch.ones(3)}, ranks)
        return str(refused.value).startswith("rank 1: ")

    monkeypatch.setattr("mptrain.runlog.checkpoint_data.write_state", refuse_one)
    assert each_rank(3, write) == [True, False, True]
