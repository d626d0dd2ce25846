"""Few-shot episodes per second from cached features, on the CPU, compared with easyfsl.

    python benchmarks/episodes.py                    # the sizes used in papers, two threads
    python benchmarks/episodes.py --episodes 500     # smaller
    python benchmarks/episodes.py --write FILE       # also write the results

Features are synthetic: 20 classes of 600 examples in 640 dimensions, as for CIFAR-FS. Nearest
centroid is timed over all episodes, the fine-tuned heads over 600. easyfsl's prototypical networks
get the same features twice: through its own sampler and loader, which is timed, and one by one on
our episodes, which must give the same accuracy. easyfsl imports torchvision; if that is not
available, easyfsl is skipped and the reason is printed.
"""

import argparse
import importlib.metadata
import json
import platform
import random
import time
from pathlib import Path

import torch

from tammes.lab.fewshot.episodes import draw
from tammes.lab.fewshot.protocol import accuracies, interval, methods

CLASSES, EACH, SIZE = 20, 600, 640
WAY, QUERIES = 5, 15


def made():
    """Draw features of overlapping classes, as after a ReLU and average pooling."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(CLASSES).repeat(EACH)
    points = 0.1 * torch.randn(CLASSES, SIZE, generator=generator)
    noise = 0.4 * torch.randn(len(labels), SIZE, generator=generator)
    return (points[labels] + noise).relu(), labels


def ours(features, labels, text, shot, count):
    """Seconds from labels to accuracies, draws included."""
    (method,) = methods(text).values()
    mean = features.mean(0)
    began = time.perf_counter()
    episodes = draw(labels, way=WAY, shot=shot, queries=QUERIES, episodes=count)
    found = accuracies(features, episodes, method, base_mean=mean)
    seconds = time.perf_counter() - began
    return {
        "method": text,
        "shot": shot,
        "episodes": count,
        "seconds": seconds,
        "per_second": count / seconds,
        "accuracy": interval(found).shown(),
    }


def easyfsl_parts():
    """Import the needed parts of easyfsl, or return the reason why it is not available."""
    try:
        from easyfsl.datasets import FeaturesDataset
        from easyfsl.methods import PrototypicalNetworks
        from easyfsl.samplers import TaskSampler
        from easyfsl.utils import evaluate
    except Exception as error:
        return None, f"{type(error).__name__}: {' '.join(str(error).split())}"

    class Sampler(TaskSampler):
        """easyfsl's sampler, without an argument to torch's sampler that newer versions reject."""

        def __init__(self, **settings):
            before = torch.utils.data.Sampler.__init__
            torch.utils.data.Sampler.__init__ = lambda self, data_source=None: None
            try:
                super().__init__(**settings)
            finally:
                torch.utils.data.Sampler.__init__ = before

    return (FeaturesDataset, PrototypicalNetworks, Sampler, evaluate), ""


def theirs(parts, features, labels, shot, count):
    """Episodes per second of easyfsl, and its accuracy on our episodes."""
    dataset_of, network_of, sampler_of, evaluate = parts
    dataset = dataset_of(labels.tolist(), features, [str(label) for label in range(CLASSES)])
    sampler = sampler_of(dataset=dataset, n_way=WAY, n_shot=shot, n_query=QUERIES, n_tasks=count)
    loader = torch.utils.data.DataLoader(
        dataset, batch_sampler=sampler, collate_fn=sampler.episodic_collate_fn
    )
    network = network_of(torch.nn.Identity())
    random.seed(0)
    began = time.perf_counter()
    evaluate(network, loader, device="cpu", use_tqdm=False)
    seconds = time.perf_counter() - began

    episodes = draw(labels, way=WAY, shot=shot, queries=QUERIES, episodes=count)
    known = torch.arange(WAY).repeat_interleave(shot)
    asked = torch.arange(WAY).repeat_interleave(QUERIES)
    right = 0.0
    with torch.no_grad():
        for support, queries in zip(episodes.support, episodes.queries, strict=True):
            network.process_support_set(features[support.flatten()], known)
            best = network(features[queries.flatten()]).argmax(1)
            right += float((best == asked).double().mean())
    (centroid,) = methods("centroid").values()
    mine = float(accuracies(features, episodes, centroid).mean())
    return {
        "method": "easyfsl prototypical networks",
        "shot": shot,
        "episodes": count,
        "seconds": seconds,
        "per_second": count / seconds,
        "points_apart": 100 * abs(right / count - mine),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--episodes", type=int, default=10_000)
    parser.add_argument("--tuned", type=int, default=600, help="episodes of a fine-tuned head")
    parser.add_argument("--their-episodes", type=int, default=1000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--write", metavar="FILE", help="results as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    features, labels = made()
    # Warm up: one-time loading and allocation are not timed.
    ours(features, labels, "centroid", 1, 50)
    rows = []
    for text in ("centroid", "l2", "cl2n", "linear", "cosine"):
        count = arguments.tuned if text in ("linear", "cosine") else arguments.episodes
        for shot in (1, 5):
            row = ours(features, labels, text, shot, min(count, arguments.episodes))
            rows.append(row)
            print(
                f"  {text:<9} {shot}-shot  {row['episodes']:>6,} episodes  {row['seconds']:7.2f} s"
                f"  {row['per_second']:>9,.0f} episodes/s  {row['accuracy']}"
            )
    parts, why = easyfsl_parts()
    if parts is None:
        print(f"  easyfsl is left out: {why}")
    else:
        for shot in (1, 5):
            row = theirs(parts, features, labels, shot, arguments.their_episodes)
            (own,) = (r for r in rows if (r["method"], r["shot"]) == ("centroid", shot))
            row["ratio"] = own["per_second"] / row["per_second"]
            rows.append(row)
            print(
                f"  easyfsl   {shot}-shot  {row['episodes']:>6,} episodes  {row['seconds']:7.2f} s"
                f"  {row['per_second']:>9,.0f} episodes/s  ours {row['ratio']:.1f} times as many; "
                f"accuracies {row['points_apart']:.3f} points apart on the same episodes"
            )
    if arguments.write:
        version = None if parts is None else importlib.metadata.version("easyfsl")
        about = {
            "torch": torch.__version__,
            "threads": arguments.threads,
            "machine": platform.machine(),
            "features": [CLASSES, EACH, SIZE],
            "easyfsl": version,
            "left_out": why,
        }
        Path(arguments.write).write_text(json.dumps({**about, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
