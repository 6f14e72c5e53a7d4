"""Looks at a step and changes nothing: overflow attribution, histograms, observer, module trail."""
