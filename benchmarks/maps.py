"""Time losses with a map of the other scores, and several prototypes per class, beside CosFace.

    python benchmarks/maps.py            # GPU: 4,096 rows, a million classes, bf16 autocast
    python benchmarks/maps.py --quick    # tiny, on any device, to see that it works

Time: forward and backward, median of five turns after two. Beside it the three matrix products that
any softmax over the classes needs.
"""

import argparse
import statistics
import time

import torch

import tammes

LOSSES = {
    "cosface": (tammes.cosface(), {}),
    "arcface": (tammes.arcface(), {}),
    "mv_softmax": (tammes.mv_softmax(), {}),
    "curricularface": (tammes.curricularface(), {}),
    "interclass_filter": (tammes.interclass_filter(), {}),
    "circle": (tammes.circle(), {}),
    "arcface, 3 centres": (tammes.arcface(), {"subcenters": 3}),
}
BLOCK = 1 << 17
"""Classes of one product."""


def milliseconds(step, device, turns=5):
    """Median of some turns, after two that do not count."""
    found = []
    for _ in range(turns + 2):
        begin = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        found.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(found[2:])


def products(features, classes):
    """Three products in half precision, by blocks of classes."""
    left = features.detach().to(torch.bfloat16)
    rows = torch.randn(classes, left.shape[1], device=left.device, dtype=left.dtype)

    def step():
        for block in rows.split(BLOCK):
            scores = left @ block.T
            scores @ block
            scores.T @ left

    return step


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="tiny, to see that it works")
    quick = parser.parse_args().quick
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows, size, classes = (64, 16, 300) if quick else (4096, 512, 1_000_000)
    torch.manual_seed(0)
    features = torch.randn(rows, size, device=device, requires_grad=True)
    labels = torch.randint(classes, (rows,), device=device)
    bare = milliseconds(products(features, classes), device)
    print(f"{'three products':20} {bare:9.2f} ms")
    for name, (term, options) in LOSSES.items():
        with device:
            # Made there: drawing a billion numbers on a CPU takes longer than the measurement.
            head = tammes.CosineHead(size, classes, scale=64.0, **options)
            criterion = tammes.Criterion(head, term)

        def step(criterion=criterion):
            features.grad = None
            criterion.zero_grad()
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                loss = criterion(features, labels)
            loss.backward()

        taken = milliseconds(step, device)
        print(f"{name:20} {taken:9.2f} ms, {taken / bare:5.2f} times the products", flush=True)


if __name__ == "__main__":
    main()
