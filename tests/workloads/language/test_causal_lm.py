"""Language models and text classifiers of transformers by name: modes, dtypes, masks, ties, and errors in their words."""

from __future__ import annotations

import json

import pytest
import torch
import transformers

from mptrain.engine.rehearsal import rehearse
from mptrain.system.errors import ConfigError
from mptrain.workloads.classification.models.sequence_classifier import sequence_classifier
from mptrain.workloads.language.models.causal_lm import causal_lm
from mptrain.workloads.text.subwords import PAD
from tests.loops import each
from tests.small_runs import parts_of, run_in_process, whole_and_resumed

LANGUAGE = ("gpt2", "llama", "qwen3_moe", "mixtral", "mamba")
CLASSIFIERS = ("bert", "distilbert", "roberta")
QUICK = ("gpt2", "bert")
SIZES = {"vocabulary_size": 50, "sequence_length": 16}
DATA = ("dataset.train_samples=16", "train.batch_size=4")


def model_of(name):
    return (f"model={'sequence_classifier' if name in CLASSIFIERS else 'causal_lm'}", f"model.name={name}", *DATA)


def words_of(name, precision, *more):
    half = ("precision.cpu_kernels=upcast", "scaler.init_scale=16") if precision.startswith("fp16") else ()
    return (*model_of(name), "train.max_steps=3", "device=cpu", f"precision={precision}", *half, *more)


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in (*LANGUAGE, *CLASSIFIERS)]
)
def test_an_architecture_takes_three_steps(takes_three_steps, name, usual_mode):
    takes_three_steps(usual_mode, *model_of(name), scale=16)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*LANGUAGE, *CLASSIFIERS])
def test_the_doctor_examines_an_architecture(tmp_path, name):
    done = run_in_process("doctor", *words_of(name, "fp16_dynamic"), "threads=1", cwd=tmp_path)
    assert done.returncode in (0, 4), done.stderr
    assert "compared: one step of 4 samples" in done.stdout


@pytest.mark.long
@each(("name", "dropout"), [("gpt2", "attn_pdrop"), ("mixtral", "attention_dropout")])
@each(("precision", "dtype"), [("amp_bf16", "bfloat16"), ("fp16_dynamic", "float16")])
def test_every_product_has_the_promised_dtype(name, dropout, precision, dtype):
    parts, _ = parts_of(*words_of(name, precision, f"model.config.{dropout}=0.1"))
    batch = parts.prepare(parts.loaders["train"].split.fetch(range(4), 0, 0))
    operators = rehearse(parts, batch).operators["operators"]
    products = {row["inputs"] for row in operators if row["operator"] in ("mm", "addmm", "bmm", "baddbmm")}
    assert products == {dtype}, name
    assert not any(row["operator"] == "_grouped_mm" for row in operators)


@pytest.mark.long
def test_logits_and_weights_are_those_of_the_library(tmp_path):
    done = run_in_process(*words_of("gpt2", "fp16_dynamic", "train.ema_decay=0.9", "run.name=r"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    exported = run_in_process("export", "outputs/r", "--output", str(tmp_path / "weights.pt"), cwd=tmp_path)
    assert exported.returncode == 0, exported.stderr
    size = len(json.loads((tmp_path / "outputs/r/data.json").read_text())["labels"])
    config = transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=size, n_positions=64)
    theirs = transformers.GPT2LMHeadModel(config).eval()
    weights = torch.load(tmp_path / "weights.pt", weights_only=True)
    theirs.load_state_dict(weights)  # strict
    ours = causal_lm(name="gpt2", vocabulary_size=size, sequence_length=64).eval()
    ours.load_state_dict(weights)
    tokens = torch.randint(0, size, (2, 64))
    assert torch.equal(ours(tokens), theirs(tokens).logits)
    assert theirs.lm_head.weight is theirs.transformer.wte.weight


@pytest.mark.slow
def test_a_run_with_dropout_resumes_bit_for_bit(tmp_path):
    words = words_of("gpt2", "fp16_dynamic", "model.config.resid_pdrop=0.1", "model.config.attn_pdrop=0.1")
    whole, resumed = whole_and_resumed(tmp_path, *words, after=2)
    other = resumed.parts.model.state_dict()
    assert all(torch.equal(value, other[name]) for name, value in whole.parts.model.state_dict().items())


def test_dropout_is_off_unless_it_was_asked_for():
    model = causal_lm(name="gpt2", **SIZES)
    assert {module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)} == {0.0}
    assert causal_lm(name="gpt2", config={"resid_pdrop": 0.25}, **SIZES).config.resid_pdrop == 0.25


