"""Who is let in."""

from __future__ import annotations

import pytest

from weighbridge.core.errors import ConfigError
from weighbridge.dashboard.guard import Guard, is_loopback
from weighbridge.http import Request
from weighbridge.http.request import Head

TOKEN = "a-token-of-some-length"


def request(**headers: str) -> Request:
    rows = [(k.replace("_", "-").encode(), v.encode()) for k, v in headers.items()]
    return Request(Head("GET", b"/", rows), 0.0)


def test_only_loopback_goes_without_a_token() -> None:
    assert is_loopback("127.0.0.1") and is_loopback("::1") and is_loopback("localhost")
    assert not is_loopback("0.0.0.0") and not is_loopback("example.org")
    with pytest.raises(ConfigError, match="a token is needed"):
        Guard("0.0.0.0")
    with pytest.raises(ConfigError, match="at least 16"):
        Guard("0.0.0.0", "short")


@pytest.mark.parametrize("host", ["127.0.0.1:8082", "localhost:8082", "[::1]:8082", "127.0.0.1"])
def test_names_of_this_machine_are_answered(host: str) -> None:
    assert Guard("127.0.0.1").host_allowed(request(host=host))


@pytest.mark.parametrize("host", ["evil.example:8082", "", "127.0.0.1.evil.example", "evil.example"])
def test_other_names_are_not(host: str) -> None:
    assert not Guard("127.0.0.1").host_allowed(request(host=host))


def test_the_cookie_is_not_the_token_and_scripts_cannot_read_it() -> None:
    guard = Guard("0.0.0.0", TOKEN)
    cookie = guard.sign_in(TOKEN, secure=True)
    assert cookie is not None
    assert TOKEN not in cookie
    assert "HttpOnly" in cookie and "SameSite=Strict" in cookie and "Secure" in cookie
    value = cookie.partition(";")[0]
    assert guard.signed_in(request(cookie=f"other=1; {value}"))
    assert not guard.signed_in(request(cookie=value + "0"))
    assert not guard.signed_in(request())
    assert not Guard("0.0.0.0", TOKEN).signed_in(request(cookie=value)), "a cookie dies with the process"
    assert guard.sign_in("wrong", secure=False) is None


@pytest.mark.parametrize(
    ("headers", "allowed"),
    [
        ({"host": "127.0.0.1:8082", "origin": "http://127.0.0.1:8082"}, True),
        ({"host": "127.0.0.1:8082", "origin": "http://evil.example"}, False),
        ({"host": "127.0.0.1:8082", "origin": "null"}, False),
        ({"host": "127.0.0.1:8082", "origin": "http://127.0.0.1:9999"}, False),
        ({"host": "127.0.0.1:8082", "sec_fetch_site": "same-origin"}, True),
        ({"host": "127.0.0.1:8082"}, False),
    ],
)
def test_a_form_from_elsewhere_is_refused(headers: dict[str, str], allowed: bool) -> None:
    assert Guard("127.0.0.1").same_origin(request(**headers)) is allowed
