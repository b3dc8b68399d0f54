"""Flags as dataclasses: commands share groups of them, and what a command does stays apart from what it is told."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any, get_type_hints

import typer


def takes(*groups: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a function of dataclass instances a command whose flags are their fields, in order.

    A field is `name: Annotated[type, typer.Option(...)] = default`; one with `default_factory=list` may be repeated,
    one without default is required. A first parameter `context: typer.Context` of the function is passed through.
    """

    def wrap(function: Callable[..., None]) -> Callable[..., None]:
        wants_context = next(iter(inspect.signature(function).parameters), "") == "context"
        parameters, annotations = [], {}
        if wants_context:
            parameters.append(_parameter("context", typer.Context, inspect.Parameter.empty))
            annotations["context"] = typer.Context
        for group in groups:
            hints = get_type_hints(group, include_extras=True)
            for field in fields(group):
                default: Any = field.default
                if field.default_factory is not MISSING:
                    default = field.default_factory()
                elif default is MISSING:
                    default = inspect.Parameter.empty
                parameters.append(_parameter(field.name, hints[field.name], default))
                annotations[field.name] = hints[field.name]

        def command(**given: Any) -> None:
            first = [given.pop("context")] if wants_context else []
            made = [group(**{field.name: given[field.name] for field in fields(group)}) for group in groups]
            function(*first, *made)

        command.__name__, command.__doc__ = function.__name__, function.__doc__
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = annotations
        return command

    return wrap


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)
