"""Programs that are timed as processes of their own."""
