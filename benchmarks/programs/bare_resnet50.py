"""Peak memory in bytes of ResNet-50 in FP32 in a hand-written loop: `mptrain dataset=synthetic`, SGD with momentum."""

import os
import re
from pathlib import Path

import torch
from torchvision.models import resnet50

SAMPLES, STEPS = 2, 4

torch.set_num_threads(1)
model = resnet50(num_classes=10).to(memory_format=torch.channels_last)
optimizer = torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9)
for _ in range(STEPS):
    inputs, targets = torch.randn(SAMPLES, 3, 224, 224), torch.randint(0, 10, (SAMPLES,))
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(inputs.to(memory_format=torch.channels_last)), targets).backward()
    optimizer.step()
found = re.search(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
assert found is not None
print(int(found[1]) * 1024, flush=True)
os._exit(0)
