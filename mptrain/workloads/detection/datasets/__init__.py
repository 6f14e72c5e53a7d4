"""Pictures with boxes."""
