"""Certificates made for one test run with the `openssl` command; tests skip by name where there is none."""

import shutil
import ssl
import subprocess
from pathlib import Path

import pytest


class Authority:
    """A certificate authority of its own in a folder."""

    def __init__(self, folder: Path, name: str = "test authority") -> None:
        if shutil.which("openssl") is None:
            pytest.skip("no openssl command")
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.file = folder / "ca.pem"
        self._key = folder / "ca.key"
        self._openssl(
            *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"),
            *("-subj", f"/CN={name}", "-keyout", str(self._key), "-out", str(self.file)),
            *("-addext", "basicConstraints=critical,CA:TRUE", "-addext", "keyUsage=critical,keyCertSign,cRLSign"),
        )

    def issue(self, *names: str) -> tuple[str, str]:
        """Files of a certificate for `names` (as in `DNS:localhost`, `IP:127.0.0.1`) and its key."""
        stem = self.folder / names[0].replace(":", "-")
        key, request, certificate = (stem.with_suffix(s) for s in (".key", ".csr", ".pem"))
        extensions = self.folder / "extensions"
        extensions.write_text(f"subjectAltName={','.join(names)}\nextendedKeyUsage=serverAuth\n")
        self._openssl(
            *("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", "/CN=server"),
            *("-keyout", str(key), "-out", str(request)),
        )
        self._openssl(
            *("x509", "-req", "-in", str(request), "-CA", str(self.file), "-CAkey", str(self._key)),
            *("-CAcreateserial", "-days", "2", "-extfile", str(extensions), "-out", str(certificate)),
        )
        return str(certificate), str(key)

    def server_context(self, *names: str) -> ssl.SSLContext:
        """For a listener."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(*self.issue(*names))
        return context

    def client_context(self) -> ssl.SSLContext:
        """Trusts this authority alone."""
        return ssl.create_default_context(cafile=str(self.file))

    @staticmethod
    def _openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], check=True, capture_output=True)
