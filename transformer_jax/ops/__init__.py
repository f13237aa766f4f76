"""The paper's mathematics as functions of arrays: jax and numpy only."""
