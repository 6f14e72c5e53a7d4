"""Configuration: turns command-line overrides and YAML files into one frozen `mptrain.config.schema.Config`.

Only this package uses Hydra, OmegaConf and pydantic. This file imports nothing, so that help and listing stay fast.
"""
