"""Compare FP16 with FP32 over three seeds, and read the verdict from comparison.json."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

words = [
    "model=mlp",
    "precision=fp32,fp16_dynamic",  # two arms, the first one the reference
    "seed=0,1,2",  # a verdict needs two seeds or more, and few decide little
    "train.epochs=5",
    "--margin=0.02",  # accuracies that differ by less count as equal
]
command = [sys.executable, "-m", "mptrain", "compare", *words]
done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
print(done.stdout)

folder = Path(re.findall(r"^comparison=(.+)$", done.stdout, re.MULTILINE)[-1])
(group,) = json.loads((folder / "comparison.json").read_text())["groups"]
for arm in group["comparison"]["arms"]:
    print(arm["arm"]["name"], arm["verdict"]["word"], arm["verdict"]["why"], sep=": ")
