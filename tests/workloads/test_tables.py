"""Tables: encodings against scikit-learn's, files and frames bit for bit, what is refused by name, and new rows."""

from __future__ import annotations

import json
import math
import re

import numpy as np
import pytest
import torch
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from mptrain.system.errors import ConfigError, DataError, EnvironmentRefused
from mptrain.workloads.base.data_files import Faults
from mptrain.workloads.tables.datasets.table import NewRows, Table, TableOptions, load_table
from tests.loops import each

pd = pytest.importorskip("pandas")


def houses(count=60, seed=0):
    chance = np.random.default_rng(seed)
    frame = pd.DataFrame(
        {
            "area": chance.normal(80, 30, count).round(2),
            "city": chance.choice(["Rome", "Oslo", "Zürich, CH", "01"], count),
            "rooms": chance.integers(1, 9, count),
            "new": chance.random(count) < 0.3,
            "country": "X",
            "price": chance.normal(300, 50, count),
            "level": chance.choice(["low", "mid", "high"], count),
        }
    )
    frame.loc[::7, "area"] = None
    frame.loc[::9, "city"] = None
    return frame


def table(frame, target="price", ignore=("level",), **options):
    return Table(frame, TableOptions(target=target, ignore=ignore, **options))


def rows(split):
    batch = split.fetch(range(len(split)), 0, 0)
    return batch.inputs, batch.targets


def with_none(frame):
    return frame[["city"]].astype(object).where(frame[["city"]].notna(), None).to_numpy()


def same(one, other):
    pairs = [(rows(getattr(one, part)), rows(getattr(other, part))) for part in ("train", "val", "test")]
    return one.card()["preparation"] == other.card()["preparation"] and all(
        torch.equal(a, b) for first, second in pairs for a, b in zip(first, second, strict=True)
    )


def test_inputs_are_those_of_scikit_learn_fitted_on_the_training_rows():
    frame = houses()
    parts = {"train": frame[:40], "val": frame[40:50], "test": frame[50:]}
    dataset = table(parts)
    numbers = ["area", "rooms", "new"]
    scaler = StandardScaler().fit(parts["train"][numbers].astype(float))
    one_hot = OneHotEncoder(handle_unknown="ignore", sparse_output=False).fit(with_none(frame[:40]))
    for part, whole in parts.items():
        inputs, targets = rows(getattr(dataset, part))
        some = whole.set_index(whole.price.astype("float32")).loc[targets.tolist()]  # a part may be in another order
        scaled = np.nan_to_num(scaler.transform(some[numbers].astype(float)))
        missing = some[["area"]].isna().to_numpy()
        parts_of_it = [scaled[:, :1], missing, one_hot.transform(with_none(some)), scaled[:, 1:]]
        np.testing.assert_allclose(inputs.numpy(), np.concatenate(parts_of_it, 1), rtol=1e-5, atol=1e-6)
        assert inputs.dtype == targets.dtype == torch.float32
        assert len(inputs) == len(some)
    facts = dataset.facts()
    assert facts["input_shape"] == (dataset.train.inner.tensors[0].shape[1],) == (9,)
    assert facts["output_names"] == ("price",)
    assert facts["target_mean"] == (math.fsum(parts["train"].price.astype("float32").tolist()) / 40,)
    assert facts["target_std"] == (pytest.approx(parts["train"].price.std(ddof=0)),)
    assert dataset.warnings == (
        "missing in train: area (6 rows), city (5 rows)",
        "missing in val: area (2 rows), city (1 row)",
        "missing in test: area (1 row), city (1 row)",
        "left out, without a name or the same in all training rows: country",
    )


