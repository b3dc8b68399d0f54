"""The models to choose from: what they cost and what they can do. Prices live here, never in a checkpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import msgspec

from weighbridge.core.errors import ConfigError

MILLION = 1e6


class Candidate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One model. Prices are USD per million tokens; `context_tokens` bounds prompt plus output.

    `like` names the model of the checkpoint whose learned quality and length stand in for this one's.
    """

    name: str
    input_usd_per_1m: float = 0.0
    output_usd_per_1m: float = 0.0
    context_tokens: int | None = None
    max_output_tokens: int | None = None
    capabilities: tuple[str, ...] = ("tools", "json_schema")
    regions: tuple[str, ...] = ()
    like: str = ""

    @property
    def learned_as(self) -> str:
        return self.like or self.name

    def cost_usd(self, input_tokens: float, output_tokens: float) -> float:
        return (self.input_usd_per_1m * input_tokens + self.output_usd_per_1m * output_tokens) / MILLION


class Pool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The pool file. `subset: true` allows a checkpoint that knows more models than are listed here."""

    pool: str
    models: tuple[Candidate, ...]
    subset: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(model.name for model in self.models)

    def cost_usd(self, model: str, input_tokens: float, output_tokens: float) -> float:
        """What a model charges for so many tokens."""
        return next(m for m in self.models if m.name == model).cost_usd(input_tokens, output_tokens)

    @property
    def hash(self) -> str:
        """Identity of what was learned: the models' names as the checkpoint knows them, in any order."""
        return pool_hash(model.learned_as for model in self.models)


def pool_hash(names: Iterable[str]) -> str:
    """Twelve hexadecimal digits over the sorted distinct names. Prices are not part of it: they may change."""
    return hashlib.sha256("\n".join(sorted(set(names))).encode()).hexdigest()[:12]


def check_pool(pool: Pool, source: str = "pool") -> Pool:
    """The pool itself, or a ConfigError that names the field: no models, a double name, a bad number."""
    if not pool.models:
        raise ConfigError("lists no models; add at least one", source=source, path="$.models")
    seen: set[str] = set()
    for index, model in enumerate(pool.models):
        path = f"$.models[{index}]"
        if not model.name:
            raise ConfigError("needs a name", source=source, path=f"{path}.name")
        if model.name in seen:
            raise ConfigError(f"'{model.name}' is listed twice", source=source, path=f"{path}.name")
        seen.add(model.name)
        for field in ("input_usd_per_1m", "output_usd_per_1m"):
            if not 0.0 <= getattr(model, field) < float("inf"):
                raise ConfigError("must be a price of zero or more", source=source, path=f"{path}.{field}")
        for field in ("context_tokens", "max_output_tokens"):
            value = getattr(model, field)
            if value is not None and value <= 0:
                raise ConfigError("must be above zero", source=source, path=f"{path}.{field}")
    return pool


def decode_pool(text: str, source: str = "pool") -> Pool:
    """Read a pool file (YAML).

    Raises:
        ConfigError: not YAML, an unknown key, a wrong type, or a value out of range; names the place.
    """
    try:
        pool = msgspec.yaml.decode(text, type=Pool)
    except msgspec.ValidationError as error:
        raise ConfigError(str(error), source=source) from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"not valid YAML: {error}", source=source) from None
    return check_pool(pool, source)
