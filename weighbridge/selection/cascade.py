"""Try a cheaper model first and climb only when its answer does not pass a check.

Pure: a driver asks for the first model, runs it, hands the answer back and is told to accept or to climb. A judge
model's question is built and its reply read here; the driver makes the call.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from weighbridge.core.errors import ConfigError

if TYPE_CHECKING:
    import jsonschema.protocols

JUDGE_SCALE = 10
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_MAX_PATTERN = 500
_JUDGE = (
    "You grade an answer. Reply with one whole number from 0 (useless) to 10 (fully correct and complete), nothing "
    "else.\n\n# Request\n{request}\n\n# Answer\n{answer}"
)


class Verifier(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Exactly one of: `pattern` must be found, `json_schema` must hold, or model `judge` must grade >= `min_grade`."""

    pattern: str = ""
    json_schema: dict[str, Any] | None = None
    judge: str = ""
    min_grade: float = 7.0


class CascadeSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`models` in the order they are tried; the last one's answer is taken as it is.

    `alias` is the model name by which clients ask for the cascade.
    """

    models: tuple[str, ...]
    verifier: Verifier
    alias: str = "cascade"

    def check(self, models: tuple[str, ...], source: str = "selection") -> None:
        """Refuse fewer than two models, unknown ones, or a verifier that is not exactly one check."""
        path = "$.cascade"
        if len(self.models) < 2:
            raise ConfigError("needs at least two models", source=source, path=f"{path}.models")
        for name in (*self.models, *filter(None, [self.verifier.judge])):
            if name not in models:
                raise ConfigError(
                    f"'{name}' is not a model of the pool ({', '.join(models)})", source=source, path=path
                )
        if not self.alias or self.alias in models:
            raise ConfigError("must be a name of its own, not a model's", source=source, path=f"{path}.alias")
        verifier = self.verifier
        if sum((bool(verifier.pattern), verifier.json_schema is not None, bool(verifier.judge))) != 1:
            raise ConfigError(
                "needs exactly one of pattern, json_schema, judge", source=source, path=f"{path}.verifier"
            )
        if verifier.pattern:
            _compile(verifier.pattern, source, f"{path}.verifier.pattern")
        if verifier.json_schema is not None:
            _validator(verifier.json_schema, source, f"{path}.verifier.json_schema")


@dataclass(frozen=True, slots=True)
class Check:
    """Outcome of a verifier: passed or not, and why not."""

    passed: bool
    reason: str = ""


class Try(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One model asked, or the judge about the answer before (`judge`). `status` is HTTP's; 0: it never answered.

    `verified` is false where no check was made. Costs come from the engine's own token counts and the pool's prices.
    """

    request_id: str
    model: str
    instance: str = ""
    judge: bool = False
    status: int
    verified: bool = True
    passed: bool
    reason: str = ""
    latency_s: float
    prompt_tokens: int = 0
    output_tokens: int = 0
    cost_usd: float = 0.0


class CascadeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """All tries of one request in order, and what they took together."""

    tries: tuple[Try, ...]
    latency_s: float
    cost_usd: float


def next_model(settings: CascadeSettings, tried: tuple[str, ...]) -> str:
    """The first model of the cascade that was not tried yet, or the empty string."""
    return next((model for model in settings.models if model not in tried), "")


def check_answer(verifier: Verifier, answer: str) -> Check:
    """Apply `pattern` or `json_schema`. A judge's grade goes through `check_grade`."""
    if verifier.pattern:
        found = _compile(verifier.pattern).search(answer)
        return Check(found is not None, "" if found else "the pattern was not found")
    if verifier.json_schema is None:
        raise ValueError("a judge's grade is checked with check_grade")
    try:
        value = msgspec.json.decode(answer.strip())
    except msgspec.DecodeError as error:
        return Check(False, f"not JSON: {error}")
    problem = next(iter(_validator(verifier.json_schema).iter_errors(value)), None)
    return Check(problem is None, "" if problem is None else f"{problem.json_path}: {problem.message}")


def judge_prompt(request: str, answer: str) -> str:
    """The question for the judge model; both parts are cut to what a small model reads."""
    return _JUDGE.format(request=request[:4000], answer=answer[:8000])


def check_grade(verifier: Verifier, reply: str) -> Check:
    """Read the first number of the judge's reply; no number counts as failed."""
    found = _NUMBER.search(reply)
    if found is None:
        return Check(False, "the judge gave no number")
    grade = min(float(found.group()), float(JUDGE_SCALE))
    return Check(grade >= verifier.min_grade, "" if grade >= verifier.min_grade else f"graded {grade:g}")


def _compile(pattern: str, source: str = "selection", path: str = "") -> re.Pattern[str]:
    if len(pattern) > _MAX_PATTERN:
        raise ConfigError(f"is longer than {_MAX_PATTERN} characters", source=source, path=path)
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ConfigError(f"is not a regular expression: {error}", source=source, path=path) from None


def _validator(schema: dict[str, Any], source: str = "selection", path: str = "") -> jsonschema.protocols.Validator:
    try:
        import jsonschema
    except ImportError:
        raise ConfigError(
            "checking a JSON schema needs the extra: pip install 'weighbridge[select]'", source=source, path=path
        ) from None
    kind = jsonschema.validators.validator_for(schema)
    try:
        kind.check_schema(schema)
    except jsonschema.SchemaError as error:
        raise ConfigError(f"is not a JSON schema: {error.message}", source=source, path=path) from None
    return kind(schema)
