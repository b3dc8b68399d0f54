"""HTML and SVG as plain functions that escape by default.

    h("th.num", "<b>", scope="row")   ->   <th class="num" scope="row">&lt;b&gt;</th>

A child or attribute of type `str` is escaped; only `Html`, which nothing but this module makes from text, passes as it
is. Selectors (`tag.class.class#id`) are constants of the program, never data; an id that holds data is passed as `id=`.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Union

_VOID = frozenset({"br", "hr", "img", "input", "link", "meta"})
_TABLE = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;"})


class Html(str):
    """Markup that is ready to be sent."""

    __slots__ = ()


Child = Union[str, int, float, bool, None, Iterable["Child"]]  # noqa: UP007 - recursive alias
Attribute = str | int | float | bool | None


def escape(text: str) -> str:
    """Text for an element or a quoted attribute. Control characters that HTML forbids become U+FFFD."""
    text = text.translate(_TABLE)
    return text if text.isprintable() else "".join(c if c >= " " or c in "\n\t" else "\ufffd" for c in text)


@lru_cache(maxsize=1024)
def _selector(selector: str) -> tuple[str, str]:
    head, _, anchor = selector.partition("#")
    name, *classes = head.split(".")
    attributes = f' class="{" ".join(classes)}"' if classes else ""
    return name, attributes + (f' id="{anchor}"' if anchor else "")


@lru_cache(maxsize=1024)
def _attribute(name: str) -> str:
    return name.rstrip("_").replace("_", "-")


def h(selector: str, *children: Child, **attributes: Attribute) -> Html:
    """One element. `class_` adds to the selector's classes; True writes a bare attribute, None and False none."""
    name, text = _selector(selector)
    extra = attributes.pop("class_", None) if attributes else None
    if extra:
        text = (
            text.replace('class="', f'class="{escape(str(extra))} ', 1)
            if "class=" in text
            else (f' class="{escape(str(extra))}"{text}')
        )
    parts = ["<", name, text]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        if value is True:
            parts.append(f" {_attribute(key)}")
        else:
            parts.append(f' {_attribute(key)}="{escape(value) if type(value) is str else escape(str(value))}"')
    parts.append(">")
    if name not in _VOID:
        for child in children:
            _render(child, parts)
        parts.append(f"</{name}>")
    return Html("".join(parts))


def join(*children: Child) -> Html:
    """Children without an element around them."""
    parts: list[str] = []
    for child in children:
        _render(child, parts)
    return Html("".join(parts))


def _render(child: Child, parts: list[str]) -> None:
    if isinstance(child, Html):
        parts.append(child)
    elif isinstance(child, str):
        parts.append(escape(child))
    elif child is None or isinstance(child, bool):
        return
    elif isinstance(child, int | float):
        parts.append(str(child))
    else:
        for grandchild in child:
            _render(grandchild, parts)
