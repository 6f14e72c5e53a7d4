"""Commands that examine runs, steps, data and machines."""
