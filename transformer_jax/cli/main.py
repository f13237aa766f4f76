"""`transformer-jax COMMAND ...`: finds the command and turns what it raises into an exit code.

0 success; 2 bad input or configuration, with one line on standard error; 130 interrupted from the keyboard; 143 a
training run ended by SIGTERM, during updates after a checkpoint; 141 the reader of our output went away.
"""

import contextlib
import importlib
import importlib.metadata
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from transformer_jax.config_fields import nearest
from transformer_jax.errors import Interrupted, UserError
from transformer_jax.heap import keep_freed_blocks

# The modules are imported only when their command runs: JAX takes a second that `--help` need not wait for.
COMMANDS = {
    "train": "train a model, or go on with a run that was stopped",
    "prepare": "download, clean and tokenize the text of a configuration ahead of training",
    "translate": "translate lines of text",
    "evaluate": "translate a test set and score it: BLEU, chrF, perplexity",
    "bleu": "score translations in a file against references: the paper's BLEU, sacreBLEU, chrF",
    "score": "log-probabilities that a model gives to translations you have",
    "average": "average the newest checkpoints of a run into one model",
    "ablate": "train every row of a table of experiments, and set the results side by side",
    "describe": "parameters, FLOPs and memory of a configuration",
    "diagnose": "where in the network an update went wrong whose loss or gradient was not finite",
    "compile-check": "compile a configuration's programs for TPUs without having one: memory, exchanges, time",
}
_USAGE = "usage: transformer-jax COMMAND [OPTIONS]"
_INTERRUPTED, _TERMINATED, _BROKEN_PIPE, _BAD_INPUT = 130, 143, 141, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code; `argv` is the command line after the program's name."""
    try:
        _dispatch(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
    except UserError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return _BAD_INPUT
    except Interrupted as error:
        print(error, file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:  # `| head` is no fault: not a word
        return _BROKEN_PIPE
    except OSError as error:  # a full disk, a folder where a file should be: the caller's to mend, wherever it shows
        name = error.filename if error.filename is not None else "output"
        print(f"error: {name}: {error.strerror or error}; make room there or name another place", file=sys.stderr)
        return _BAD_INPUT
    except ImportError as error:
        if "gcsfs" not in str(error):
            raise
        print("error: gs:// needs gcsfs: in the project's folder, pip install -e '.[gcs]'", file=sys.stderr)
        return _BAD_INPUT
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        print(
            "error: there is not enough memory for this; make the model, data.batch_tokens or the beam smaller",
            file=sys.stderr,
        )
        return _BAD_INPUT
    return 0


def run_and_exit(argv: Sequence[str] | None = None) -> NoReturn:
    """`main` as a program: a signal ends it at once, where Python would wait for the threads of a library that goes on
    with a download. Where it trains, freed memory is kept, which is a program's to decide and not a library's.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] in (["train"], ["ablate"]):
        keep_freed_blocks()
    code = main(argv)
    if code in (_INTERRUPTED, _TERMINATED):
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        os._exit(code)
    sys.exit(code)


def _dispatch(argv: list[str]) -> None:
    command, rest = (argv[0], argv[1:]) if argv else ("", [])
    if command in COMMANDS:
        importlib.import_module(f"transformer_jax.cli.{command.replace('-', '_')}").run(rest)
    elif command in ("-h", "--help"):
        print(_help())
    elif command == "--version":
        print(f"transformer-jax {_version()}")
    elif not command:
        raise UserError(f"no command given; {_USAGE}; the commands are {', '.join(COMMANDS)}")
    else:
        raise UserError(f"there is no command {command!r}{nearest(command, COMMANDS)}")


def _version() -> str:
    try:
        return importlib.metadata.version("transformer-jax")
    except importlib.metadata.PackageNotFoundError:
        return "(run from its source folder, not installed)"


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {summary}" for name, summary in COMMANDS.items()]
    return "\n".join([_USAGE, "", *lines, "", "transformer-jax COMMAND --help lists the options of a command."])


if __name__ == "__main__":
    run_and_exit()
