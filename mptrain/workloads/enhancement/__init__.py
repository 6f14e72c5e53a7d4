"""Enhancement of pictures: noise, and resolution."""
