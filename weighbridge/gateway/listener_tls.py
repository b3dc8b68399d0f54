"""TLS of the OpenAI listener: its certificate can be renewed in place without a restart."""

from __future__ import annotations

import ssl
from pathlib import Path

from weighbridge.core.errors import ConfigError


class ListenerTls:
    """Holds the context that new connections are accepted with."""

    def __init__(self, certificate: str, key: str | None) -> None:
        """Raises ConfigError where the files cannot be used."""
        self._files = (certificate, key)
        self._stamp = self._now()
        self.context = self._load()

    def renew(self) -> bool:
        """Takes over changed files for new connections; True if they had changed. Raises ConfigError: nothing did."""
        stamp = self._now()
        if stamp == self._stamp:
            return False
        self._load()  # a bad pair must not spoil the context in use
        self.context.load_cert_chain(*self._files)
        self._stamp = stamp
        return True

    def _load(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(*self._files)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"the TLS certificate cannot be read: {error}", path="$.tls_cert") from None
        return context

    def _now(self) -> tuple[int, ...]:
        try:
            return tuple(Path(name).stat().st_mtime_ns for name in self._files if name is not None)
        except OSError as error:
            raise ConfigError(f"the TLS certificate cannot be read: {error}", path="$.tls_cert") from None
