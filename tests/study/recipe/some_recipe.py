"""A recipe without a file."""

from __future__ import annotations

from pathlib import Path

from mptrain.study.recipe.recipe import Recipe


def some_recipe(**changes):
    fields = {
        "name": "mine",
        "path": Path("mine/recipe.yaml"),
        "title": "Mine",
        "claim": "It works.",
        "source": "me",
        "arms": {"fp32": ("precision=fp32",), "bf16": ("precision=bf16",)},
        "reference": "fp32",
        "seeds": (0, 1),
        "margin": 0.1,
        "smoke": ("train.max_steps=2",),
    }
    return Recipe(**{**fields, **changes})
