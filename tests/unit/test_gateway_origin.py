"""Base URLs: one normal form for every usual spelling, and a refusal that says what is wrong."""

import pytest

from weighbridge.core.errors import ConfigError
from weighbridge.gateway.origin import parse_origin

TABLE = [
    ("http://h", "/v1/chat/completions", "/health", "h"),
    ("http://h/", "/v1/chat/completions", "/health", "h"),
    ("http://h/v1", "/v1/chat/completions", "/health", "h"),
    ("http://h/v1/", "/v1/chat/completions", "/health", "h"),
    ("http://h//v1", "/v1/chat/completions", "/health", "h"),
    ("http://h/openai/v4", "/openai/v4/chat/completions", "/openai/health", "h"),
    ("http://h/openai/", "/openai/v1/chat/completions", "/openai/health", "h"),
    ("http://h:8000/v1beta/", "/v1beta/chat/completions", "/health", "h:8000"),
    ("http://h:80", "/v1/chat/completions", "/health", "h"),
    ("https://h:443/v1", "/v1/chat/completions", "/health", "h"),
    ("https://h:8443", "/v1/chat/completions", "/health", "h:8443"),
    ("http://[::1]:9000", "/v1/chat/completions", "/health", "[::1]:9000"),
]


@pytest.mark.parametrize(("url", "chat", "health", "authority"), TABLE)
def test_spellings(url: str, chat: str, health: str, authority: str) -> None:
    origin = parse_origin(url)
    assert origin.path("/v1/chat/completions") == chat
    assert origin.path("/health") == health
    assert origin.authority == authority


@pytest.mark.parametrize(
    "url",
    [
        "h",
        "h:8000",
        "ftp://h",
        "http://",
        "http:///v1",
        "http://h:99999",
        "http://user:pw@h",
        "http://h?x=1",
        "http://h#x",
        "http://h/a b",
        "http://h/../v1",
        "http://h/\r\nx",
        "http://hé/",
        "http://169.254.169.254/latest",
        "http://[fe80::1]:80",
        "",
    ],
)
def test_bad_ones_are_refused(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_origin(url, source="fleet.yaml", path="$.instances[0].url")
    assert "$.instances[0].url" in str(caught.value)


@pytest.mark.parametrize("url", ["http://me:secret@h", "http://secret@h:1/v1", "http://a@b:secret@h", "//secret@h"])
def test_a_password_in_a_url_is_not_repeated(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_origin(url)
    assert "secret" not in str(caught.value)
