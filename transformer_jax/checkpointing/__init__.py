"""Checkpoints: arrays of any tree on disk, verified when read. Written by training, read by translation."""
