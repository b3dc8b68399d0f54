"""What an operator decides before anything is predicted: match a request, then use, prefer or exclude models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from weighbridge.core.errors import ConfigError
from weighbridge.selection.language import language_of
from weighbridge.selection.text import RoutingText


class Match(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Every field that is set must hold. `keywords`: any of them occurs in the routing text, in any case.

    `tools`: true or false, or names of which one is offered. `languages`: ISO 639-1 codes. `headers`: lower-case
    name to exact value, `*` for any value.
    """

    tools: bool | tuple[str, ...] | None = None
    min_prompt_tokens: int | None = None
    max_prompt_tokens: int | None = None
    languages: tuple[str, ...] = ()
    keywords: tuple[str, ...] = ()
    headers: dict[str, str] = {}


class Rule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """`use` ends the matter (first match wins), `prefer` narrows to those that can serve, `exclude` takes away."""

    match: Match
    name: str = ""
    use: str = ""
    prefer: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the rules together said; `names` are the rules that matched, in order."""

    use: str = ""
    prefer: tuple[str, ...] = ()
    exclude: frozenset[str] = frozenset()
    names: tuple[str, ...] = ()


def check_rules(rules: tuple[Rule, ...], models: tuple[str, ...], source: str = "selection") -> None:
    """Refuse a rule that names an unknown model, says nothing, or can never match."""
    for index, rule in enumerate(rules):
        path = f"$.rules[{index}]"
        named = [name for name in (rule.use, *rule.prefer, *rule.exclude) if name]
        if not named:
            raise ConfigError("needs one of use, prefer, exclude", source=source, path=path)
        for name in named:
            if name not in models:
                raise ConfigError(
                    f"'{name}' is not a model of the pool ({', '.join(models)})", source=source, path=path
                )
        low, high = rule.match.min_prompt_tokens, rule.match.max_prompt_tokens
        if low is not None and high is not None and low > high:
            raise ConfigError("min_prompt_tokens is above max_prompt_tokens", source=source, path=f"{path}.match")


def apply_rules(
    rules: tuple[Rule, ...], text: RoutingText, prompt_tokens: float, headers: Mapping[str, str]
) -> Verdict:
    """Walk the rules in order. `headers` have lower-case names."""
    prefer: tuple[str, ...] = ()
    exclude: set[str] = set()
    names: list[str] = []
    for index, rule in enumerate(rules):
        if not _matches(rule.match, text, prompt_tokens, headers):
            continue
        names.append(rule.name or f"rules[{index}]")
        exclude.update(rule.exclude)
        prefer = prefer or rule.prefer
        if rule.use:
            return Verdict(rule.use, prefer, frozenset(exclude), tuple(names))
    return Verdict("", prefer, frozenset(exclude), tuple(names))


def _matches(match: Match, text: RoutingText, prompt_tokens: float, headers: Mapping[str, str]) -> bool:
    if isinstance(match.tools, bool) and match.tools != text.has_tools:
        return False
    if isinstance(match.tools, tuple) and not set(match.tools) & set(text.tool_names):
        return False
    if match.min_prompt_tokens is not None and prompt_tokens < match.min_prompt_tokens:
        return False
    if match.max_prompt_tokens is not None and prompt_tokens > match.max_prompt_tokens:
        return False
    for name, value in match.headers.items():
        found = headers.get(name.lower())
        if found is None or value not in ("*", found):
            return False
    if match.keywords:
        lowered = text.text.lower()
        if not any(word.lower() in lowered for word in match.keywords):
            return False
    return not match.languages or language_of(text.text) in match.languages
