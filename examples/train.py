"""Train a small network on handwritten digits in FP16, from Python, and print the steps that overflowed."""

import mptrain

run = mptrain.train(
    "model=mlp",
    "precision=fp16_dynamic",
    "train.epochs=3",
    "scaler.init_scale=16777216",  # 2^24, too high: the first steps overflow, and the scale falls
    "scaler.growth_interval=20",  # instead of 2000 clean steps, so that the scale probes its limit a few times
    "run.name=example",
    "run.resume=auto",  # a second start finds the run finished, instead of stopping with an error
)
for step in run.steps():
    if step.overflow:
        print(f"step {step.step} overflowed at loss scale {step.loss_scale:.0f} and was skipped")
print(f"{run.summary['metric_name']} {run.summary['metric']:.4f}")
