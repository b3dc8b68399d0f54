"""Are vectors beside the hashed n-grams worth it? Validation score, held-out APGR, and the time of an encoding.

    python benchmarks/selection_encoders.py --data ../shared/routing --encoder hashed [--seeds 3] [--questions 14037]

Run once for each of `hashed`, `vectors` (extra `vectors`) and `sentences` (extra `sentences`, model folder in
WEIGHBRIDGE_SENTENCES). Trains on CodeRouterBench's training rows and decides its validation rows, the test rows and
OOD176 (for the record: nothing was chosen by them); then MMLU with 1,500 labels a seed on the first `--questions`
questions of a seeded order.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np

from weighbridge.selection import evaluate, suites, trial
from weighbridge.selection.decision import Mode
from weighbridge.selection.encoders import make_encoder
from weighbridge.selection.features import Features
from weighbridge.selection.pool import Pool
from weighbridge.selection.selector import Selector
from weighbridge.selection.timing import bench_text
from weighbridge.selection.train import TrainSettings, train


class Remembering:
    """An encoder that encodes every text once."""

    def __init__(self, encoder: object) -> None:
        self._encoder, self._seen = encoder, {}
        self.name, self.buckets, self.words = encoder.name, encoder.buckets, encoder.words

    def encode(self, text: str) -> Features:
        if text not in self._seen:
            self._seen[text] = self._encoder.encode(text)
        return self._seen[text]


def code(data: Path, kind: str) -> dict[str, object]:
    """CodeRouterBench and OOD176."""
    suite = suites.CodeRouterBench(data)
    made = train(suite.dataset(), TrainSettings(encoder=kind), pool=suites.CRB_POOL, created="")
    selector = Selector(made, Pool(pool=suites.CRB_POOL, models=suite.pool.models))
    out: dict[str, object] = {"squared_error": made.manifest.held_out["squared_error"]}
    for name, cases in (
        ("val", suite.cases("val")),
        ("test", suite.cases("test")),
        ("ood176", suite.unknown_families()),
    ):
        routed = evaluate.route(selector, cases, Mode.BALANCED)
        result = evaluate.result(cases, routed.chosen)
        out[name] = {"score": result.avg_score, "cost": result.cost_usd, "unknown": int((~routed.known).sum())}
    return out


def questions(data: Path, kind: str, seeds: int, count: int) -> dict[str, object]:
    """MMLU."""
    cases = suites.mmlu(data)
    cases = cases.take(np.random.default_rng(7).permutation(len(cases.texts))[:count])
    encoder = Remembering(make_encoder(kind, 1 << 15))
    encoded = trial._encode(cases, encoder, lambda stage, done, total: None)
    runs = []
    for seed in range(seeds):
        order = np.random.default_rng(seed).permutation(len(encoded))
        model = trial._Gain(encoded, cases, order[: trial.MMLU_LABELS], encoder)
        runs.append(model.run(encoded, cases, order[trial.MMLU_LABELS :], seed))
    return {
        "apgr": [run.apgr for run in runs],
        "cpt50": [run.cpt50 for run in runs],
        "apgr_mean": round(float(np.mean([run.apgr for run in runs])), 4),
        "cpt50_mean": round(float(np.mean([run.cpt50 for run in runs])), 2),
    }


def times(kind: str) -> dict[str, float]:
    """Milliseconds of one encoding, median of 50 texts."""
    encoder = make_encoder(kind, 1 << 15)
    out = {}
    for tokens in (15, 256, 1024):
        took = []
        for seed in range(50):
            text = bench_text(tokens, seed)[:4096]
            begun = time.process_time()
            encoder.encode(text)
            took.append(1e3 * (time.process_time() - begun))
        out[str(tokens)] = round(float(np.median(took)), 3)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--encoder", choices=("hashed", "vectors", "sentences"), default="hashed")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--questions", type=int, default=14_037)
    arguments = parser.parse_args()
    kind = arguments.encoder
    print(json.dumps({"encoder": kind, "encode_ms": times(kind)}), flush=True)
    print(json.dumps({"encoder": kind, "code": code(arguments.data, kind)}), flush=True)
    found = questions(arguments.data, kind, arguments.seeds, arguments.questions)
    print(json.dumps({"encoder": kind, "questions": arguments.questions, "mmlu": found}), flush=True)


if __name__ == "__main__":
    main()