def test_a_file_and_the_frame_read_from_it_are_the_same_bit_for_bit(tmp_path):
    houses().to_csv(tmp_path / "a.csv")  # with a column of row numbers, which has no name
    dataset = load_table(path=tmp_path / "a.csv", target="price", ignore=("level",))
    assert same(dataset, table(pd.read_csv(tmp_path / "a.csv")))
    assert [len(getattr(dataset, part)) for part in ("train", "val", "test")] == [48, 6, 6]
    assert dataset.card()["files"] == {"train": [str(tmp_path / "a.csv")]}
    assert dataset.warnings[-1].endswith("Unnamed: 0, country")
    assert dataset.describe() == (
        "9 inputs of 4 columns, price as values; 6 rows held out for val; 6 rows held out for test"
    )
    pd.read_csv(tmp_path / "a.csv").to_csv(tmp_path / "a.tsv", sep="\t", index=False)
    assert same(dataset, load_table(path=tmp_path / "a.tsv", target="price", ignore=("level",)))


def test_a_parquet_file_keeps_the_kinds_of_a_frame(tmp_path):
    pytest.importorskip("pyarrow")
    frame = houses().astype({"city": "category", "rooms": "Int8", "new": "boolean"})
    frame.loc[3, ["rooms", "new"]] = pd.NA
    frame.to_parquet(tmp_path / "a.parquet")
    dataset = load_table(path=tmp_path / "a.parquet", target="price", ignore=("level",))
    assert same(dataset, table(frame))
    assert [column["kind"] for column in dataset.card()["preparation"]["columns"]] == [
        "number",
        "category",
        "number",
        "number",
    ]


def test_rows_in_another_order_have_the_same_statistics():
    frame = houses()
    parts = {"val_share": 0, "test_share": 0}
    assert table(frame, **parts).card() == table(frame.sample(frac=1, random_state=1), **parts).card()


def test_held_out_rows_depend_on_the_split_seed_alone_and_classes_keep_their_shares():
    frame = houses(300)
    one, other = (table(frame, "level", ("price",), split_seed=seed) for seed in (0, 1))
    assert same(one, table(frame, "level", ("price",), train_samples=None))
    assert not torch.equal(rows(one.test)[0], rows(other.test)[0])
    fewer = table(frame, "level", ("price",), val_share=0.4, train_samples=20)
    assert len(fewer.train) == 20
    assert torch.equal(rows(fewer.test)[1], rows(one.test)[1])  # the same with any val_share
    shares = [rows(part)[1].bincount(minlength=3) / len(part) for part in (one.train, one.val, one.test)]
    assert all((share - shares[0]).abs().max() < 0.05 for share in shares)
    assert one.train.survey().labels.bincount().sum() == len(one.train) == len(one.train.digests())


@each(
    ("column", "wanted", "kind", "names"),
    [
        (["b", "a", "b"], "auto", "classes", ("a", "b")),
        ([True, False, True], "auto", "classes", ("False", "True")),
        ([10, 9, 10], "auto", "classes", ("9", "10")),
        ([10.0, 9.0, 10.0], "auto", "values", ()),
        ([10.0, 9.5, 10.0], "classes", "classes", ("9.5", "10")),
        ([10, 9, 10], "values", "values", ()),
        (range(21), "auto", "values", ()),
        (pd.Categorical([2, 1, 2]), "auto", "classes", ("1", "2")),
    ],
)
def test_the_target_decides_what_it_is_unless_it_is_said(column, wanted, kind, names):
    frame = pd.DataFrame({"y": column})
    dataset = table(frame.assign(x=range(len(frame))), "y", (), target_kind=wanted, val_share=0, test_share=0)
    facts, targets = dataset.facts(), rows(dataset.train)[1]
    assert dataset.describe().endswith(f"y as {kind}")
    assert facts.get("class_names", ()) == tuple(names)
    assert facts["num_outputs"] == facts.get("num_classes", 1)
    assert targets.dtype == (torch.int64 if names else torch.float32)
    assert targets.dim() == 1
    assert dataset.card()["labels"][:-1] == [*names]


