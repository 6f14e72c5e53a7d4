"""Names in other frameworks for groups, options, keys, targets and commands, used in hints.

No command accepts these names. Imports nothing heavy, so that usage errors are reported at once.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import TYPE_CHECKING

from mptrain.system.errors import did_you_mean, either, near_names

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mptrain.config.catalogue import Catalogue

#: Values that disable a group in other frameworks; they mean its option ``none``, if it has one.
_OFF = "off false no none null disabled"

#: Maps group and option (or prefix of options) to its names in other frameworks: O0 to O3 are apex's, 16-mixed etc.
#: Lightning's, mixed_float16 etc. Keras's.
_OPTIONS: dict[str, dict[str, str]] = {
    "precision": {
        "amp_dynamic": "16-mixed 16 O1 mixed mixed_precision mixed_float16 amp_fp16 autocast true",
        "amp_bf16": "bf16-mixed mixed_bfloat16",
        "fp16_static": "multi_precision",
        "fp16": "float16 half",
        "fp16_dynamic": "O2",
        "fp16_pure": "16-true O3",
        "bf16": "bfloat16",
        "bf16_pure": "bf16-true",
        "bf16_stochastic": "stochastic stochastic_rounding",
        "bf16_kahan": "kahan kahan_sum",
        "fp8_current_emulated": "fp8 float8 fp8_current fp8_tensor tensorwise",
        "mxfp8_emulated": "mxfp8",
        "nvfp4_emulated": "nvfp4 fp4",
        "fp32": f"32 32-true O0 float32 float single full {_OFF}",
    },
    "scaler": {
        "torch": "gradscaler grad_scaler",
        "keras": "lossscaleoptimizer",
        "nnabla": "dynamiclossscalingupdater",
        "static": "constant fixed",
        "dynamic": "auto automatic true",
    },
    "optimizer": {"sgd": "momentum nesterov"},
    "schedule": {
        "step": "multistep multisteplr steplr",
        "cosine": "cosineannealing cosineannealinglr",
        "inverse_sqrt": "noam rsqrt",
        "constant": f"fixed {_OFF}",
        "polynomial": "poly polynomiallr",
        "exponential": "exponentiallr",
        "one_cycle": "onecyclelr",
        "warmup_stable_decay": "wsd trapezoidal",
        "cosine_restarts": "sgdr cosineannealingwarmrestarts",
        "plateau": "reducelronplateau reduce_lr_on_plateau reduce_on_plateau",
    },
    "distributed": {
        "ddp": f"dp distributeddataparallel data_parallel {_OFF}",
        "fsdp2": "fsdp fully_shard zero zero3 deepspeed",
    },
    "logger": {"tensorboard": "tb summarywriter", "wandb": "weights_and_biases"},
}

#: Maps key to its names in other frameworks. Entries with ``=`` or a blank are complete; ``{value}`` is replaced.
_KEYS = {
    "optimizer.lr": "learning_rate base_lr max_lr",
    "train.epochs": "max_epochs num_epochs n_epochs num_train_epochs",
    "train.max_steps": "num_steps max_iters iterations total_steps steps",
    "train.batch_size": "bs batchsize per_device_train_batch_size train_batch_size",
    "train.accumulate": "accumulate_grad_batches gradient_accumulation_steps accumulation_steps grad_accum",
    "train.clip_norm": "max_grad_norm gradient_clip_val grad_clip clip_grad clip_grad_norm clip",
    "train.ema_decay": "ema",
    "train.early_stopping.patience": "early_stopping_patience patience",
    "schedule.warmup": "warmup_steps num_warmup_steps",
    "schedule.warmup=UPDATES, which counts updates, not epochs": "warmup_epochs num_warmup_epochs",
    "optimizer.groups": "param_groups parameter_groups",
    """optimizer.groups='[{match: "*.bias", weight_decay: 0}]', or decay_norms_and_biases=false, the default""": (
        "no_decay no_weight_decay"
    ),
    "model.freeze": "frozen freeze_layers frozen_layers",
    "model.weights": "checkpoint ckpt checkpoint_path weights_path finetune fine_tune",
    "dataset.val_share": "val_split val_fraction validation_split val_share",
    "distributed.procs": "gpus num_gpus n_gpu devices nproc_per_node num_processes world_size",
    "dataset.workers": "num_workers dataloader_num_workers",
    "checkpoint.every_epochs": "save_every save_interval",
    "checkpoint.every_steps": "save_steps save_every_steps",
    "run.root": "output_dir out_dir save_dir log_dir default_root_dir",
    "run.name": "name experiment_name exp_name run_name",
    "seed": "random_seed manual_seed",
    "device": "accelerator",
    "threads": "num_threads",
    "model": "arch net network",
    "optimizer": "opt optim",
    "schedule": "lr_scheduler sched",
    "scaler": "grad_scaler",
    "distributed": "strategy backend",
    "precision": "mixed_precision dtype opt_level type_config target_dtype dtype_policy policy",
    "precision.master_weights": "master_weight master_params",
    "precision=amp_dynamic": "amp use_amp autocast",
    "precision=fp16_dynamic": "fp16 half multi_precision",
    "precision=amp_bf16": "bf16",
    "scaler=static scaler.scale={value}": "loss_scale static_loss_scale grad_scale",
    "scaler=static scaler.scale=N, which also divides the gradients by N": "rescale_grad",
    "scaler.init_scale": "initial_scale init_scaling initial_loss_scale",
    "scaler.growth_interval": "scale_window dynamic_growth_steps increment_period incr_every_n_steps",
    "device=cuda": "gpu cuda use_cuda",
    "device=cpu": "cpu",
    "logger=wandb": "wandb use_wandb",
    "logger=tensorboard": "tensorboard",
    "mptrain resume {value}": "resume resume_from_checkpoint ckpt_path",
}

#: Maps group to the override that disables it, for flags of other frameworks such as ``fp16=false``.
_WITHOUT = {"precision": "precision=fp32", "logger": "logger=none"}

#: Maps key to values of other frameworks and the values of mptrain.
_VALUES = {"device": {"gpu": "cuda", "hip": "cuda", "metal": "mps", "rocm": "cuda"}}

#: Maps command to its names in other programs.
_COMMANDS = {
    "train": "fit run start",
    "eval": "test validate evaluate metrics",
    "predict": "infer inference generate sample classify translate transcribe",
    "resume": "continue restart",
    "list": "ls show models configs",
    "copy": "cp new init edit",
    "doctor": "check info env",
    "-m": "sweep multirun search grid",
    "--version": "version",
}


def near_options(group: str, word: str, options: list[str]) -> list[str]:
    """Return the options of a configuration group that a word may mean: ``amp_bf16`` for Lightning's ``bf16-mixed``.

    Args:
        group: Name of the group, such as ``precision``.
        word: Word that is not an option of the group.
        options: Names of the group's options.
    """
    for option, others in _OPTIONS.get(group, {}).items():
        if _plain(word) in map(_plain, others.split()):
            return near_names(option, options)
    if _plain(word) in _OFF.split() and "none" in options:
        return ["none"]
    return near_names(word, options)


def translate(key: str, value: str) -> str:
    """Return the override for a configuration key of another framework: ``train.clip_norm=1`` for ``max_grad_norm``.

    Args:
        key: Key as written; only its last component counts.
        value: Value as written.

    Returns:
        The override or command; empty if the key is unknown.
    """
    last = _plain(key.rpartition(".")[2])
    for ours, others in _KEYS.items():
        if last in map(_plain, others.split()):
            if ours.startswith("mptrain ") and value.lower() in ("true", "yes", "1"):
                value = "last"
            if "=" in ours and "{" not in ours and value.lower() in _OFF.split():
                return _WITHOUT.get(ours.partition("=")[0], "")
            return ours.replace("{value}", value) if set("= ") & set(ours) else f"{ours}={value}"
    return ""


def translate_value(key: str, value: object) -> str:
    """Return mptrain's value for another framework's value of a key (``cuda`` for ``device=gpu``), or empty text."""
    if key == "device" and str(value).isdecimal():
        return f"cuda:{value}"
    return _VALUES.get(key, {}).get(str(value).lower(), "")


def translate_command(word: str) -> str:
    """Return the mptrain command for its name in other programs (``resume`` for ``continue``), or an empty string."""
    return next((command for command, others in _COMMANDS.items() if word.lower() in others.split()), "")


def guess_word(name: str, value: str, catalogue: Catalogue, *, exact: bool = False) -> str:
    """Return the override that an unknown flag or bare word may mean: ``train.epochs=3`` for ``--epochs 3``.

    No configuration is composed, so that the hint appears at once.

    Args:
        name: Name as written, without leading dashes.
        value: Value of the flag.
        catalogue: All groups and keys.
        exact: Whether to reject keys that only resemble the name.

    Returns:
        The override; empty if there is no guess.
    """
    name = name.replace("-", "_")
    keys = catalogue.usual_keys()
    if name in keys:
        return f"{name}={value}"
    if words := translate(name, value):
        return words
    last = {key.rpartition(".")[2]: key for key in reversed(keys)}
    guess = last.get(name, "")
    if not guess and not exact:
        guess = did_you_mean(name, keys) or last.get(did_you_mean(name, last), "")
    return f"{guess}={value}" if guess else ""


def torchvision_names(word: str) -> list[str]:
    """Return the names of torchvision's classifiers that a word may mean; torchvision's files are read, not imported.

    Args:
        word: Name of a network; upper and lower case are equal.

    Returns:
        The classifier of this name, or else those that begin with it; empty for fewer than three characters.
    """
    return _registered("torchvision", word)


def model_named(word: str) -> str:
    """Return the overrides of the network of torchvision, timm or transformers that a word names; or empty text.

    Files of these packages are read, not imported.

    Args:
        word: Name of a network, or the beginning of names; of transformers, a whole name of an architecture.
    """
    for package in ("torchvision", "timm"):
        if names := _registered(package, word):
            return f"model={package} model.name={either(names)}"
    text = "".join(_sources("transformers", "models/auto/modeling_auto.py"))
    for option, task in (("sequence_classifier", "MASKED_LM"), ("causal_lm", "CAUSAL_LM")):
        table = re.search(rf"^MODEL_FOR_{task}_MAPPING_NAMES = .*?^\)", text, re.MULTILINE | re.DOTALL)
        for name in re.findall(r'\("([\w-]+)", ', table[0]) if table else ():
            if _plain(name) == _plain(word):
                return f"model={option} model.name={name}"
    return ""


def _registered(package: str, word: str) -> list[str]:
    """Return the registered networks of torchvision or timm with a name, or else those whose names begin with it."""
    name = word.lower()
    if not name.isidentifier() or len(name) < 3:
        return []
    builder = re.compile(rf"^@register_model\b.*\n(?:@.*\n)*def ({name}\w*)\(", re.MULTILINE)
    names = [network for text in _sources(package, "models/*.py") for network in builder.findall(text)]
    return [name] if name in names else names


def _sources(package: str, pattern: str) -> Iterator[str]:
    """Yield the texts of the files of a package that match a pattern, in order; none if it is not installed."""
    spec = importlib.util.find_spec(package)
    for path in sorted(Path(spec.origin).parent.glob(pattern)) if spec and spec.origin else ():
        yield path.read_text(encoding="utf-8")


def optimizer_named(word: str) -> str:
    """Return the overrides of the optimizer of torch.optim or timm that a word names, read from their files; or empty.

    Args:
        word: Name of an optimizer; case and separators do not matter.
    """
    sources = {
        "torch": ("optim/__init__.py", r"^from torch\.optim\.\w+ import ([A-Z]\w+) as"),
        "timm": ("optim/_optim_factory.py", r"^ +name='(\w+)',"),
    }
    for package, (file, pattern) in sources.items():
        known = [name for text in _sources(package, file) for name in re.findall(pattern, text, re.MULTILINE)]
        if name := next((name for name in known if name != "Optimizer" and _plain(name) == _plain(word)), ""):
            return f"optimizer={package} optimizer.name={name}"
    return ""


def _plain(word: str) -> str:
    return re.sub(r"[\W_]", "", word.lower())
