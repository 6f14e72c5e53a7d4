"""Read-only observation of a training step: overflow attribution, histograms, operator observer, module trail."""
