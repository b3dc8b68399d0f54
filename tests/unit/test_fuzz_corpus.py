"""Every input that the fuzzers have kept is played again."""

from pathlib import Path

import pytest

from tests.fuzz.targets import TARGETS

CORPUS = Path(__file__).parents[1] / "fuzz" / "corpus"


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_the_corpus_breaks_nothing(target: str) -> None:
    files = sorted((CORPUS / target).iterdir())
    assert len(files) >= 6
    for file in files:
        try:
            TARGETS[target](file.read_bytes())
        except Exception as error:
            raise AssertionError(f"{target}/{file.name} breaks") from error
