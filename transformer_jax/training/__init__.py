"""The training loop and all that it needs."""
