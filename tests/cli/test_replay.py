import pytest

from mptrain.config.compose import compose
from tests.report.folders import make_run


@pytest.fixture
def run(tmp_path):
    config = compose(["model=mlp", "precision=fp16_dynamic"]).yaml
    return make_run(tmp_path / "run", steps=30, overflows={4: "calibrating", 9: "unexpected"}, config=config)


def test_it_prints_recorded_and_replayed_scales_and_where_its_page_is(terminal, run):
    assert terminal("replay", "run") == 0
    assert terminal.out.splitlines() == [
        "Its scale equals the recorded one at all 30 steps.",
        "",
        "Recorded and replayed loss scales",
        "learner            updates  skipped  unknown  first scale  lowest scale  highest scale  last scale",
        "main     recorded       28        2        0         2^16          2^14           2^16        2^14",
        "main     replayed       28        2        0         2^16          2^14           2^16        2^14",
        "",
        "recorded: dynamic from 2^16, x2 every 2000 clean steps, x0.5 on overflow, within 1 to 2^24",
        "replayed: dynamic from 2^16, x2 every 2000 clean steps, x0.5 on overflow, within 1 to 2^24",
        "known: outcomes of 30 steps: 30 known",
        "",
        "run/replay-dynamic.html",
        "run/replay-dynamic.md",
    ]
    assert "at all 30 steps" in (run / "replay-dynamic.md").read_text()


def test_another_rule_is_chosen_by_words_about_the_scaler(terminal, run):
    assert terminal("replay", "run", "scaler=smooth", "scaler.init_scale=256") == 0
    assert "replayed: smooth from 256, x2 every step until the first overflow" in terminal.out
    assert "\nThe gradients are those recorded by the run." in terminal.out
    assert (run / "replay-smooth-init-scale-256.html").exists()
    assert (run / "figures" / "replay-smooth-init-scale-256.svg").exists()


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["run", "smooth"], 2, "'smooth' is not of the form KEY=VALUE"),
        (["run", "train.epochs=2"], 2, "'train.epochs=2' is not about the scaler"),
        (["run", "scaler=smoth"], 2, "did you mean"),
        (["run", "scaler=logmax"], 6, "measures gradients, and the run has no histograms"),
    ],
)
def test_what_cannot_be_replayed_gets_one_line_and_a_hint(terminal, run, words, code, message):
    assert terminal("replay", *words) == code
    assert message in terminal.err
    assert "hint:" in terminal.err
