"""Where a run is kept: a local folder, or an address at gs:// with a local folder beside it that is worked in."""

import contextlib
import hashlib
import os
import pathlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field

from etils import epath

from transformer_jax.checkpointing.checkpoint_files import AnyPath, as_folder, is_remote, storage_errors
from transformer_jax.errors import UserError
from transformer_jax.parallel.compilation_cache import cache_folder

_FETCHED = ("config.json", "tokenizer.model", "metrics.jsonl", "log.txt", "results.json")
"""What a run goes on with; other files of its folder are made anew, or only added to."""
_FOLDERS = ("profile/**", "fault-*/**")
"""What is kept of the folders below, all files."""


@dataclass(frozen=True)
class RunHome:
    """A run's two places, which are one where it is kept in a local folder.

    An object store takes whole objects: nothing there can be appended to, locked or mapped into memory. So checkpoints
    are written there directly, the tokenized text stays here, and small files are written here and copied there by
    process 0, metrics before each checkpoint that follows them. What is there is the run: `fetch` makes the folder here
    agree with it, on this machine or a new one. Each host of several has a folder here of its own, and shares no disk.
    """

    local: pathlib.Path
    """Where files are appended to, locked and mapped."""
    kept: epath.Path
    """Where checkpoints, the mean of some and all small files end up."""
    _copied: dict[str, tuple[int, int]] = field(default_factory=dict, compare=False, repr=False)

    @staticmethod
    def at(workdir: AnyPath) -> "RunHome":
        """The home of the run at a folder or an address gs://BUCKET/NAME.

        Raises:
            UserError: another kind of address.
        """
        kept = as_folder(workdir)
        if not is_remote(kept):
            return RunHome(pathlib.Path(workdir), kept)
        name = hashlib.sha256(str(kept).rstrip("/").encode()).hexdigest()[:24]
        return RunHome(cache_folder() / "runs" / name, kept)

    @property
    def is_remote(self) -> bool:
        """Whether the run is kept elsewhere than where it is worked on."""
        return is_remote(self.kept)

    @property
    def checkpoints(self) -> epath.Path:
        """The folder of checkpoints."""
        return self.kept / "checkpoints"

    def __str__(self) -> str:
        """As the user named it, for messages."""
        return str(self.kept if self.is_remote else self.local)

    def fetch(self, *names: str) -> None:
        """Brings small files of the run here, those named or all that it goes on with; others of that name go.

        Raises:
            UserError: they cannot be read there, or written here.
        """
        if not self.is_remote:
            return
        try:
            self.local.mkdir(parents=True, exist_ok=True)
            if not names:
                for path in self.local.iterdir():
                    if path.is_file():
                        path.unlink()
                for pattern in _FOLDERS:
                    for folder in self.local.glob(pattern.split("/")[0]):
                        shutil.rmtree(folder)
            for name in names or _FETCHED:
                if (self.kept / name).exists():
                    arriving = self.local / f".{name}.{os.getpid()}"
                    arriving.write_bytes((self.kept / name).read_bytes())
                    arriving.replace(self.local / name)
                    self._copied[name] = _stamp(self.local / name)
        except storage_errors() as error:
            raise UserError(
                f"{self.kept}: cannot be brought to {self.local} ({error}); see that both can be used"
            ) from error

    @contextlib.contextmanager
    def brought_up_to_date(self) -> Iterator[None]:
        """A context that ends with `keep`, however it ends; an error that ends it is what one reads then."""
        try:
            yield
        except BaseException:
            with contextlib.suppress(UserError):
                self.keep()
            raise
        self.keep()

    def keep(self, *names: str) -> None:
        """Copies small files that have changed to where the run is kept, those named or all.

        Raises:
            UserError: they cannot be written there.
        """
        if not self.is_remote:
            return
        paths = [self.local / name for name in names] or self._small_files()
        for path in paths:
            try:
                stamp = _stamp(path)
                name = path.relative_to(self.local).as_posix()
                if self._copied.get(name) != stamp:
                    (self.kept / name).write_bytes(path.read_bytes())
                    self._copied[name] = stamp
            except storage_errors() as error:
                raise UserError(
                    f"{self.kept}: {path} cannot be copied there ({error}); see that it can be written"
                ) from error

    def _small_files(self) -> list[pathlib.Path]:
        found = [path for pattern in ("*", *_FOLDERS) for path in self.local.glob(pattern)]
        return sorted(path for path in found if path.is_file() and not path.name.startswith("."))


def _stamp(path: pathlib.Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns
