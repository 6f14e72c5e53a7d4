"""Facts about composing: what wins over what, what is refused, and that everything is said at once."""

import math
import shlex
import shutil
import sys

import pytest

from mptrain.config import compose as module
from mptrain.config.catalogue import Catalogue, configs_folder
from mptrain.config.compose import Composer, compose, reload
from mptrain.system.errors import ConfigError
from tests.loops import each


def problems(*words, **options):
    """What composing says about these words: problem to hint."""
    with pytest.raises(ConfigError) as caught:
        compose(words, **options)
    return {problem.what: problem.hint for problem in caught.value.problems}


def test_the_default_is_the_one_that_the_files_say():
    config = compose([])
    training = {"task": "classify", "dataset": "digits", "model": "cnn", "optimizer": "sgd", "schedule": "cosine"}
    others = {"scaler": "dynamic", "precision": "amp_dynamic", "logger": "none", "diagnostics": "none"}
    assert config.chosen == {**training, **others, "distributed": "ddp"}
    assert config.train.epochs == 10
    assert config.run.name is None
    assert config.warnings == ()


def test_precision_chooses_the_scaler_and_the_command_line_wins():
    assert compose(["precision=fp32"]).scaler.path == "mptrain.scaler.NoScaler"
    assert compose(["precision=fp16_static"]).scaler.path == "mptrain.scaler.StaticScaler"
    chosen = compose(["scaler=static", "precision=fp32", "scaler.scale=8"])
    assert chosen.scaler.arguments["scale"] == 8.0


def test_the_model_chooses_optimizer_and_rate_and_the_command_line_wins():
    chosen = compose(["model=plain16"])
    assert (chosen.optimizer.path, chosen.train.batch_size) == ("mptrain.optimizer.Adam", 128)
    assert compose(["model=plain16", "optimizer=sgd"]).optimizer.path == "mptrain.optimizer.SGD"
    assert compose(["model=plain16", "train.batch_size=7"]).train.batch_size == 7
    assert chosen.optimizer.arguments["lr"] == chosen.model_defaults["lr"]["adam"]
    assert compose(["model=plain16", "optimizer=sgd"]).optimizer.arguments["lr"] == 0.05  # as sgd.yaml says
    assert compose(["model=plain16", "optimizer.lr=0.5"]).optimizer.arguments["lr"] == 0.5


def test_the_last_of_two_words_counts_and_an_empty_group_may_be_null():
    config = compose(["train.epochs=1", "precision=fp32", "precision=bf16", "train.epochs=2"])
    assert config.train.epochs == 2
    assert config.precision.name == "bf16"
    assert compose(["debug=smoke", "debug=null"]).train.max_steps is None
    assert compose(["debug=null", "debug=smoke"]).train.max_steps == 2


