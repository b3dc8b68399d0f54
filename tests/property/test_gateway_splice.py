"""Splicing: the edited object means the edit and nothing else, and every other byte is as it was."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from weighbridge.core.errors import RequestError
from weighbridge.gateway.nesting import check_nesting
from weighbridge.gateway.splice import add_value, remove_value, repeated_keys, replace_value, top_level

keys = st.one_of(
    st.sampled_from(["model", "stream", "n", "a", "", 'q"x', "back\\slash", "é", "{", "]:,"]), st.text(max_size=6)
)
texts = st.text(alphabet=st.characters(exclude_categories=("Cs",)), max_size=12)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), texts, keys),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(keys, inner, max_size=4)),
    max_leaves=8,
)
objects = st.dictionaries(keys, values, max_size=6)
styles = st.sampled_from([(None, None), (2, None), (None, (",", ":")), (0, (" , ", " : ")), (1, ("\t,", ":\r\n"))])


def spelled(value: object, style: tuple[object, object], ascii_only: bool) -> bytes:
    indent, separators = style
    text = json.dumps(value, indent=indent, separators=separators, ensure_ascii=ascii_only)  # type: ignore[arg-type]
    return b" \n" + text.encode() + b"\n "


@settings(max_examples=300, deadline=None)
@given(objects, styles, st.booleans())
def test_spans_are_the_values(value: dict[str, object], style: tuple[object, object], ascii_only: bool) -> None:
    body = spelled(value, style, ascii_only)
    assert [(k, json.loads(body[a:b])) for k, a, b in top_level(body)] == list(value.items())


@settings(max_examples=300, deadline=None)
@given(objects, styles, st.booleans(), keys, values)
def test_replace_add_remove(
    value: dict[str, object], style: tuple[object, object], ascii_only: bool, key: str, new: object
) -> None:
    body = spelled(value, style, ascii_only)
    replaced = replace_value(body, key, json.dumps(new).encode())
    assert json.loads(replaced) == {**value, key: new}
    removed = remove_value(body, key)
    assert json.loads(removed) == {k: v for k, v in value.items() if k != key}
    if key in value:
        (start, end) = next((a, b) for k, a, b in top_level(body) if k == key)
        assert replaced.startswith(body[:start])
        assert replaced.endswith(body[end:])
    else:
        assert removed == body
        added = add_value(body, key, json.dumps(new).encode())
        assert json.loads(added) == {**value, key: new}
        brace = body.index(b"{") + 1
        assert added[:brace] == body[:brace]
        assert added.endswith(body[brace:])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["model", "n", "a"]), values), max_size=5), st.booleans())
def test_repeated_keys_are_seen_in_any_spelling(pairs: list[tuple[str, object]], escaped: bool) -> None:
    def name(key: str) -> str:
        return '"' + "".join(f"\\u{ord(c):04x}" for c in key) + '"' if escaped else json.dumps(key)

    body = ("{" + ",".join(f"{name(k)}:{json.dumps(v)}" for k, v in pairs) + "}").encode()
    names = [k for k, _ in pairs if k in ("model", "n")]
    twice = {k for k in names if names.count(k) > 1}
    found = repeated_keys(body, frozenset({"model", "n"}))
    assert (found in twice) if twice else (found is None)


def depth(value: object) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(depth, inner), default=0)


@settings(max_examples=300, deadline=None)
@given(objects, styles, st.booleans())
def test_nesting_is_counted_whatever_strings_hold(
    value: object, style: tuple[object, object], ascii_only: bool
) -> None:
    body, deep = spelled(value, style, ascii_only), depth(value)
    check_nesting(body, deep)
    try:
        check_nesting(body, deep - 1)
        raise AssertionError("a level too many was taken")
    except RequestError as error:
        assert error.status == 400
