"""Choose a threshold for "is this the same?" from embeddings and identities.

    python examples/choose_threshold.py

Needs `tammes[lab]`. The embeddings are raw pixels of digits; replace them by those of your network.
Prints thresholds with their error rates, and writes out/verification.html. Takes seconds.
"""

from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

from tammes.lab.recognition.embeddings import read_embeddings
from tammes.lab.recognition.evaluate_verification import evaluate_verification
from tammes.lab.report.pages.recognition_page import recognition_page
from tammes.lab.report.render.html_page import write


def main(out: str = "out", count: int = 400) -> dict[float, float]:
    """Return the threshold of each false acceptance rate."""
    digits = load_digits()
    features = digits.data[:count] - digits.data.mean(0)
    Path(out).mkdir(parents=True, exist_ok=True)
    np.savez(f"{out}/pixels.npz", embeddings=features, identities=digits.target[:count])

    examples = read_embeddings([f"{out}/pixels.npz"])
    found = evaluate_verification(examples, fars=(0.1, 0.01, 0.001))
    for point in found.thresholds:
        print(
            f"accept at {point.thresholds[0]:.3f} or above: at most {100 * point.target:g} % of "
            f"different pairs, {point.accepted.shown()} of same pairs "
            f"({point.accepted.shown_interval()} over identities)"
        )
    write(f"{out}/verification.html", recognition_page(found, examples, "choose_threshold.py"))
    return {point.target: point.thresholds[0] for point in found.thresholds}


if __name__ == "__main__":
    main()