def test_columns_of_0_and_1_are_labels_and_others_values():
    frame = pd.DataFrame({"x": range(4), "a": [0, 1, 1, 1], "b": [True, False, False, True], "c": [0, 2, 0, 5]})
    whole = {"val_share": 0, "test_share": 0}
    labels = table(frame, ("a", "b"), ("c",), **whole)
    order = rows(labels.train)[0][:, 0].argsort()
    assert rows(labels.train)[1][order].tolist() == [[0, 1], [1, 0], [1, 0], [1, 1]]
    assert labels.facts() | {"input_shape": ()} == {
        "input_shape": (),
        "num_outputs": 2,
        "output_names": ("a", "b"),
        "label_counts": (3, 2),
    }
    values = table(frame, ("a", "c"), ("b",), **whole)
    assert values.facts()["target_mean"] == (0.75, 1.75)
    assert rows(values.train)[1].shape == (4, 2)
    one = table(frame, "a", ("b", "c"), target_kind="labels", **whole)
    assert rows(one.train)[1].shape == (4, 1)
    constant = table(frame.assign(c=7.0), "c", ("a", "b"), **whole)
    assert constant.facts()["target_std"] == (1.0,)
    assert constant.warnings == ("in float32 the training targets of output c are constant",)


@each(
    ("change", "reason", "hint"),
    [
        ({"id": [f"h{n}" for n in range(60)]}, "id has 60 categories in 60 rows", r"set dataset.ignore=\[level,id\]"),
        ({"at": pd.date_range("2020", periods=60)}, "at is datetime64", r"dataset.ignore=\[level,at\]"),
        ({"at": ["2020-01-02", "2021-01-03 10:00"] * 30}, "at has dates", "ignore"),
        ({"odd": [[1]] * 60}, "odd is mixed", "ignore"),
        (
            {"area": [math.inf, 1.0, -math.inf] * 20},
            "train: area is no finite number of float32 in 40 rows: index 0, 2,",
            "fix",
        ),
        (
            {"price": [None, 1.0, 2.0] * 20},
            "train: price is missing in 20 rows: index 0, 3, 6, 9, 12 and 15 more",
            "drop",
        ),
    ],
)
def test_a_column_that_cannot_be_used_is_named(change, reason, hint):
    with pytest.raises(DataError, match=reason) as caught:
        table(houses().assign(**change))
    assert re.search(hint, caught.value.hint)


def test_rows_of_a_file_are_counted_from_1_and_those_of_a_frame_named_by_their_labels(tmp_path):
    frame = houses()
    frame.loc[4, "price"] = None
    frame.to_csv(tmp_path / "rows.csv", index=False)
    with pytest.raises(DataError, match=r"^train: price is missing in 1 row: 5(\n|$)"):
        load_table(path=tmp_path / "rows.csv", target="price")
    with pytest.raises(DataError, match=r"^train: price is missing in 1 row: index 4(\n|$)"):
        table(frame)
    with pytest.raises(DataError, match=r"^val: price is missing in 1 row: index h4(\n|$)"):
        table({"train": houses(), "val": frame.rename(index="h{}".format)})


def test_what_is_not_there_is_named_with_the_nearest_name(tmp_path):
    with pytest.raises(DataError, match="train has no column prize") as caught:
        table(houses(), "prize")
    assert caught.value.hint == "did you mean price?"
    with pytest.raises(DataError, match="train has no column lvl"):
        table(houses(), ignore=("lvl",))
    with pytest.raises(ConfigError, match=r"dataset.target is not set"):
        Table(houses(), TableOptions())
    with pytest.raises(DataError, match="val has no column city"):
        table({"train": houses(), "val": houses().drop(columns="city")})
    with pytest.raises(DataError, match="a table has two columns area"):
        table(houses().rename(columns={"rooms": "area"}))
    with pytest.raises(DataError, match="cannot be classes: 1 value in 60 rows"):
        table(houses().assign(level="x"), "level", ())
    with pytest.raises(DataError, match="level is no class of the training data in 60 rows"):
        table({"train": houses(), "val": houses().assign(level="x")}, "level", ())
    with pytest.raises(DataError, match=r"a.csv cannot be read: No such file"):
        load_table(path=tmp_path / "a.csv", target="y")
    (tmp_path / "b.csv").write_text("a,b\n1,2,3\n4,5,6\n")
    with pytest.raises(DataError, match="its rows have more cells than its header"):
        load_table(path=tmp_path / "b.csv", target="b")
    with pytest.raises(DataError, match="no column differs between training rows"):
        table(houses()[["price", "country"]], ignore=())
    assert table(houses()).lacks["num_classes"].hint.endswith("dataset.target_kind=classes")


