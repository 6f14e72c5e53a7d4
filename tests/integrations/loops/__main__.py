"""Judges a loop in a process of its own, or on several ranks: ``python -m tests.integrations.loops LOOP FOLDER``."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from tests.integrations.loops.judge import all_loops

loop = all_loops()[sys.argv[1]]
torch.set_num_threads(1)
if loop.processes > 1:
    dist.init_process_group("gloo")
failed = loop.judge(Path(sys.argv[2]))
if loop.processes > 1:
    dist.destroy_process_group()
sys.exit("\n".join(failed) or None)
