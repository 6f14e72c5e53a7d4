"""Tokenizers of transformers: what is read, what a run keeps of one, and what a changed one gets."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import transformers
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from mptrain import open_run
from mptrain.run.prediction import predictor
from mptrain.system.errors import ConfigError, DataError
from mptrain.workloads.classification.models.sequence_classifier import sequence_classifier
from mptrain.workloads.language.datasets.text_files import load_text
from mptrain.workloads.language.models.causal_lm import causal_lm
from mptrain.workloads.text.datasets.labelled_files import load_labelled_text
from mptrain.workloads.text.pretrained_tokenizer import Tokenizer
from tests.loops import each
from tests.small_runs import run_in_process

SENTENCES = ["the quick brown fox jumps over the lazy dog. ", "a dog and a fox saw the brown bird! ", "who is quick? "]
END = "<|endoftext|>"


def byte_level(folder, size=280, **special):
    """Train a tokenizer like that of GPT-2, and save it."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(SENTENCES * 3, trainer)
    special = special or {"bos_token": END, "eos_token": END, "unk_token": END}
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    made.save_pretrained(folder)
    return made


def of_words(folder):
    """Train a tokenizer like that of RoBERTa: of words, with padding that is not 0, and tokens around a text."""
    backend = Backend(models.WordLevel(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    names = ["<s>", "<pad>", "</s>", "<unk>"]
    backend.train_from_iterator(SENTENCES, trainers.WordLevelTrainer(special_tokens=names, show_progress=False))
    backend.post_processor = processors.TemplateProcessing("<s> $A </s>", None, [("<s>", 0), ("</s>", 2)])
    special = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    made.save_pretrained(folder)
    return made


def corpus(path):
    path.write_text("".join(SENTENCES) * 30)
    return path


def labelled(path):
    lines = [f"{'ab'[n % 2]}\t{SENTENCES[n % 3]} {'so ' * (n % 4)}bird{n}" for n in range(40)]
    path.write_text("\n".join(lines))
    return path


def test_running_text_has_the_numbers_of_the_tokenizer_and_none_more(tmp_path):
    theirs = byte_level(tmp_path / "tok")
    dataset = load_text(path=corpus(tmp_path / "t.txt"), tokenizer=str(tmp_path / "tok"), sequence_length=8)
    facts = dataset.facts()
    assert facts["vocabulary_size"] == len(theirs) == 280
    text = "the fox é 日本" + END
    numbers = dataset.vocabulary.numbers(text).tolist()
    assert numbers == theirs(text)["input_ids"]
    assert facts["decode"](numbers) == text
    assert dataset.vocabulary.unknown is None  # it is the end of a text, and means that
    assert dataset.describe() == f"8 tokens of {tmp_path / 'tok'} (vocabulary 280)"
    words = of_words(tmp_path / "words")
    ours = Tokenizer.of(str(tmp_path / "words"))
    assert (ours.unknown, ours.padding) == (3, 1)
    assert ours.numbers("the zebra").tolist() == words("the zebra", add_special_tokens=False)["input_ids"]


@pytest.mark.long  # for the import of three architectures
@each("tokenizer", [of_words, byte_level])
def test_a_text_to_classify_has_the_added_tokens_and_their_padding(tmp_path, tokenizer):
    theirs = tokenizer(tmp_path / "tok")
    data = {"path": labelled(tmp_path / "t.tsv"), "tokenizer": str(tmp_path / "tok")}
    dataset = load_labelled_text(**data, sequence_length=16, val_share=0, test_share=0)
    inputs = dataset.train.fetch(range(40), 0, 0).inputs
    padding = dataset.facts()["tokenizer_padding"]
    assert padding == (1 if tokenizer is of_words else theirs.eos_token_id)
    expected = [
        theirs(line.split("\t")[1].strip(), truncation=True, max_length=16)["input_ids"]
        for line in data["path"].read_text().splitlines()
    ]
    width = max(map(len, expected))
    rows = {tuple(row + [padding] * (width - len(row))) for row in expected}
    assert set(map(tuple, inputs.tolist())) == rows
    (sample,) = dataset.train.fetch([0], 0, 0).inputs
    assert dataset.text_of(sample) == theirs.decode(sample) != ""
    facts = {n: fact for n, fact in dataset.facts().items() if n not in ("class_names", "num_outputs")}
    for name in ("gpt2", "bert", "roberta") if tokenizer is of_words else ("gpt2", "bert"):
        model = sequence_classifier(name=name, **facts).eval()
        shortest = int((inputs != padding).sum(1).argmin())
        alone = model(inputs[shortest : shortest + 1, : min(map(len, expected))])
        torch.testing.assert_close(model(inputs)[shortest : shortest + 1], alone, atol=1e-5, rtol=1e-4)


def facts_of(tokenizer):
    return {"vocabulary_size": len(tokenizer), "sequence_length": 16, "tokenizer_padding": tokenizer.padding}


def test_pretrained_weights_keep_an_embedding_with_more_tokens(tmp_path):
    byte_level(tmp_path / "tok")
    facts = facts_of(Tokenizer.of(str(tmp_path / "tok")))
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 16}
    donor = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=288, **sizes)).eval()
    donor.save_pretrained(tmp_path / "donor")
    model = causal_lm(name=str(tmp_path / "donor"), pretrained=True, **facts).eval()
    assert model.get_input_embeddings().weight.shape == (288, 8)
    assert {*model.pretrained_weights.read()} >= {"transformer.wte.weight"}
    for build, more in ((causal_lm, {}), (sequence_classifier, {"num_classes": 2})):
        with pytest.raises(ConfigError, match=r"donor has an embedding of 288 tokens, and dataset.tokenizer has 400"):
            build(name=str(tmp_path / "donor"), pretrained=True, **{**facts, "vocabulary_size": 400}, **more)


