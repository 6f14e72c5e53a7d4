"""A Hydra application that does nothing."""

import hydra


@hydra.main(version_base="1.3", config_path=None)
def main(config: object) -> None:
    """Nothing."""


main()
