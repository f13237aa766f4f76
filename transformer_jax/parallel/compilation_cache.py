"""Compiled programs kept on disk between processes."""

import hashlib
import os
import pathlib
import platform

import jax


def cache_folder() -> pathlib.Path:
    """This package's folder in the user's cache, $XDG_CACHE_HOME or ~/.cache."""
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache", "transformer_jax")


def enable_compilation_cache() -> None:
    """Keeps compiled programs in the user's cache folder, or in that which JAX_COMPILATION_CACHE_DIR names.

    The folder's name holds a digest of the processor's features: XLA compiles for those of the machine it runs on, and
    unlike machines may share a home folder.
    """
    if jax.config.values["jax_compilation_cache_dir"] is None:
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / f"programs-{_machine_digest()}"))
    # Programs that compile faster than this are not worth a file.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)


def _machine_digest() -> str:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
        features = next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        features = platform.processor()
    return hashlib.sha256(f"{platform.machine()} {features}".encode()).hexdigest()[:12]
