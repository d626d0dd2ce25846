"""Classify short queries with scikit-learn and reject those that fit no intent.

    python examples/sklearn_out_of_scope.py [--data FOLDER] [--out results/clinc150_cpu.json]

CLINC150 (Larson et al., EMNLP 2019): 150 intents with 100 training queries each, and queries out of
scope, which no classifier is trained on here. ``MarginClassifier`` beside scikit-learn's logistic
regression and linear support vector machine, on the same TF-IDF features.
"""

import argparse
import json
import os
import platform
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet
import sklearn
import torch
from scipy.special import logsumexp
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.svm import LinearSVC

from tammes.integrations.sklearn import MarginClassifier

RECALL = 0.95
OUT_OF_SCOPE = "oos"


def read(folder):
    """Queries and intents of each split; out-of-scope queries are splits of their own."""
    table = pyarrow.parquet.read_table(Path(folder) / "clinc150.parquet").to_pydict()
    texts, intents, splits = (np.array(table[name]) for name in ("text", "intent", "split"))
    outside = intents == OUT_OF_SCOPE
    parts = {}
    for split in ("train", "val", "test"):
        for kind, rows in (("", ~outside), (" oos", outside)):
            chosen = rows & (splits == split)
            parts[split + kind] = texts[chosen], intents[chosen]
    return parts


def known_scores(model, rows):
    """Scores of how known each query is: higher for queries in scope."""
    scores = model.decision_function(rows)
    found = {"largest score": scores.max(1), "energy": logsumexp(scores, axis=1)}
    if hasattr(model, "predict_proba"):
        found["largest probability"] = model.predict_proba(rows).max(1)
    return found


def contestants(epochs, seeds):
    """Name, and one model for each seed."""
    # Size and epochs of MarginClassifier were chosen on the validation split.
    settings = {"embedding_size": 256, "epochs": epochs}
    for loss in ("cosface(margin=0.2)", "softmax()"):
        models = [MarginClassifier(loss, random_state=seed, **settings) for seed in range(seeds)]
        yield f"MarginClassifier, {loss}", models
    yield "LogisticRegression(C=1)", [LogisticRegression(max_iter=1000)]
    yield "LogisticRegression(C=10)", [LogisticRegression(C=10, max_iter=1000)]
    yield "LinearSVC", [LinearSVC()]


def measure(model, rows, parts):
    """Train; accuracy, and the share of out-of-scope queries that is rejected."""
    wall, processor = time.perf_counter(), time.process_time()
    model.fit(rows["train"], parts["train"][1])
    measured = {
        "seconds": time.perf_counter() - wall,
        "processor_seconds": time.process_time() - processor,
        "accuracy": float(model.score(rows["test"], parts["test"][1])),
    }
    scores = {name: known_scores(model, rows[name]) for name in ("val", "test", "test oos")}
    for kind, inside in scores["test"].items():
        outside = scores["test oos"][kind]
        # The measure keeps 95 % of the test queries in scope; an application would take its
        # threshold from the validation split.
        threshold = np.quantile(inside, 1 - RECALL, method="lower")
        chosen = np.quantile(scores["val"][kind], 1 - RECALL, method="lower")
        measured |= {
            f"oos recall, {kind}": float((outside < threshold).mean()),
            f"oos recall at validation threshold, {kind}": float((outside < chosen).mean()),
            f"in-scope recall at validation threshold, {kind}": float((inside >= chosen).mean()),
        }
    return measured


def main(data=None, out=None, epochs=5, seeds=3, training=None):
    """Compare, print a table, and write a JSON file; returns the measures by name.

    Args:
        data: folder of ``clinc150.parquet``; by default ``TAMMES_DATA``.
        out: file to write.
        epochs: of MarginClassifier.
        seeds: models of MarginClassifier to train.
        training: number of training queries, all by default.
    """
    parts = read(data or os.environ["TAMMES_DATA"])
    texts, intents = parts["train"]
    parts["train"] = texts[:training], intents[:training]
    vectorizer = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, dtype=np.float32)
    vectorizer.fit(parts["train"][0])
    rows = {name: vectorizer.transform(texts) for name, (texts, _) in parts.items()}
    kinds = ("largest score", "energy", "largest probability")
    print(f"{'':38}accuracy   out-of-scope recall by: " + ", ".join(kinds) + "   processor seconds")
    results = {}
    for name, models in contestants(epochs, seeds):
        runs = [measure(model, rows, parts) for model in models]
        results[name] = {key: [run[key] for run in runs] for key in runs[0]}
        mean = {key: float(np.mean(values)) for key, values in results[name].items()}
        recalls = [mean.get(f"oos recall, {kind}", np.nan) for kind in kinds]
        print(
            f"{name:38}{100 * mean['accuracy']:7.2f}"
            + "".join(f"{100 * recall:9.1f}" for recall in recalls)
            + f"{mean['processor_seconds']:9.1f}",
            flush=True,
        )
    if out is not None:
        record = {
            "command": f"python examples/sklearn_out_of_scope.py --out {out}",
            "features": rows["train"].shape[1],
            "in_scope_recall": RECALL,
            "threads": torch.get_num_threads(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "sklearn": sklearn.__version__,
            "results": results,
        }
        Path(out).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="folder of clinc150.parquet; TAMMES_DATA by default")
    parser.add_argument("--out", help="JSON file to write")
    arguments = parser.parse_args()
    main(arguments.data, arguments.out)
