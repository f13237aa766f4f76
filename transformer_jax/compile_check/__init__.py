"""Programs compiled ahead of time for accelerators that this machine does not have, and what they would cost there."""
