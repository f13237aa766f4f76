"""How a process learns whether it is one of several, from options or from the launcher's environment, without waiting.

`jax.distributed.initialize` would look for a cluster too, but fails where there is none, and takes part in one where a
lone process has nothing to share: in the shell of a SLURM job, or on a TPU machine that is a slice by itself.
"""

import os
import socket
import urllib.request
from typing import Any

from transformer_jax.errors import UserError


def launch_arguments(coordinator: str | None, processes: int | None, process: int | None) -> dict[str, Any] | None:
    """Arguments for `jax.distributed.initialize`; None if there is one process only, which needs none of it.

    What is not given comes from JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID. If there is nothing at
    all, jax is left to find the others where `cluster_size` says that there are any.

    Raises:
        UserError: one is missing or faulty, or the port is taken.
    """
    values: dict[str, Any] = {
        "--coordinator": coordinator if coordinator is not None else os.environ.get("JAX_COORDINATOR_ADDRESS") or None,
        "--processes": _number(processes, "JAX_NUM_PROCESSES"),
        "--process": _number(process, "JAX_PROCESS_ID"),
    }
    missing = [name for name, value in values.items() if value is None]
    if len(missing) == 3:
        return {} if cluster_size() > 1 else None
    if missing:
        raise UserError(
            f"{' and '.join(missing)} must be given too: several processes need --coordinator HOST:PORT, --processes "
            "and --process, or none of these under SLURM, Open MPI and on Cloud TPU"
        )
    address, count, index = values.values()
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UserError(f"--coordinator is {address!r}, but must be HOST:PORT, say 10.0.0.1:8476")
    if count < 1:
        raise UserError(f"--processes is {count}, but must be at least 1")
    if not 0 <= index < count:
        raise UserError(f"--process is {index} of {count} --processes, but must be from 0 to {count - 1}")
    if count == 1:
        return None
    if index == 0:
        _require_free(int(port))
    # What is given is all: under SLURM, jax would else choose one device for each process.
    return {
        "coordinator_address": address,
        "num_processes": count,
        "process_id": index,
        "cluster_detection_method": "deactivate",
    }


def _number(given: int | None, variable: str) -> int | None:
    text = os.environ.get(variable)
    if given is not None or not text:
        return given
    if not text.isdecimal():
        raise UserError(f"the environment variable {variable} is {text!r}, but must be a whole number")
    return int(text)


def cluster_size() -> int:
    """Processes that were started together, by what SLURM, Open MPI or a Cloud TPU left in the environment."""
    environment = os.environ
    # The variables by which jax knows SLURM; without a step, in a batch script or a shell, one process runs.
    if "SLURM_JOB_ID" in environment and "SLURM_STEP_NODELIST" in environment and "SLURM_PROCID" in environment:
        return _number(None, "SLURM_STEP_NUM_TASKS") or _number(None, "SLURM_NTASKS") or 1
    return _number(None, "OMPI_COMM_WORLD_SIZE") or _tpu_hosts()


def _tpu_hosts() -> int:
    """Hosts of the TPU slices that this machine belongs to; 1 without TPUs or where JAX_PLATFORMS excludes them."""
    environment = os.environ
    platforms = environment.get("JAX_PLATFORMS", "tpu").split(",")
    # Importing jax sets this variable on a machine with TPU chips and libtpu.
    if environment.get("TPU_ML_PLATFORM") != "JAX" or "tpu" not in platforms:
        return 1
    names = environment.get("TPU_PROCESS_ADDRESSES") or environment.get("TPU_WORKER_HOSTNAMES")
    if names is None and "TPU_SKIP_MDS_QUERY" not in environment:
        names = _metadata("worker-network-endpoints")
    return len(names.split(",")) * (_number(None, "MEGASCALE_NUM_SLICES") or 1) if names else 1


def _metadata(name: str) -> str | None:
    """An attribute of a Google Compute Engine machine, which its metadata server gives in milliseconds."""
    server = os.environ.get("GCE_METADATA_IP", "metadata.google.internal")
    request = urllib.request.Request(
        f"http://{server}/computeMetadata/v1/instance/attributes/{name}", headers={"Metadata-Flavor": "Google"}
    )
    try:
        with urllib.request.urlopen(request, timeout=2) as answer:
            text: str = answer.read().decode()
            return text
    except OSError:
        return None


def _require_free(port: int) -> None:
    # The coordination service ends with a segmentation fault where its port is taken.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", port))
        except OSError as error:
            raise UserError(
                f"--coordinator: port {port} cannot be used on this host ({error.strerror}); choose another"
            ) from error
