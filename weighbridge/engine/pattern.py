"""A regular expression over the characters of a JSON string, as a GBNF expression of that string's JSON text.

Covered: literals, `.`, classes, `\\d \\w \\s` and their opposites, groups, alternation, `* + ? {m,n}`, `^` and `$` at
the ends (without them anything may stand there, as JSON Schema says). What GBNF cannot say is refused: look-around,
back references, word boundaries, properties of Unicode. Characters that JSON escapes are written escaped.
"""

from __future__ import annotations

_SPECIAL = set("^$\\.*+?()[]{}|")
_CONTROL = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "0": "\0"}
_SHORT = {"\n": "n", "\r": "r", "\t": "t", "\f": "f", "\b": "b"}
_SETS: dict[str, list[tuple[int, int]]] = {
    "d": [(48, 57)],
    "w": [(48, 57), (65, 90), (95, 95), (97, 122)],
    "s": [(9, 13), (32, 32), (160, 160), (0x2028, 0x2029), (0xFEFF, 0xFEFF)],
}
_ESCAPED = {34: '"\\\\\\""', 92: '"\\\\\\\\"'}  # the quote and the backslash, as GBNF of their JSON text
_TOP = 0x10FFFF
_MAX_REPEAT = 1000
_MAX_DEPTH = 32
Ranges = list[tuple[int, int]]


class PatternError(ValueError):
    """Why a pattern cannot be kept to."""


def pattern_expression(pattern: str) -> str:
    """An expression of the JSON texts, without their quotes, of all strings that the pattern matches.

    Raises PatternError for what is no regular expression and for what is not covered.
    """
    reader = _Reader(pattern)
    options = reader.alternatives(0)
    if reader.rest:
        raise PatternError(f"has a {reader.rest[0]!r} that closes nothing")
    return options


class _Reader:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    @property
    def rest(self) -> str:
        return self._text[self._at :]

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _take(self) -> str:
        char = self._peek()
        if not char:
            raise PatternError("ends too early")
        self._at += 1
        return char

    def alternatives(self, depth: int) -> str:
        """`a|b|c`; at the top each option may be anchored, and is open at an end where it is not."""
        if depth > _MAX_DEPTH:
            raise PatternError(f"is nested deeper than {_MAX_DEPTH}")
        options = [self._sequence(depth)]
        while self._peek() == "|":
            self._at += 1
            options.append(self._sequence(depth))
        return " | ".join(options)

    def _sequence(self, depth: int) -> str:
        parts: list[str] = []
        start_open = end_open = depth == 0
        if self._peek() == "^":
            if depth:
                raise PatternError("has a ^ within a group")
            self._at += 1
            start_open = False
        while self._peek() and self._peek() not in "|)":
            if self._peek() == "$":
                if depth or self._text[self._at + 1 : self._at + 2] not in ("", "|"):
                    raise PatternError("has a $ before its end")
                self._at += 1
                end_open = False
                break
            parts.append(self._repeated(self._atom(depth)))
        body = ["char*"] if start_open else []
        body += parts + (["char*"] if end_open else [])
        return " ".join(body) or '""'

    def _atom(self, depth: int) -> str:
        char = self._take()
        if char == "(":
            return self._group(depth)
        if char == "[":
            return _set(self._class())
        if char == ".":
            return _set(_complement([(10, 10), (13, 13), (0x2028, 0x2029)]))
        if char == "\\":
            return _set(self._escaped())
        if char in _SPECIAL - {"]", "}"}:
            raise PatternError(f"has a {char!r} with nothing before it" if char in "*+?{" else f"has a {char!r} inside")
        return _set([(ord(char), ord(char))])

    def _group(self, depth: int) -> str:
        if self._peek() == "?":
            self._at += 1
            if self._take() != ":":
                raise PatternError("uses a group of the form (?...), of which only (?:...) is covered")
        inner = self.alternatives(depth + 1)
        if self._peek() != ")":
            raise PatternError("has a group that is not closed")
        self._at += 1
        return f"({inner})"

    def _repeated(self, atom: str) -> str:
        char = self._peek()
        if char in ("*", "+", "?") and char:
            self._at += 1
            suffix = char
        elif char == "{":
            suffix = self._counts()
        else:
            return atom
        if self._peek() == "?":  # as few as possible: the same texts match
            self._at += 1
        if self._peek() in ("*", "+", "{") and self._peek():
            raise PatternError("repeats a repetition")
        return atom + suffix

    def _counts(self) -> str:
        end = self._text.find("}", self._at)
        low, comma, high = self._text[self._at + 1 : end].partition(",") if end > 0 else ("", "", "")
        if not low.isdecimal() or (high and not high.isdecimal()):
            raise PatternError("has a { that is no repetition; write \\{ for the character")
        if max(int(low), int(high or 0)) > _MAX_REPEAT or (high and int(high) < int(low)):
            raise PatternError(f"repeats outside 0 to {_MAX_REPEAT} times, or backwards")
        self._at = end + 1
        return f"{{{int(low)}{comma}{int(high) if high else ''}}}"

    def _escaped(self) -> Ranges:
        char = self._take()
        if char.lower() in _SETS:
            return _SETS[char] if char.islower() else _complement(_SETS[char.lower()])
        if char in _CONTROL:
            code = ord(_CONTROL[char])
        elif char in "xu":
            size = 2 if char == "x" else 4
            digits = self._text[self._at : self._at + size]
            if len(digits) < size or not set(digits) <= set("0123456789abcdefABCDEF"):
                raise PatternError(f"has a \\{char} without its digits")
            code = int(digits, 16)
            if 0xD800 <= code <= 0xDFFF:
                raise PatternError("names half of a character")
            self._at += len(digits)
        elif char.isalnum():
            raise PatternError(f"uses \\{char}, which is not covered")
        else:
            code = ord(char)
        return [(code, code)]

    def _class(self) -> Ranges:
        negated = self._peek() == "^"
        if negated:
            self._at += 1
        ranges: Ranges = []
        while (char := self._take()) != "]":
            first = self._escaped() if char == "\\" else [(ord(char), ord(char))]
            if self._peek() == "-" and self._text[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                char = self._take()
                last = self._escaped() if char == "\\" else [(ord(char), ord(char))]
                if not (_single(first) and _single(last)) or first[0][0] > last[0][1]:
                    raise PatternError("has a class with a range that is none")
                first = [(first[0][0], last[0][1])]
            ranges += first
        if not ranges:
            raise PatternError("has an empty class")
        return _complement(ranges) if negated else ranges


def _single(ranges: Ranges) -> bool:
    return len(ranges) == 1 and ranges[0][0] == ranges[0][1]


def _complement(ranges: Ranges) -> Ranges:
    found, start = [], 0
    for low, high in sorted(ranges):
        if low > start:
            found.append((start, low - 1))
        start = max(start, high + 1)
    if start <= _TOP:
        found.append((start, _TOP))
    return found


def _set(ranges: Ranges) -> str:
    """One character of a set as JSON writes it: plain where it may be, else by its escape."""
    plain: Ranges = []
    escaped: list[str] = []
    for low, high in sorted(ranges):
        for code in range(low, min(high, 31) + 1):
            short = _SHORT.get(chr(code))
            escaped.append(f'"\\\\{short}"' if short else f'"\\\\u{code:04x}"')
        escaped += [text for code, text in _ESCAPED.items() if low <= code <= high]
        plain += _without(max(low, 32), high, tuple(_ESCAPED))
    options = ["[" + "".join(_range(low, high) for low, high in plain) + "]"] if plain else []
    options += escaped
    return options[0] if len(options) == 1 else "(" + " | ".join(options) + ")"


def _without(low: int, high: int, codes: tuple[int, ...]) -> Ranges:
    found = []
    for code in codes:
        if low <= code <= high:
            if low < code:
                found.append((low, code - 1))
            low = code + 1
    if low <= high:
        found.append((low, high))
    return found


def _range(low: int, high: int) -> str:
    return _char(low) if low == high else f"{_char(low)}-{_char(high)}"


def _char(code: int) -> str:
    """A character inside a GBNF class."""
    if code < 127 and chr(code).isalnum():
        return chr(code)
    if code <= 0xFF:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"