def test_what_cannot_be_used_is_refused_by_name(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"dataset.tokenizer=.*empty cannot be read"):
        Tokenizer.of(str(tmp_path / "empty"))
    with pytest.raises(DataError, match=r"dataset.tokenizer=no/such is no folder, and not in the cache") as caught:
        Tokenizer.of("no/such")
    assert "dataset.download=true" in caught.value.hint
    byte_level(tmp_path / "bare", unk_token=END)
    with pytest.raises(ConfigError, match="has neither pad_token nor eos_token"):
        load_labelled_text(path=labelled(tmp_path / "t.tsv"), tokenizer=str(tmp_path / "bare"))
    transformers.ByT5Tokenizer().save_pretrained(tmp_path / "bytes")
    with pytest.raises(DataError, match="ByT5Tokenizer is none of the library tokenizers"):
        Tokenizer.of(str(tmp_path / "bytes"))


def test_a_tokenizer_is_known_by_what_it_does_and_comes_back_from_data_json(tmp_path):
    byte_level(tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    byte_level(tmp_path / "other", 281)
    one, two, other = (Tokenizer.of(str(tmp_path / name)) for name in ("one", "two", "other"))
    assert one.digest == two.digest != other.digest
    shutil.rmtree(tmp_path / "one")
    card = json.loads(json.dumps(one.card()))
    back = Tokenizer.from_card(card)
    assert (back, back.text([260, 261]), len(back)) == (one, one.text([260, 261]), len(one))
    for damaged in ({**card, "labels": other.labels()}, {**card, "tokenizer": {**card["tokenizer"], "digest": "x"}}):
        with pytest.raises(ValueError, match="is not that of the training"):
            Tokenizer.from_card(damaged)
    merges = card["tokenizer"]["files"]["tokenizer.json"].replace('"ignore_merges": false', '"ignore_merges": true')
    changed = {**card["tokenizer"], "files": {**card["tokenizer"]["files"], "tokenizer.json": merges}}
    with pytest.raises(ValueError, match="is not that of the training"):
        Tokenizer.from_card({**card, "tokenizer": changed})


SHORT = ("train.max_steps=4", "train.batch_size=4", "run.name=run", "threads=1", "device=cpu", "precision=fp32")
FINE_TUNED = {
    "causal_lm": ("dataset=text", "model.name=donor", "model.pretrained=true", "dataset.sequence_length=16"),
    "sequence_classifier": ("dataset=labelled_text", "model.name=roberta"),
}


@pytest.mark.long
@pytest.mark.parametrize("option", FINE_TUNED)
def test_a_run_is_resumed_evaluated_and_asked_with_the_same_tokenizer(option, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make = byte_level if option == "causal_lm" else of_words
    make("tok")
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 16}
    transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=288, **sizes)).save_pretrained("donor")
    path = (corpus if option == "causal_lm" else labelled)(tmp_path / "data.tsv")

    def run(*words, code=0):
        done = run_in_process(*words, cwd=tmp_path)
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr

    run(f"model={option}", *FINE_TUNED[option], f"dataset.path={path}", "dataset.tokenizer=tok", *SHORT)
    card = json.loads((tmp_path / "outputs/run/data.json").read_text())
    assert card["tokenizer"]["name"] == "tok"
    run("resume", "outputs/run", "train.max_steps=6")
    run("eval", "outputs/run")
    run("export", "outputs/run", "--output", str(tmp_path / "weights.pt"))
    assert json.loads((tmp_path / "weights.pt.json").read_text())["tokenizer"] == card["tokenizer"]
    asked = [sentence.strip() for sentence in SENTENCES]
    with predictor("outputs/run") as loaded:
        before = [one.answer for one in loaded.predict(asked)]
    width = {"causal_lm": 288, "sequence_classifier": 2}[option]
    assert open_run("outputs/run").model()(torch.ones(1, 5, dtype=torch.int64)).shape[-1] == width
    shutil.rmtree("tok")
    byte_level("tok", 281)
    for words in (("eval", "outputs/run"), ("resume", "outputs/run", "train.max_steps=8")):
        assert "another tokenizer in dataset.tokenizer=tok as it is read now" in run(*words, code=6)
    shutil.rmtree("tok")
    assert "dataset.tokenizer=tok is no folder" in run("eval", "outputs/run", code=6)
    with predictor("outputs/run") as loaded:
        assert [one.answer for one in loaded.predict(asked)] == before
