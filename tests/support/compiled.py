"""Marks tests that replace a constant or inherit from a class of a module that `scripts/compile.py` compiles."""

import pytest

from weighbridge.gateway import flight

interpreted = pytest.mark.skipif(
    not str(flight.__file__).endswith(".py"), reason="compiled modules have final constants and no interpreted heirs"
)
