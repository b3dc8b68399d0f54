"""Coverage-guided fuzzing of what reads bytes from outside, and the corpus that such runs have left.

`targets.py` holds the checks, `run.py` drives them with Atheris (in an environment of its own), and
`tests/unit/test_fuzz_corpus.py` plays the corpus back in every test run. `openapi.py` runs Schemathesis.
"""
