"""What requests are called: by the client's own id where it may have it, else by one of ours."""

from __future__ import annotations

import itertools
import re
import secrets
from collections.abc import Container

from weighbridge.http import Request

GIVEN = re.compile(rb"(?!wb-)[A-Za-z0-9._-]{1,128}")
"""What a client may choose. Names that begin with `wb-` are given here: clients see theirs, and whoever could take the
next one would take it from somebody else."""


class RequestIds:
    """Of one process; what sets it apart from others is drawn by chance."""

    def __init__(self) -> None:
        self._prefix = f"wb-{secrets.token_hex(4)}-"
        self._numbers = itertools.count(1)

    def of(self, request: Request, live: Container[str]) -> str:
        """The id of a request that has just come; never one of `live`."""
        given = request.header(b"x-request-id")
        if given is not None and GIVEN.fullmatch(given):
            name = given.decode("ascii")
            if name not in live:
                return name
        name = f"{self._prefix}{next(self._numbers)}"
        while name in live:
            name = f"{self._prefix}{next(self._numbers)}"
        return name
