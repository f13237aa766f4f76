"""Whether a process is alone: what options, the environment and launchers say."""

import os
import re
import socket

import pytest

from transformer_jax.errors import UserError
from transformer_jax.parallel import launch
from transformer_jax.parallel.launch import cluster_size, launch_arguments


@pytest.fixture
def environment(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("SLURM_", "OMPI_", "TPU_", "MEGASCALE_")) or name in ("JAX_COORDINATOR_ADDRESS",):
            monkeypatch.delenv(name)
    return monkeypatch


SLURM = {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "n[1-4]", "SLURM_PROCID": "1", "SLURM_NTASKS": "4"}


@pytest.mark.parametrize(
    ("variables", "count"),
    [
        ({}, 1),
        (SLURM, 4),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "1"}, 1),
        ({name: value for name, value in SLURM.items() if name != "SLURM_STEP_NODELIST"}, 1),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, 2),
        ({"TPU_ML_PLATFORM": "JAX", "TPU_WORKER_HOSTNAMES": "a,b,c,d"}, 4),
        ({"TPU_ML_PLATFORM": "JAX", "TPU_WORKER_HOSTNAMES": "a,b", "MEGASCALE_NUM_SLICES": "2"}, 4),
        ({"TPU_ML_PLATFORM": "JAX", "TPU_WORKER_HOSTNAMES": "localhost"}, 1),
        ({"TPU_ML_PLATFORM": "JAX", "TPU_WORKER_HOSTNAMES": "a,b", "JAX_PLATFORMS": "cpu"}, 1),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, 1),
    ],
)
def test_the_launchers_variables_say_whether_there_are_several_processes(variables, count, environment):
    """A lone process has nothing to wait for, and does not look for others: also one of a SLURM job's batch script."""
    environment.delenv("JAX_PLATFORMS")
    for name, value in variables.items():
        environment.setenv(name, value)
    assert (launch_arguments(None, None, None) is None) == (count == 1)
    assert cluster_size() == count


def test_hosts_of_a_tpu_slice_are_asked_of_the_metadata_server(environment):
    environment.delenv("JAX_PLATFORMS")
    environment.setenv("TPU_ML_PLATFORM", "JAX")
    environment.setattr(launch, "_metadata", lambda name: "x:1:10.0.0.1,x:2:10.0.0.2")
    assert cluster_size() == 2
    environment.setattr(launch, "_metadata", lambda name: None)
    assert cluster_size() == 1


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("10.0.0.1:8476", None, None), "--processes and --process must be given too"),
        ((None, 2, 0), "--coordinator must be given too"),
        (("10.0.0.1", 2, 0), "must be HOST:PORT"),
        (("10.0.0.1:0", 2, 0), "must be HOST:PORT"),
        (("10.0.0.1:99999", 2, 0), "must be HOST:PORT"),
        (("10.0.0.1:8476", 2, 2), "--process is 2 of 2 --processes, but must be from 0 to 1"),
        (("10.0.0.1:8476", 2, -1), "--process is -1"),
        (("10.0.0.1:8476", 0, 0), "--processes is 0, but must be at least 1"),
    ],
)
def test_wrong_options_are_named(given, words, environment):
    with pytest.raises(UserError, match=words):
        launch_arguments(*given)


def test_options_may_come_from_the_environment(environment):
    environment.setenv("JAX_COORDINATOR_ADDRESS", "10.0.0.1:8476")
    environment.setenv("JAX_NUM_PROCESSES", "2")
    environment.setenv("JAX_PROCESS_ID", "1")
    assert launch_arguments(None, None, None)["process_id"] == 1
    assert launch_arguments(None, 1, 0) is None
    environment.setenv("JAX_PROCESS_ID", "one")
    with pytest.raises(UserError, match="JAX_PROCESS_ID is 'one'"):
        launch_arguments(None, None, None)


@pytest.mark.parametrize(
    "name",
    ["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "MEGASCALE_NUM_SLICES", "JAX_NUM_PROCESSES"],
)
@pytest.mark.parametrize("text", ["two", "-1", "2.0", "4(x2)"])
def test_a_variable_that_is_no_number_is_named(name, text, environment):
    environment.delenv("JAX_PLATFORMS")
    step = {**SLURM, "SLURM_NTASKS": "1"} if name.startswith("SLURM") else {}
    for variable, value in {"TPU_ML_PLATFORM": "JAX", "TPU_WORKER_HOSTNAMES": "a", **step, name: text}.items():
        environment.setenv(variable, value)
    with pytest.raises(UserError, match=f"{name} is '{re.escape(text)}', but must be a whole number"):
        launch_arguments(None, None, None)


def test_a_variable_that_is_empty_is_none(environment):
    """As where a script sets it from another that is not there."""
    for name in ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "OMPI_COMM_WORLD_SIZE"):
        environment.setenv(name, "")
    assert launch_arguments(None, None, None) is None


def test_a_port_that_is_taken_is_named(environment):
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(UserError, match="cannot be used on this host"):
            launch_arguments(address, 2, 0)
        assert launch_arguments(address, 2, 1) is not None