def test_categories_that_training_rows_lack_are_zeros_and_counted(tmp_path):
    houses().to_csv(tmp_path / "train.csv", index=False)
    houses()[:8].assign(city=["Bern", "01"] * 4).to_csv(tmp_path / "test.csv", index=False)
    paths = {"path": tmp_path / "train.csv", "test_path": tmp_path / "test.csv"}
    dataset = load_table(target="price", ignore=("level",), **paths)
    assert dataset.warnings[-1] == "of no category of the training rows in test: city (4 rows)"
    assert [len(getattr(dataset, part)) for part in ("train", "val", "test")] == [54, 6, 8]
    inputs = rows(dataset.test)[0]
    assert inputs[:, 2:7].sum(1).tolist() == [0, 1] * 4
    assert inputs[1, 2] == 1  # 01, which is text there too


def test_other_rows_get_the_encoding_of_a_run_and_a_damaged_one_is_refused(tmp_path):
    houses().to_csv(tmp_path / "a.csv", index=False)
    houses(30, seed=1).drop(columns="country").to_csv(tmp_path / "b.csv", index=False)
    own = load_table(path=tmp_path / "a.csv", target="price", ignore=("level",))
    card = json.loads(json.dumps({"name": "table", **own.card()}))
    other = load_table(path=tmp_path / "b.csv", target="price", ignore=("level",), fitted=card)
    assert other.card()["preparation"] == own.card()["preparation"]
    assert other.val is None
    assert len(other.test) == 30
    assert torch.equal(rows(other.test)[0], rows(table({"test": pd.read_csv(tmp_path / "b.csv")}, fitted=card).test)[0])
    again = load_table(path=tmp_path / "a.csv", target="price", test_path=tmp_path / "b.csv", fitted=card)
    assert torch.equal(rows(again.test)[0], rows(other.test)[0])
    card["preparation"]["columns"][0]["mean"] += 1
    with pytest.raises(ValueError, match="do not fit together"):
        NewRows(card, {})


def test_new_rows_get_the_inputs_of_the_same_rows_in_a_table(tmp_path):
    frame = houses()
    frame.to_csv(tmp_path / "a.csv", index=False)
    dataset = table({"train": frame, "test": frame})
    source = NewRows(json.loads(json.dumps({"name": "table", **dataset.card()})), {})
    assert source.facts() == dataset.facts()
    expected = rows(dataset.test)[0]
    mappings = [source.inputs_in(row) for row in frame.to_dict("records")]
    for lines in (
        source.inputs_in(frame),
        source.inputs_in(str(tmp_path / "a.csv")),
        [next(some) for some in mappings],
    ):
        split = source.split([*lines])
        assert torch.equal(rows(split)[0], expected)
        assert not split.faults.unusable
    assert source.inputs_in("a text") is None
    faults = Faults()
    line = json.dumps({"area": 5, "city": "Bern", "rooms": 2, "new": True, "more": 1})
    assert source.read(line, faults).shape == (9,)
    assert faults.remarks == {line: "of no category of the training rows: city"}
    bad = source.split([line, "text", "{", line.replace("5", '"wide"'), line.replace("2", "1e99"), '{"area": 1}'])
    assert len(bad.fetch(range(6), 0, 0).inputs) == 1
    assert [*bad.faults.unusable.values()] == [
        "the row has no column area",
        "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
        "the row: area is no finite number of float32 in 1 row: 1",
        "the row: rooms is no finite number of float32 in 1 row: 1",
        "the row has no column city",
    ]