@each(
    ("build", "name", "own"),
    [
        (causal_lm, "gpt2", {"n_embd": 48, "n_layer": 1, "n_head": 3, "n_positions": 20}),
        (causal_lm, "gpt2", {"hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 3}),
        (causal_lm, "bloom", {"hidden_size": 48, "n_layer": 1, "n_head": 3}),
        (sequence_classifier, "distilbert", {"dim": 48, "n_layers": 1, "n_heads": 3}),
    ],
)
def test_sizes_of_the_configuration_come_first(build, name, own):
    classes = {"num_classes": 3} if build is sequence_classifier else {}
    model = build(name=name, width=64, layers=2, heads=4, config=own, **SIZES, **classes)
    assert {key: getattr(model.config, key) for key in own} == own
    assert model.get_input_embeddings().weight.shape == (50, 48)


def test_frequencies_of_rotary_positions_are_not_rounded():
    model = causal_lm(name="llama", **SIZES, config={"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}})
    exact = model.model.rotary_emb.inv_freq.clone()
    for half in (torch.float16, torch.bfloat16):
        model.to(half)
        assert model.lm_head.weight.dtype == half
        assert torch.equal(model.model.rotary_emb.inv_freq, exact)


@each("name", ["bert", "roberta", "gpt2"])
def test_padding_changes_no_logit(name):
    model = sequence_classifier(name=name, num_classes=3, **SIZES).eval()
    tokens = torch.randint(1, 50, (2, 9))
    longer = torch.nn.functional.pad(tokens, (0, 6), value=PAD)
    torch.testing.assert_close(model(longer), model(tokens), atol=1e-5, rtol=1e-4)


@each(
    ("build", "changes", "message", "hint"),
    [
        (causal_lm, {"name": "gpt3"}, "no such architecture for model=causal_lm", "gpt2"),
        (sequence_classifier, {"name": "berd"}, "no such architecture for model=sequence_classifier", "bert"),
        (causal_lm, {"config": {"n_layr": 3}}, r"unknown key 'model.config.n_layr': gpt2 has no such key", "model.config.n_layer"),
        (causal_lm, {"config": {"n_embd": 32, "hidden_size": 48}}, "hidden_size and model.config.n_embd are two names of one", "leave one"),
        (causal_lm, {"width": 32, "heads": 2, "pretrained": True}, "model.width=32 model.heads=2 with model.pretrained=true", "model.config.KEY"),
        (sequence_classifier, {"layers": 2, "pretrained": True}, "model.layers=2 with model.pretrained=true", "model.config.KEY"),
        (causal_lm, {"config": {"n_layer": "many"}}, "transformers rejects the configuration of gpt2", "model.config.KEY"),
        (causal_lm, {"config": {"trust_remote_code": True}}, "mptrain runs no code from a model repository", "leave it out"),
        (causal_lm, {"config": {"_attn_implementation": "someone/kernel"}}, "runs no code", "leave it out"),
        (causal_lm, {"lanes": 4}, "carry no state", "dataset.stream=false"),
        (causal_lm, {"name": "xlnet", "config": {"d_head": 16}}, "no causal language model: its logits depend", "gpt2"),
        (causal_lm, {"name": "roberta"}, "takes no tokens alone", "model.config.KEY"),
        (causal_lm, {"width": 30}, "model.width=30 is not a multiple of model.heads=4", "model.width=32"),
        (sequence_classifier, {"name": "t5"}, "has an encoder and a decoder", "bert"),
    ],
)  # fmt: skip
def test_what_cannot_be_built_is_refused_with_what_to_do(build, changes, message, hint):
    given = {"name": "gpt2", **SIZES, **({"num_classes": 3} if build is sequence_classifier else {}), **changes}
    with pytest.raises(ConfigError, match=message) as caught:
        build(**given)
    assert hint in caught.value.hint