@each(
    ("word", "what", "hint"),
    [
        ("precision=5", "no option '5' in precision", ""),
        ("epochs=3", "unknown key 'epochs'", "did you mean train.epochs=3?"),
        ("train.epoch=3", "unknown key 'train.epoch'", "did you mean train.epochs=3?"),
        ("trian.epochs=3", "unknown key 'trian.epochs'", "did you mean train.epochs=3?"),
        ("model.widht=3", "unknown key 'model.widht'", ""),
        ("model.nothing=3", "unknown key 'model.nothing'", "models.convnet.cnn takes widths"),
        ("+model.depht=3", "unknown key 'model.depht'", ""),
        ("model.widths.9=16", "unknown key 'model.widths.9'", ""),
        ("train.epochs.x=3", "unknown key 'train.epochs.x'", ""),
        ("zzz=3", "unknown key 'zzz'", "mptrain list shows all groups and keys"),
        ("train={epoch:3}", "unknown key 'train.epoch'", "did you mean train.epochs=3?"),
        ("train=3", "train=3: must be a mapping", ""),
        ("seed=1,2,3", "seed=1,2,3: several values for one key: add -m to sweep", ""),
        ("precision=fp32,bf16", "precision=fp32,bf16: two values for one key: add -m to sweep", ""),
        ("seed=range(1,4)", "seed=range(1,4): several values for one key: add -m to sweep", ""),
        ("precision=[fp32,bf16]", "precision=[fp32,bf16]: only one option of a group can be chosen", ""),
        ("+model=mlp", "'+model=mlp': model already has an option", "write model=mlp"),
        ("model@other=mlp", "'model@other=mlp': the package of model is fixed", "write model=mlp"),
        ("+train.epochs=3", "'+train.epochs=3': train.epochs already exists", "write train.epochs=3"),
        ("+train.foo=3", "unknown key 'train.foo'", ""),
        ("++foo.bar=3", "unknown key 'foo.bar'", ""),
        ("~train.epochs", "'~train.epochs': train.epochs cannot be removed", "give it another value instead"),
        ("~nothing", "'~nothing': there is no key 'nothing' to remove", ""),
        ("~model._target_", "'~model._target_': model._target_ cannot be removed", ""),
        ("hydra.run.dir=x", "'hydra.run.dir' has no effect: mptrain creates", "use run.root or run.name"),
        ("hydra.searchpath=[x]", "'hydra.searchpath' is set by mptrain", "add a folder with --config-dir DIR"),
        ("hydra.mode=MULTIRUN", "'hydra.mode' has no effect", ""),
        ("hydra.verbose=true", "'hydra.verbose' has no effect", ""),
        ("hydra/job_logging=none", "'hydra/job_logging' has no effect", ""),
        ("run.name=é", "'run.name=é' cannot be read: 'é' must be in quotes", "quote the value: 'run.name=\"é\"'"),
        ("train.epochs=${nowhere}", "train.epochs: Interpolation key 'nowhere' not found", ""),
        ("optimizer.lr=${optimizer.lr}", "optimizer.lr: Recursive interpolation detected", ""),
        ("run.name=../x", "run.name='../x' has '..' as a part of the path", ""),
    ],
)
def test_a_wrong_word_is_named_with_what_to_write_instead(word, what, hint):
    [(said, hinted)] = problems(word).items()
    assert said.startswith(what)
    assert hint in hinted


KEYS = {
    "train.epochs": "a whole number, at least 1",
    "train.max_steps": "a whole number, at least 1, or null",
    "train.clip_norm": "a number above 0, or null",
    "train.channels_last": "true or false",
    "seed": "a whole number from 0 to 2^63-1 (9223372036854775807)",
    "device": "auto, cpu, cuda, cuda:N, xpu, xpu:N or mps",
    "threads": "a whole number, at least 1, or null",
    "checkpoint.keep": "a whole number, at least 1",
    "log.lines": "a number, at least 0",
    "run.resume": "auto, never or must",
    "precision.keep_fp32": "a list, each entry text",
    "precision.compute": "float32, float16 or bfloat16",
    "scaler.growth_factor": "a number above 1",
    "scaler.backoff_factor": "a number above 0 and below 1",
    "scaler.growth_interval": "a whole number, at least 1",
    "scaler.on_overflow": "skip or apply",
    "optimizer.lr": None,
}
WRONG = ("1.5x", "nan", "inf", "-1", "[x,{}]", "-0.5", "{a:1}")


@each("value", WRONG)
def test_a_value_out_of_range_is_answered_with_key_value_and_range(value):
    found = problems(*(f"{key}={value}" for key in KEYS))
    for key, wanted in KEYS.items():
        [what] = [what for what in found if what.startswith(f"{key}=")]
        finite = "a finite number" if value in ("nan", "inf") else "a number"
        assert what.endswith(f": must be {wanted}".replace("a number", finite)) if wanted else ": must be " in what


