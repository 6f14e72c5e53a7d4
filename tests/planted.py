"""Faults planted into networks, data and tasks of a user's, for the commands that have to find them by name."""

from __future__ import annotations

import textwrap

FILES = {
    "faulty/__init__.py": "",
    "faulty/net.py": """
        import torch
        from torch import nn

        class Scale(nn.Module):
            def __init__(self, factor):
                super().__init__()
                self.factor = factor

            def forward(self, x):
                return x * self.factor

        class HandWritten(nn.Module):
            def forward(self, x):
                grown = torch.exp(x + 1)
                return grown / grown.sum(1, keepdim=True)

        class Spread(nn.Module):
            def __init__(self, inner, gain):
                super().__init__()
                self.inner, self.gain = inner, gain

            def forward(self, x):
                return self.inner(x.repeat(1, 4096)).view(len(x), 4096, -1).sum(1) * self.gain

        class Divides(nn.Module):
            def forward(self, x):
                return x / (x * 0)

        class Sparse(nn.Module):
            def forward(self, x):
                return torch.relu(x - 0.9 * x.amax()) / 2 + x

        class Masked(nn.Module):
            def forward(self, x):
                return torch.softmax(torch.cat([x, x.new_full((len(x), 120), -1e4)], 1), 1)[:, :8]

        class Faint(nn.Module):
            def forward(self, x):
                return torch.exp(x - 20)

        class Square(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.save_for_backward(x)
                return x * x

            @staticmethod
            def backward(ctx, grad):
                (x,) = ctx.saved_tensors
                return 2 * x.float() * grad.float()

        class Mixes(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.clone()

            @staticmethod
            def backward(ctx, grad):
                return torch.zeros(grad.shape).index_add_(0, torch.arange(len(grad)), grad)

        class Louder(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, factor):
                ctx.factor = factor
                return x.clone()

            @staticmethod
            def backward(ctx, grad):
                return grad * ctx.factor, None

        class Loud(nn.Module):
            def __init__(self, factor):
                super().__init__()
                self.factor = factor

            def forward(self, x):
                return Louder.apply(x, self.factor)

        class Calls(nn.Module):
            def __init__(self, function):
                super().__init__()
                self.function = function

            def forward(self, x):
                return self.function.apply(x)

        def conv(gain=1.0):
            made = nn.Conv2d(8, 8, 3, padding=1)
            with torch.no_grad():
                made.weight.mul_(gain)
            return made

        def net(kind: str = "plain", *, num_classes: int, in_channels: int) -> nn.Module:
            middle, last = {
                "plain": lambda: ([conv()], []),
                "backward": lambda: ([Scale(2.0**-12), conv(2.0**12)], []),
                "loud": lambda: ([], [nn.Sequential(Loud(1e-7), Loud(1e7))]),
                "forward": lambda: ([conv(2.0**18), nn.ReLU(), Scale(2.0**-18)], []),
                "batchnorm": lambda: ([Scale(2.0**6), conv(2.0**8), nn.BatchNorm2d(8)], []),
                "frozen": lambda: ([conv()], []),
                "softmax": lambda: ([], [Spread(nn.Softmax(1), 1.0)]),
                "by_hand": lambda: ([], [Spread(HandWritten(), 1.0)]),
                "divides": lambda: ([], [Divides()]),
                "large": lambda: ([], [Scale(1e30), Scale(1e30)]),
                "sparse": lambda: ([], [Sparse()]),
                "masked": lambda: ([], [Masked()]),
                "faint": lambda: ([], [nn.Sequential(Faint(), Scale(2.0**20))]),
                "square": lambda: ([], [Calls(Square)]),
                "mixes": lambda: ([], [Calls(Mixes)]),
            }[kind]()
            body = nn.Sequential(nn.Conv2d(in_channels, 8, 3, padding=1), *middle, nn.ReLU(), nn.AdaptiveAvgPool2d(1))
            model = nn.Sequential()
            model.add_module("body", body)
            model.add_module("flat", nn.Flatten())
            model.add_module("last", nn.Sequential(*last))
            model.add_module("head", nn.Linear(8, num_classes))
            if kind == "frozen":
                model.get_parameter("body.0.bias").requires_grad_(False)
            return model

        class Line(nn.Module):
            def __init__(self, *, features: int):
                super().__init__()
                self.layer = nn.Linear(features, 1)

            def forward(self, inputs):
                return self.layer(inputs).squeeze(1)
        """,
    "faulty/data.py": """
        import math
        import torch
        from mptrain.workloads.base import Batch
        from mptrain.workloads.base.random_streams import sample_order
        from mptrain.workloads.base.data_files import Faults

        class Rows:
            in_memory = True
            skipped = 0

            def __init__(self, count, bad_input, bad_target):
                self.faults = Faults()
                self.inputs = torch.randn(count, 4, generator=torch.Generator().manual_seed(count))
                self.targets = self.inputs.sum(1)
                self.inputs[3, 1], self.targets[5] = bad_input, bad_target

            def __len__(self):
                return len(self.inputs)

            def order(self, seed, epoch, *, shuffle):
                return sample_order(len(self), seed, epoch, shuffle=False)

            def fetch(self, indices, epoch, seed):
                return Batch(self.inputs[indices].clone(), self.targets[indices].clone())

        class Table:
            name, workers, test, val = "table", 0, None, None

            def __init__(self, large: bool = False, inf: bool = False, nan: bool = False):
                self.train = Rows(64, math.inf if inf else 1e6 if large else 0.0, math.nan if nan else 0.0)

            def facts(self):
                return {"features": 4}

            def describe(self):
                return "4 columns"

            def prepare(self, batch, device, memory_format):
                return batch.to(device)
        """,
    "faulty/regression.py": """
        from dataclasses import dataclass
        import torch
        from torch.nn import functional as F
        from mptrain.workloads.base import Objective, Task

        @dataclass(frozen=True)
        class Regress(Task):
            logarithm: bool = False
            metric = "loss"
            higher_is_better = False

            def objectives(self):
                return (Objective("main", ("",), self.loss),)

            def loss(self, model, batch):
                answers = model(batch.inputs).float()
                if self.logarithm:
                    answers = torch.log(answers - answers.max())
                return F.mse_loss(answers, batch.targets)

            def measure(self, model, batch):
                return {"loss": F.mse_loss(model(batch.inputs).float(), batch.targets, reduction="sum").double()}

            def summarise(self, sums, terms):
                return {"loss": sums["loss"] / terms}
        """,
    "conf/model/planted.yaml": """
        # @package _global_
        # A network with a fault.
        model:
          _target_: faulty.net.net
          kind: plain
          defaults: {lr: {sgd: 0.05}}
        """,
    "conf/model/line.yaml": """
        # @package _global_
        # One linear layer, with its task and data.
        defaults:
          - override /task: regress
          - override /dataset: table
          - _self_
        model:
          _target_: faulty.net.Line
          defaults: {lr: {sgd: 0.01}}
        """,
    "conf/task/regress.yaml": "# Regression.\n_target_: faulty.regression.Regress\nlogarithm: false\n",
    "conf/dataset/table.yaml": (
        "# Rows of numbers.\n_target_: faulty.data.Table\nlarge: false\ninf: false\nnan: false\n"
    ),
}

#: What lets the package in.
ALLOWED = ("--config-dir", "conf", "extensions.allow=[faulty.*]")

#: A run of few steps.
SHORT = ("train.batch_size=16", "train.max_steps=6", "train.max_consecutive_overflows=3")


def plant(folder):
    """Write the package and its options into a folder."""
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text).lstrip())
