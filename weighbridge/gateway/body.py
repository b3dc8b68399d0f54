"""A request's body as plain bytes."""

from __future__ import annotations

import zlib

from weighbridge.core.errors import RequestError
from weighbridge.http import Request


def plain_body(request: Request, limit_bytes: int) -> bytes:
    """The body, inflated if the client compressed it. Raises RequestError (415, 400, 413)."""
    coding = request.header(b"content-encoding")
    if coding is None or coding.lower() == b"identity":
        return request.body
    if coding.lower() not in (b"gzip", b"deflate"):
        raise RequestError(
            "Send the body plain or with Content-Encoding: gzip.", status=415, code="unsupported_encoding"
        )
    inflater = zlib.decompressobj(zlib.MAX_WBITS | 32)
    try:
        body = inflater.decompress(request.body, limit_bytes)
    except zlib.error:
        raise RequestError("The body is not valid gzip.", code="invalid_encoding") from None
    if inflater.unconsumed_tail or not inflater.eof:
        too_large = bool(inflater.unconsumed_tail)
        message = f"The body is larger than {limit_bytes} bytes." if too_large else "The compressed body is cut off."
        raise RequestError(message, status=413 if too_large else 400, code="invalid_encoding")
    return body