@each(
    ("word", "hint"),
    [
        ("scaler.init_scale=2**16", "write scaler.init_scale=65536"),
        ("optimizer.lr=2^-3", "write optimizer.lr=0.125"),
        ("train.max_steps=None", "write train.max_steps=null"),
        ("train.compile=yes", "write train.compile=true"),
        ("train.channels_last=0", "write train.channels_last=false"),
        ("device=1", "did you mean device=cuda:1?"),
        ("model==cnn", "write model=cnn"),
        ("optimizer.betas=(0.9,0.99)", "write optimizer.betas=[0.9,0.99]"),
        ("train.epochs=3,", "write train.epochs=3"),
        ("train.epochs=[1", "quote the value: 'train.epochs=\"...\"'"),
    ],
)
def test_a_value_in_another_notation_is_hinted_in_ours(word, hint):
    [(what, hinted)] = problems(word).items()
    assert hinted == hint
    assert "expecting {" not in what
    assert "EOF" not in what


def test_a_key_of_the_other_scaler_is_answered_with_that_scaler_and_with_its_counterpart():
    [(what, hint)] = problems("scaler.scale=8").items()
    assert what == "unknown key 'scaler.scale' in the chosen scaler: it belongs to scaler=static"
    assert hint == "write scaler=static scaler.scale=8, or scaler.init_scale=8 for the chosen scaler"
    [(what, hint)] = problems("precision=fp16_static", "scaler.init_scale=8").items()
    assert "belongs to scaler=dynamic, scaler=als, scaler=apex or one of" in what
    assert hint == "write scaler=dynamic scaler.init_scale=8, or scaler.scale=8 for the chosen scaler"


def test_a_key_of_another_option_names_the_options_that_have_it():
    [(what, hint)] = problems("model=resnet18", "dataset.root=pictures").items()
    assert "it belongs to dataset=image_folder, dataset=" in what
    assert hint == "write dataset=image_folder dataset.root=pictures"
    [hint] = problems("task=enhance", "dataset=digits", "dataset.root=photos").values()
    assert hint == "write dataset=photo_folder dataset.root=photos"
    [(what, hint)] = problems("optimizer.betas=[0.9,0.99]").items()
    assert "it belongs to optimizer=adam or optimizer=adamw" in what
    assert hint == "write optimizer=adam optimizer.betas=[0.9,0.99]"
    [hint] = problems("dataset=cifar10", "dataset.path=/data").values()
    assert hint == "write dataset.root=/data for the chosen dataset"


@each(
    ("word", "hint"),
    [
        ("precision=half", "fp16_dynamic, fp16_noscale, fp16_pure or fp16_static"),
        ("precision=bf16_amp", "did you mean amp_bf16?"),
        ("precision=BF16", "did you mean bf16?"),
        ("precision=mixed", "did you mean amp_dynamic?"),
        ("precision=bf16-mixed", "did you mean amp_bf16?"),
        ("scaler=gradscaler", "did you mean torch?"),
        ("scaler=off", "did you mean none?"),
        ("optimizer=AdamW", "did you mean adamw?"),
        ("schedule=MultiStepLR", "did you mean step?"),
        ("schedule=onecycle", "one_cycle"),
        ("schedule=wsd", "warmup_stable_decay"),
        ("schedule=ReduceLROnPlateau", "plateau"),
        ("distributed=fsdp", "did you mean fsdp2?"),
        ("dataset=mnist", "did you mean fashion_mnist?"),
        ("model=transformer_small", "did you mean transformer_small_translation?"),
        ("model=resnet34", "did you mean model=torchvision model.name=resnet34?"),
        ("model=mobilenet_v", "model.name=mobilenet_v2, mobilenet_v3_large or mobilenet_v3_small?"),
        ("model=mine.Net", "'_target_: mine.Net' and its own keys, and write --config-dir DIR model=NAME"),
        ("optimizer=torch.optim.RAdam", "write optimizer=torch optimizer.name=RAdam"),
        ("model=resnet10t", "did you mean model=timm model.name=resnet10t?"),
        ("model=GPT-2", "did you mean model=causal_lm model.name=gpt2?"),
        ("model=bert", "did you mean model=sequence_classifier model.name=bert?"),
        ("model=./net.yaml", "save it as DIR/model/NAME.yaml and write --config-dir DIR model=NAME"),
        ("dataset=./", "set dataset=image_folder dataset.root=./"),
        ("model=ViT_b_16", "did you mean model=torchvision model.name=vit_b_16?"),
        ("optimizer=muon_of_mine", "the options are adagrad, adam, adamw, sgd, timm, torch; "),
        ("optimizer=rmsprop", "did you mean optimizer=torch optimizer.name=RMSprop?"),
        ("optimizer=Lion", "did you mean optimizer=timm optimizer.name=lion?"),
    ],
)
def test_an_option_that_there_is_not_hints_those_it_may_stand_for(word, hint):
    [(what, hinted)] = problems(word).items()
    assert what == f"no option '{word.partition('=')[2]}' in {word.partition('=')[0]}"
    assert hint in hinted


