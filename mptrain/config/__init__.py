"""Configuration of a training run: turns ``KEY=VALUE`` overrides and YAML files into one frozen dataclass.

The dataclass is `mptrain.config.schema.Config`. Only this package uses Hydra, OmegaConf and pydantic. This file imports
nothing, so that help and listing stay fast.
"""
