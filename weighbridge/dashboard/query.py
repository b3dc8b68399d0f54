"""The query string of a page as checked values: bounded, never an error page for a wrong number."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import parse_qsl, urlencode

MAX_FIELDS = 96
MAX_VALUE = 20_000


class Query:
    """Fields of one URL; a field that stands twice keeps all its values."""

    def __init__(self, fields: Mapping[str, list[str]] | None = None) -> None:
        self._fields = dict(fields or {})

    @classmethod
    def parse(cls, text: str) -> Query:
        """From a URL's query or a form's body. Raises ValueError when it has too many fields."""
        fields: dict[str, list[str]] = {}
        for name, value in parse_qsl(text, keep_blank_values=False, max_num_fields=MAX_FIELDS):
            fields.setdefault(name, []).append(value[:MAX_VALUE])
        return cls(fields)

    def get(self, name: str, default: str = "") -> str:
        """The first value."""
        values = self._fields.get(name)
        return values[0].strip() if values else default

    def all(self, name: str) -> list[str]:
        """All values."""
        return list(self._fields.get(name, ()))

    def __contains__(self, name: str) -> bool:
        return name in self._fields

    def url(self, path: str, **changes: str | None) -> str:
        """A URL of `path` with these fields, some changed; None drops one."""
        fields = {k: v for k, v in self._fields.items() if k not in changes}
        fields |= {k: [v] for k, v in changes.items() if v}
        text = urlencode(fields, doseq=True)
        return f"{path}?{text}" if text else path

    def without(self, *names: str) -> Query:
        """The other fields."""
        return Query({k: v for k, v in self._fields.items() if k not in names})

    @property
    def key(self) -> str:
        """Equal for equal queries."""
        return urlencode(sorted(self._fields.items()), doseq=True)
