"""The border: command-line words and YAML in, one frozen `mptrain.config.schema.Config` out.

Hydra, OmegaConf and pydantic stay behind it. This file imports nothing, so that help and listing stay fast.
"""