@each(
    ("word", "hint"),
    [
        ("learning_rate=0.1", "did you mean optimizer.lr=0.1?"),
        ("train.learning_rate=0.1", "did you mean optimizer.lr=0.1?"),
        ("max_epochs=3", "did you mean train.epochs=3?"),
        ("gpus=2", "did you mean distributed.procs=2?"),
        ("amp=true", "did you mean precision=amp_dynamic?"),
        ("loss_scale=128", "did you mean scaler=static scaler.scale=128?"),
        ("multi_precision=true", "did you mean precision=fp16_dynamic?"),
        ("grad_scale=128", "did you mean scaler=static scaler.scale=128?"),
        ("rescale_grad=0.0078125", "scaler.scale=N, which also divides the gradients by N"),
        ("type_config=half", "did you mean precision=half?"),
        ("amp=false", "did you mean precision=fp32?"),
        ("wandb=true", "did you mean logger=wandb?"),
        ("resume=true", "did you mean mptrain resume last?"),
        ("resume=outputs/x", "did you mean mptrain resume outputs/x?"),
        ("device=gpu", "did you mean device=cuda?"),
        ("train.val_split=0.1", "did you mean dataset.val_share=0.1?"),
        ("early_stopping.patience=2", "did you mean train.early_stopping.patience=2?"),
        ("train.patience=2", "did you mean train.early_stopping.patience=2?"),
        ("schedule.warmup_epochs=1", "did you mean schedule.warmup=UPDATES, which counts updates, not epochs?"),
        ("optimizer.no_decay=[bias]", "did you mean optimizer.groups='[{match: \"*.bias\", weight_decay: 0}]'"),
        ("optimizer.param_groups=[]", "did you mean optimizer.groups=[]?"),
        ("optimizer.group=[]", "did you mean optimizer.groups=[]?"),
        ("model.frozen=[conv1]", "did you mean model.freeze=[conv1]?"),
        ("model.checkpoint=x.pt", "did you mean model.weights=x.pt?"),
        ("model.num_classes=5", "leave it out: the data set determines it; +model.num_classes=5 passes another value"),
        ("optimizer._target_=torch.optim.RAdam", "or add ~optimizer.momentum ~optimizer.nesterov"),
        ("early_stopping_patience=4", "train.early_stopping.patience=4"),
        ("log.every=5", "log has ring, seconds, lines, stall_report_after"),
    ],
)
def test_a_key_as_other_frameworks_call_it_hints_ours(word, hint):
    [hinted] = problems(word).values()
    assert hint in hinted


@each("group", ["distributed", "scaler", "model", "logger"])
@each("form", ["{}=null", "~{}"])
def test_a_group_that_cannot_be_left_out_says_what_to_write_instead(group, form):
    [(what, hint)] = problems(form.format(group)).items()
    assert what.endswith(f": a run needs an option of {group}")
    name = "none" if group in ("scaler", "logger") else Catalogue([configs_folder()]).defaults[group]
    assert hint.startswith(f"write {group}={name} (")


