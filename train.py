"""Train a model: `python train.py --config configs/demo.py --workdir runs/demo`.

The same as `transformer-jax train`, without an installed package.
"""

import sys

from transformer_jax.cli.main import run_and_exit

if __name__ == "__main__":
    run_and_exit(["train", *sys.argv[1:]])
