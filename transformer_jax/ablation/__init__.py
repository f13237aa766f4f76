"""A table of configurations trained under the same budget: its rows, its scale, its runs and its report."""
