"""A sweeper of Hydra's that asks for what a test gives it, and keeps the answers."""

from __future__ import annotations

from contextlib import contextmanager

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper


class Asking(Sweeper):
    """Each batch is command lines without the words that have one value; an exception among them is raised."""

    batches = ()
    answers = ()
    seen = None
    gives_up = False

    def __init__(self, params=None):
        self.params = params

    def setup(self, *, hydra_context, task_function, config):
        self.hydra_context, self.config = hydra_context, config
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments):
        type(self).seen = (list(arguments), self.config.hydra.sweep.dir, self.params)
        fixed = [word for word in arguments if "," not in word]
        for batch in self.batches:
            if isinstance(batch, BaseException):
                raise batch
            words = [[*fixed, *batch_words] for batch_words in batch]
            self.validate_batch_is_legal(words)
            type(self).answers += (self.launcher.launch(words, initial_job_idx=0),)
            if self.gives_up:
                print([answer.return_value for answer in self.answers[-1]])


@contextmanager
def asking():
    """It is ``hydra/sweeper=asking`` while the context lasts."""
    Asking.batches, Asking.answers, Asking.seen, Asking.gives_up = (), (), None, False
    target = "hydra_plugins.asking.Asking"
    Plugins.instance().class_name_to_class[target] = Asking
    ConfigStore.instance().store("asking", {"_target_": target, "params": None}, "hydra/sweeper")
    try:
        yield Asking
    finally:
        del ConfigStore.instance().repo["hydra"]["sweeper"]["asking.yaml"]
        del Plugins.instance().class_name_to_class[target]