def new_rows(dataset):
    return NewRows(json.loads(json.dumps({"name": "table", **dataset.card()})), {})


def test_new_rows_without_a_column_and_what_is_no_table_are_refused():
    frame = houses()
    dataset = table({"train": frame, "test": frame})
    source = new_rows(dataset)
    for given in (pd.DataFrame({"zz": [1, 2]}), {"zz": 1}, [{"zz": 1}], frame.drop(columns="area").iloc[0]):
        with pytest.raises(DataError, match="the input has no column area"):
            list(source.inputs_in(given))
    for given in (torch.ones(9), 5, [5]):
        with pytest.raises(DataError, match=r"the input is an? (Tensor|int), no table"):
            list(source.inputs_in(given))
    series = source.split([*source.inputs_in([frame.iloc[1], frame.iloc[0]])])  # the first one lacks its area and city
    assert torch.equal(rows(series)[0], rows(dataset.test)[0][[1, 0]])
    assert [*source.inputs_in(["a text"])] == ["a text"]  # which `read` refuses


def test_a_missing_number_that_no_training_row_lacks_is_remarked_on():
    source, faults = new_rows(table({"train": houses(), "test": houses()})), Faults()
    line = json.dumps({"area": None, "city": "Bern", "rooms": None, "new": True})
    source.read(line, faults)
    said = "of no category of the training rows: city; missing, and in no training row: rooms"
    assert faults.remarks == {line: said}


def test_a_target_of_text_is_text_in_other_files_of_digits_alone(tmp_path):
    (tmp_path / "a.csv").write_text("x,y\n" + "".join(f"{n},{name}\n" for n in range(9) for name in ("01", "02", "x1")))
    (tmp_path / "b.csv").write_text("x,y\n1,01\n2,02\n")
    own = load_table(path=tmp_path / "a.csv", target="y")
    card = json.loads(json.dumps({"name": "table", **own.card()}))
    other = load_table(path=tmp_path / "b.csv", target="y", fitted=card)
    assert rows(other.test)[1].tolist() == [0, 1]


@each(
    ("targets", "deviation", "said"),
    [
        (np.arange(100) * 1e-48, 1.0, "constant"),
        (1.7e9 + np.arange(100) * 1.5, None, "too coarse: subtract their mean"),
    ],
)
def test_targets_of_a_table_have_the_statistics_of_their_float32_values(targets, deviation, said):
    dataset = table(pd.DataFrame({"x": targets, "y": targets}), "y", (), val_share=0, test_share=0)
    assert dataset.warnings == (f"in float32 the training targets of output y are {said}",)
    assert dataset.facts()["target_std"] == (deviation or pytest.approx(targets.astype("f4").astype("f8").std()),)
    assert dataset.card()["preparation"]["columns"][0]["std"] == (deviation or pytest.approx(targets.std()))


def test_two_frames_of_other_columns_are_no_parts():
    with pytest.raises(DataError, match="val has none of the columns of train") as caught:
        Table({"train": houses()[["area"]], "val": houses()[["price"]]}, TableOptions())
    assert "one frame, with target=NAME" in caught.value.hint


def test_without_pandas_the_extra_is_named(monkeypatch, tmp_path):
    (tmp_path / "a.csv").write_text("a,b\n1,2\n")
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    with pytest.raises(EnvironmentRefused, match="dataset=table needs") as caught:
        load_table(path=tmp_path / "a.csv", target="b")
    assert "mptrain[tables]" in caught.value.hint