def test_a_value_out_of_range_is_explained_by_the_comment_beside_its_key():
    [(what, hint)] = problems("schedule=step", "schedule.milestones=[3]").items()
    assert what == "schedule.milestones=[3]: must be a list, each entry a number from 0 to 1"
    assert hint.startswith("schedule.milestones: fractions of the run from 0 to 1")
    assert problems("train.epochs=0") == {
        "train.epochs=0: must be a whole number, at least 1": "train.epochs: passes over the training data"
    }


def test_with_a_wrong_option_its_keys_are_not_called_unknown():
    assert list(problems("precision=fp16_statik", "scaler.scale=8")) == ["no option 'fp16_statik' in precision"]


@each("key", ["scale=1000", "init_scale=3", "growth_factor=1.5", "backoff_factor=0.3", "scale=1.3e30"])
def test_a_scale_that_rounds_gradients_is_a_warning_not_an_error(key):
    [warning] = compose(["scaler=static"] * key.startswith("scale=") + [f"scaler.{key}"]).warnings
    assert warning.startswith(f"scaler.{key} is not a power of two".replace("1.3e30", "1.3e+30"))
    assert "rounds the gradients" in warning
    nearest = {"scale=1000": "nearest: 1024", "scale=1.3e30": "nearest: 2^100"}
    assert warning.endswith(nearest.get(key, ""))
    assert compose(["scaler=static", "scaler.scale=0.125"]).warnings == ()
    [what] = problems("scaler=static", "scaler.scale=1.79e308")
    assert what.startswith("scaler.scale=1.79e+308 is outside the normal FP32 numbers")


def test_start_floor_and_ceiling_of_the_scale_must_be_in_order():
    [what] = problems("scaler.min_scale=131072")
    assert "scaler.init_scale" in what
    assert "scaler.min_scale" in what


def test_facts_of_a_precision_that_contradict_each_other_are_refused():
    [what] = problems("precision=tf32", "precision.eval=fp32")
    assert what.startswith("precision.eval=fp32 with precision.tf32=true")
    [what] = problems("precision=fp32", "precision.master_weights=true")
    assert "they are their own master copy" in what


def test_trap_30_an_eps_that_is_not_written_counts_with_its_default(tmp_path):
    (tmp_path / "optimizer").mkdir()
    (tmp_path / "optimizer" / "bare.yaml").write_text("_target_: mptrain.optimizer.Adam\nlr: 0.001\n")
    words = ["precision=fp16_pure", "precision.optimizer_state=parameters", "optimizer=bare"]
    with pytest.raises(ConfigError, match=r"optimizer\.eps=1e-08"):
        compose(words, config_dirs=[tmp_path])


def test_fp16_optimizer_state_needs_an_eps_that_fp16_can_hold():
    words = ["precision=fp16_pure", "precision.optimizer_state=parameters", "optimizer=adam"]
    [what] = problems(*words)
    assert "optimizer.eps=1e-08" in what
    assert "5.96e-08" in what
    assert compose([*words, "optimizer.eps=1e-4"]).optimizer.arguments["eps"] == 1e-4


@each("target", ["theirs.net", "os.system", "subprocess.run", "shutil.rmtree", "builtins.exec"])
def test_nobody_is_told_how_to_allow_what_is_no_part_of_a_run(target):
    [(what, hint)] = problems(f"model._target_={target}").items()
    assert f"'{target}' is not in an allowed package" in what
    assert ("extensions.allow=[theirs.*]" in hint) == (target == "theirs.net") != ("check who wrote this" in hint)


