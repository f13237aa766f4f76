"""`transformer-jax describe RUN --digest`: which bits a run has come to."""

import dataclasses
import json

from transformer_jax.errors import UserError


def digest_lines(run: str, *, as_json: bool) -> list[str]:
    """Step, and digests of parameters, optimizer state and all arrays, of the newest sound checkpoint.

    The parameters are those that the run is validated by: their moving average where it keeps one. All arrays have the
    others among them.

    Raises:
        UserError: no run there, or no sound checkpoint.
    """
    from transformer_jax.checkpointing.checkpoint_files import as_folder
    from transformer_jax.checkpointing.loading import newest_digests
    from transformer_jax.translation.translator import warn_on_stderr

    checkpoints = as_folder(run) / "checkpoints"
    if not checkpoints.is_dir():
        raise UserError(f"{run} has no checkpoints; name the --workdir of a run")
    digests = dataclasses.asdict(newest_digests(checkpoints, warn=warn_on_stderr))
    if as_json:
        return [json.dumps(digests)]
    return [f"{name.replace('_', ' '):15}  {value}" for name, value in digests.items()]
