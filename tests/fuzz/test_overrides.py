"""Whatever the words of a command line are, they make a configuration or one error that lists what is wrong."""

from __future__ import annotations

import functools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mptrain.config.compose import Composer, reload
from mptrain.config.config_diff import config_digest, diff
from mptrain.config.overrides import leaves
from tests.fuzz.hostile import examples, only_our_errors, spoiled, texts

GROUPS = ("model", "precision", "optimizer", "schedule", "scaler", "dataset", "task", "logger", "diagnostics")


@functools.cache
def composer():
    return Composer()


@functools.cache
def keys():
    from omegaconf import OmegaConf

    node, _ = composer()._merge([])
    return sorted({*leaves(OmegaConf.to_container(node, resolve=False)), *GROUPS, "learners", "model.weights", "train"})


numbers = st.one_of(
    st.integers(), st.floats(), st.sampled_from([0, -1, 10**30, 10**400, 1e308, 5e-324, 2**31, 2**63, 2**64])
).map(str)
atoms = st.one_of(
    numbers,
    texts,
    st.sampled_from(
        ["null", "true", "???", "inf", "-inf", "nan", "1e999", "mlp", "fp32", "[]", "{}", "a,b", "1:2", "''", '"']
    ),
    st.just("9" * 5000),
)
odd_values = st.one_of(
    atoms,
    st.recursive(
        atoms,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3).map(lambda items: f"[{','.join(items)}]"),
            st.lists(st.tuples(texts, inner), max_size=3).map(
                lambda items: "{" + ",".join(f"{key}:{value}" for key, value in items) + "}"
            ),
            st.tuples(st.sampled_from(["int", "float", "str", "bool", "choice", "range", "sort", "shuffle", "tag", "glob", "extend_list", "interval"]), st.lists(inner, max_size=3)).map(
                lambda call: f"{call[0]}({','.join(call[1])})"
            ),
        ),
        max_leaves=6,
    ),
    st.sampled_from(
        [
            *("${", "${}", "${seed}", "${train}", "${train.epochs}", "${nothing}", "${oc.env:HOME}", "${oc.env:X_Y_Z}"),
            *("${.}", "${..}", "${...seed}", "${hydra:runtime.cwd}", "${oc.decode:'['}", "${now:%Y}", "${a:${b:${c}}}"),
            *("${oc.create:{a:1}}", "\\${seed}", "$" * 50, "${seed", "seed}", "${train.${seed}}", "${model}", "${.epochs}"),
            *("[" * 3000, "{a:" * 500, "[" * 300 + "]" * 300, "int(" * 200 + ")" * 200, "x" * 100_000, "\\" * 99, "'" * 99),
            *("{_target_: os.system, command: 'touch x'}", "{a: {b: {c: [1, {d: null}]}}}", "range(1e9)", "range(0,1e18)"),
            *("range(1,10000000000)", "glob(*)", "glob(*,exclude=a)", "choice()", "shuffle(range(1,4))", "1,2,3", "{1:2}", "{true:1}"),
        ]
    ),
)  # fmt: skip


@st.composite
def odd_keys(draw):
    key = draw(st.sampled_from(keys()))
    how = draw(st.integers(0, 9))
    if how < 4:
        return key
    place = draw(st.integers(0, len(key)))
    if how == 4:
        return key[:place] + draw(texts) + key[place:]
    if how == 5:
        return key[:place]
    if how == 6:
        endings = ". .. .x [0] .0 .00 .-1 .\u0663 @x @_global_ @: /x ._target_ .__class__"
        return key + draw(st.sampled_from([*endings.split(), " "]))
    if how == 7:
        return f"{key}.{draw(st.sampled_from(keys()))}"
    if how == 8:
        return draw(st.sampled_from(["learners.a.optimizer.lr", "learners.main", "learners..lr", "hydra.verbose", "hydra/launcher", "hydra.run.dir", "hydra.job.name", "hydra.sweeper.params", "hydra.nothing", "extensions.allow", "chosen.model", "chosen", "defaults", "run", "hydra"]))  # fmt: skip
    return draw(texts)


@st.composite
def odd_words(draw):
    prefix = draw(st.sampled_from(["", "", "", "", "+", "++", "~", "+~", "-", "--", " "]))
    equals = draw(st.sampled_from(["=", "=", "=", "=", "=", "", "==", " = ", ":"]))
    return prefix + draw(odd_keys()) + equals + draw(odd_values)


@pytest.mark.long
@examples(150, 5000)
@given(st.lists(odd_words(), min_size=1, max_size=3))
def test_odd_words_make_a_configuration_or_one_error(words):
    with only_our_errors():
        composer().compose(words)


@examples(60, 2000)
@given(st.data())
def test_a_known_key_takes_a_value_or_says_what_it_takes(data):
    word = f"{data.draw(st.sampled_from(keys()))}={data.draw(st.one_of(numbers, odd_values))}"
    with only_our_errors():
        composer().compose([word])


@examples(20, 500)
@given(st.data())
def test_a_spoiled_configuration_of_a_run_is_reloaded_or_refused(data):
    whole = saved()
    text = data.draw(spoiled(whole.encode(), b"a: &a [*a]\n", b"model: 3\n")).decode("utf-8", "replace")
    with only_our_errors():
        reload(text, ["train.epochs=3"])
    with only_our_errors():
        diff(whole, text)
        config_digest(text)


@functools.cache
def saved():
    return composer().compose(["model=mlp"]).yaml


@pytest.mark.parametrize(
    "words",
    [
        ["train.epochs=" + "[" * 300 + "]" * 300],
        ["model.widths=" + "[" * 90 + "]" * 90],
        ["train=" + "{a:" * 100 + "1" + "}" * 100],
        ["train.epochs=" + "9" * 5000],
        ["hydra/launcher=0"],
    ],
)
def test_words_that_once_ended_in_a_traceback_do_not(words):
    with only_our_errors():
        composer().compose(words)
