"""Time the projection of a direct or spectral sum, and the routines it can be built from.

    python benchmarks/subspace.py                # 64 prototypes, 640 dimensions, as for CIFAR-FS
    python benchmarks/subspace.py --device cuda --classes 100

Prototypes are random, in single precision; routines are timed in double precision, as the
projection uses them. Milliseconds, the median of the repeats.
"""

import argparse
import statistics
import time

import torch

from tammes.losses.subspace import OrthogonalComplement, SpectralComplement


def milliseconds(work, device, repeats):
    """Median time of a function, after one warm-up call."""
    times = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times[1:])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--classes", type=int, default=64)
    parser.add_argument("--size", type=int, default=640)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    prototypes = torch.randn(given.classes, given.size, device=given.device)
    features = torch.randn(given.batch, given.size, device=given.device)
    wide = prototypes.double()
    works = {
        "singular values": lambda: torch.linalg.svd(wide, full_matrices=False),
        "QR": lambda: torch.linalg.qr(wide.T),
        "direct sum": lambda: OrthogonalComplement().project(features, prototypes),
        "spectral sum": lambda: SpectralComplement().project(features, prototypes),
    }
    if given.device == "cuda":
        works["singular values, gesvd"] = lambda: torch.linalg.svd(
            wide, full_matrices=False, driver="gesvd"
        )
    for name, work in works.items():
        print(f"  {name:<24}{milliseconds(work, given.device, given.repeats):9.3f} ms")


if __name__ == "__main__":
    main()
