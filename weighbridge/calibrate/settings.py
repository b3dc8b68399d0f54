"""What a configuration file may say of calibration."""

from __future__ import annotations

from typing import Annotated

import msgspec

Positive = Annotated[float, msgspec.Meta(gt=0)]


class ReprobeSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When an instance that has left its profile is measured again: after `idle_s` without work, for `budget_s`.

    Whatever came of it, the instance is left alone for `rest_s` afterwards.
    """

    idle_s: Positive = 10.0
    budget_s: Annotated[float, msgspec.Meta(ge=5)] = 60.0
    rest_s: Positive = 900.0
