"""Open a selector from paths: the pool file and checkpoint named by the settings, or those of the package."""

from __future__ import annotations

from pathlib import Path

from weighbridge.core.errors import ConfigError
from weighbridge.selection import builtin, checkpoint
from weighbridge.selection.pool import Pool, decode_pool
from weighbridge.selection.selector import Selector
from weighbridge.selection.settings import SelectionSettings


def read_pool(path: Path) -> Pool:
    """Read a pool file.

    Raises:
        ConfigError: it cannot be read, or is refused by `decode_pool`.
    """
    try:
        return decode_pool(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot be read: {error}", source=str(path)) from None


def open_selector(settings: SelectionSettings | None = None, base: Path | None = None) -> Selector:
    """A selector as the settings ask; relative paths are taken from `base` (the configuration file's folder).

    Raises:
        ConfigError, CheckpointError: a file is missing or does not fit; the message names file and remedy.
    """
    settings = settings or SelectionSettings()
    root = base or Path()
    pool_path = root / settings.pool if settings.pool else builtin.POOL
    directory = root / settings.checkpoint if settings.checkpoint else builtin.DIRECTORY
    return Selector(checkpoint.load(directory), read_pool(pool_path), settings, str(directory))
