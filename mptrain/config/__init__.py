"""Configuration of a training run: turns ``KEY=VALUE`` overrides and YAML files into a frozen `schema.Config`.

Only this package uses Hydra and OmegaConf. This file imports nothing, so that help and listing stay fast. Its
functions raise ConfigError with all problems found, not only the first.
"""