def test_a_trusted_extension_is_called(tmp_path, monkeypatch):
    (tmp_path / "extension_net.py").write_text(
        "def net(width: int, num_classes: int):\n    return width, num_classes\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    words = ["model={_target_: extension_net.net, width: 3}", "~model.widths", "extensions.allow=[extension_net]"]
    config = compose(words)
    assert config.model.build(num_classes=2) == (3, 2)
    sys.modules.pop("extension_net", None)


def test_an_argument_of_the_network_behind_a_target_has_its_place():
    for words, hint in (
        (["model=timm", "model.drop_path_rate=0.1"], "set model.arguments.drop_path_rate=0.1 to pass it on"),
        (["model=causal_lm", "model.resid_pdrop=0.1"], "set model.config.resid_pdrop=0.1 to pass it on"),
        (["model=timm", "model.nam=resnet18"], "did you mean model.name=resnet18?"),
    ):
        with pytest.raises(ConfigError) as caught:
            compose(words)
        assert [problem.hint for problem in caught.value.problems] == [hint]


def test_the_title_of_a_model_has_the_name_of_its_network_once():
    for words, title in (
        (["model=timm", "model.name=resnet10t"], "timm resnet10t"),
        (["model=causal_lm"], "causal_lm gpt2"),
        (["model=resnet18"], "resnet18"),
        (["model=mlp"], "mlp"),
    ):
        assert compose(words).model_title == title


def test_arguments_can_be_taken_away_changed_in_part_and_interpolated():
    assert compose(["~model.widths"]).model.arguments == {}
    assert compose(["model.widths.0=16"]).model.arguments["widths"][0] == 16
    config = compose(["dataset.train_samples=${train.batch_size}", "train.batch_size=16"])
    assert config.dataset.arguments["train_samples"] == 16


def test_a_folder_of_ones_own_adds_options(tmp_path):
    (tmp_path / "scaler").mkdir()
    (tmp_path / "scaler" / "mine.yaml").write_text("# Mine.\n_target_: mptrain.scaler.StaticScaler\nscale: 4\n")
    config = compose(["scaler=mine"], config_dirs=[tmp_path])
    assert config.scaler.arguments["scale"] == 4.0
    with pytest.raises(ConfigError, match="there is no such folder"):
        compose([], config_dirs=[tmp_path / "nowhere"])
    with pytest.raises(ConfigError, match="no such file"):
        compose([], config_name="nothing")


def test_a_value_that_a_file_leaves_open_is_required(tmp_path):
    (tmp_path / "scaler").mkdir()
    (tmp_path / "scaler" / "open.yaml").write_text("_target_: mptrain.scaler.StaticScaler\nscale: ???\n")
    assert problems("scaler=open", config_dirs=[tmp_path]) == {"scaler.scale is required": "write scaler.scale=VALUE"}
    assert compose(["scaler=open", "scaler.scale=2"], config_dirs=[tmp_path]).scaler.arguments["scale"] == 2.0


@pytest.mark.parametrize("text", ["defaults: [nowhere]\n", "foo: 1\n", "run: 3\n"])
def test_a_damaged_file_is_an_error_with_a_message(tmp_path, text):
    (tmp_path / "debug").mkdir()
    (tmp_path / "debug" / "bad.yaml").write_text("# @package _global_\n" + text)
    assert problems("debug=bad", config_dirs=[tmp_path])


@pytest.mark.parametrize(
    ("content", "what", "hint"),
    [
        (b"train:\n  a: [1\n  b: 2\n", "{}, line 3 is not YAML", "quote values"),
        (b"train:\n\tepochs: 1\n", "{}, line 2 is not YAML", "not with tabs"),
        (b"# @package _global_\n- 1\n", "{} is a list or a single value", "KEY: VALUE"),
        (b"a: \xff\n", "{} is not UTF-8 text", "save it as UTF-8"),
        (b"a: 1\na: 2\n", "{}, line 2: found duplicate key a", "correct that file"),
    ],
)
@pytest.mark.parametrize("place", ["debug/bad.yaml", "top.yaml"])
def test_a_file_that_cannot_be_read_is_named_with_its_line(tmp_path, place, content, what, hint):
    path = tmp_path / place
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    if place == "top.yaml":
        found = problems(config_dirs=[tmp_path], config_name="top")
    else:
        found = problems("debug=bad", config_dirs=[tmp_path])
    [(said, hinted)] = found.items()
    assert said.startswith(what.format(path))
    assert hint in hinted


@pytest.mark.parametrize(
    "text",
    [
        "model:\n  _target_: mptrain.workloads.classification.models.convnet.cnn\n",
        "# @package _global_\n_target_: mptrain.workloads.classification.models.convnet.cnn\n",
    ],
)
def test_a_model_file_with_half_of_its_header_is_told_the_other_half(tmp_path, text):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text(text)
    hint = next(iter(problems("model=mine", config_dirs=[tmp_path]).values()))
    assert "'# @package _global_'" in hint
    assert "'model:'" in hint


def test_the_saved_text_gives_the_same_configuration_again():
    config = compose(["model=plain16", "precision=fp16_static", "scaler.scale=8", "train.max_steps=1e2"])
    again = reload(config.yaml)
    assert again.yaml == config.yaml
    assert (again.model, again.scaler, again.precision) == (config.model, config.scaler, config.precision)
    assert again.chosen == config.chosen
    assert again.model_defaults == config.model_defaults


def test_the_saved_text_runs_as_a_configuration_file_too(tmp_path):
    config = compose(["model=mlp", "precision=bf16"])
    (tmp_path / "config.yaml").write_text(config.yaml)
    again = compose([], config_dirs=[tmp_path], config_name="config")
    assert again.precision == config.precision
    assert again.chosen == config.chosen


def test_reloading_can_choose_another_precision_and_with_it_its_scaler():
    text = compose(["model=plain16", "precision=fp32"]).yaml
    config = reload(text, ["precision=fp16_static", "scaler.scale=8"])
    assert (config.precision.name, config.precision.master_weights) == ("fp16_static", True)
    assert (config.scaler.path, config.scaler.arguments["scale"]) == ("mptrain.scaler.StaticScaler", 8.0)
    assert config.chosen["scaler"] == "static"
    assert config.optimizer == compose(["model=plain16"]).optimizer
    both = reload(text, ["precision=amp_dynamic", "scaler=none", "optimizer=sgd"])
    assert (both.scaler.path, both.optimizer.path) == ("mptrain.scaler.NoScaler", "mptrain.optimizer.SGD")
    assert reload(both.yaml).yaml == both.yaml


def test_reloading_changes_single_values_but_not_what_a_run_is_about():
    text = compose([]).yaml
    assert reload(text, ["train.epochs=12"]).train.epochs == 12
    with pytest.raises(ConfigError) as caught:
        reload(text, ["model=mlp", "train.epoch=3", "train.epochs=-1"])
    assert len(caught.value.problems) == 3
    for damaged in ("a: [", "- 1", "3"):
        with pytest.raises(ConfigError):
            reload(damaged)


def test_files_are_merged_once_for_many_points(monkeypatch):
    calls = []
    merge = module.hydra_compose
    monkeypatch.setattr(module, "hydra_compose", lambda *args, **kwargs: calls.append(1) or merge(*args, **kwargs))
    monkeypatch.setattr(module, "_OURS", {})
    composers = Composer(), Composer()
    words = [["precision=fp32", f"optimizer.lr={rate}"] for rate in (1, 2)]
    rates = [composer.compose(one).optimizer.arguments["lr"] for composer in composers for one in words]
    assert rates == [1.0, 2.0, 1.0, 2.0]
    assert len(calls) == 1


@pytest.mark.long
def test_every_option_of_every_group_composes():
    composer = Composer()
    elsewhere = ("model", "schedule")  # test_sizes.py and test_schedules.py compose all of theirs
    for group in composer.catalogue.groups.keys() - elsewhere:
        for name, option in composer.catalogue.groups[group].items():
            needed = [f"{entry.key}=/tmp" for entry in option.entries if entry.value == "???"]
            config = composer.compose([f"{group}={name}", *needed])
            assert math.isfinite(config.optimizer.build().lr)


MLP = "mptrain.workloads.classification.models.perceptron.mlp"


@each(
    ("words", "group", "path"),
    [
        ((f"model._target_={MLP}", "~model.widths"), "model", MLP),
        (("schedule=constant", "schedule._target_=mptrain.schedule.Cosine"), "schedule", "mptrain.schedule.Cosine"),
        (("scaler=none", "scaler._target_=mptrain.scaler.StaticScaler"), "scaler", "mptrain.scaler.StaticScaler"),
        (("model._target_=mptrain.workloads.classification.models.convnet.cnn",), "model", "cnn"),
    ],
)
def test_a_target_that_takes_the_place_of_an_options_own_takes_its_name_too(words, group, path):
    config = compose(words)
    assert config.chosen[group] == path
    assert reload(config.yaml).chosen == config.chosen


@pytest.mark.parametrize("root", ["it's", 'my "best" runs', "a b's\"c"])
def test_a_folder_with_quotes_in_its_name_is_refused_with_the_word_that_is_meant(root):
    with pytest.raises(
        ConfigError, match=r"cannot be read: a value with a (single|double) quote must be in quotes"
    ) as raised:
        compose([f"run.root={root}"])
    (word,) = shlex.split(raised.value.hint.removeprefix("set "))
    assert reload(compose([word]).yaml).run.root == root
    assert compose(["run.root=my runs"]).run.root == "my runs"


@pytest.mark.parametrize("word", ["run.root=a\nb", "run.root='a\nb'", "run.root='a\x1bb'"])
def test_a_folder_with_a_line_end_in_its_name_is_refused(word):
    with pytest.raises(ConfigError, match=r"a line end") as raised:
        compose([word])
    assert raised.value.hint.startswith("choose ")
    assert "token recognition" not in str(raised.value)


def test_files_that_hydra_cannot_place_are_explained(tmp_path):
    for name, text in (
        ("experiment/fast.yaml", "# @package _global_\ntrain: {epochs: 1}\n"),
        ("precision/mine.yaml", "defaults: [override /scaler: static, _self_]\ncompute: float16\n"),
        ("model/mine.yaml", "defaults:\n  - override /task: detect\n  - _self_\n_target_: mine.Net\n"),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    hints = {
        "experiment=fast": ("experiment is not among the groups of train.yaml", "write +experiment=fast"),
        "precision=mine": ("precision/mine.yaml cannot override the option of scaler", "# @package _global_"),
        "model=mine": ("model/mine.yaml cannot override the option of task", "# @package _global_"),
    }
    for word, (what, hint) in hints.items():
        with pytest.raises(ConfigError) as refused:
            compose([word], config_dirs=[tmp_path])
        assert str(refused.value) == what, word
        assert hint in refused.value.hint, word
    assert compose(["+experiment=fast"], config_dirs=[tmp_path]).train.epochs == 1


@each("word", ["run.name='\\${x}'", "run.root='a/\\${seed}'", "model.freeze=['\\${x']"])
def test_what_would_be_an_interpolation_in_the_saved_configuration_is_refused(word):
    assert list(problems(word).values()) == ["choose a value without it"]


def test_files_of_mptrain_that_change_are_merged_again(tmp_path, monkeypatch):
    shutil.copytree(configs_folder(), tmp_path / "configs")
    monkeypatch.setattr("mptrain.config.compose.configs_folder", lambda: tmp_path / "configs")
    assert compose(["model=mlp"]).model.arguments["hidden"] == (128, 128, 128)
    path = tmp_path / "configs/model/mlp.yaml"
    path.write_text(path.read_text().replace("[128, 128, 128]", "[64]"))
    assert compose(["model=mlp"]).model.arguments["hidden"] == (64,)


def test_the_path_of_a_second_run_is_called_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    word = "sweep/001-precision=fp16_dynamic,seed=0"
    (tmp_path / word).mkdir(parents=True)
    with pytest.raises(ConfigError, match="cannot be read") as raised:
        compose([word])
    assert raised.value.hint.startswith("it is the path of a file or folder")
