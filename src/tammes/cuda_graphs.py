"""A step recorded as CUDA graphs, with the work in between that no graph can hold.

A routine that waits for the GPU, as decompositions of matrices do, cannot be recorded. So where
:func:`between` meets one, the graph ends, and another begins after it: a replay is a graph, the
work as it is, and a graph again.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

Work = Callable[[Tensor], tuple[Tensor, ...]]

_recording: "Recording | None" = None


class Recording:
    """CUDA graphs of one step and the work between them; replayed in order.

    Everything they read and write stays where it was when they were recorded.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pieces: list[torch.cuda.CUDAGraph | _Between] = []
        self.side = torch.cuda.Stream(device)
        self.open = False

    @contextmanager
    def record(self) -> Iterator[None]:
        """Record what is called within, on a stream of its own; graphs run nothing of it."""
        global _recording
        torch.cuda.synchronize(self.device)
        gc.collect()
        torch.cuda.empty_cache()
        with torch.cuda.stream(torch.cuda.Stream(self.device)):
            self._begin()
            _recording = self
            try:
                yield
            finally:
                _recording = None
                if self.open:
                    self._end()

    def cut(self, work: Work, given: Tensor) -> tuple[Tensor, ...]:
        """End a graph, do some work, and begin the next graph; see :func:`between`."""
        self._end()
        with torch.no_grad():
            # As nothing has run, the values are not there yet; the shapes are.
            places = work(torch.zeros_like(given))
        self.pieces.append(_Between(work, given, places))
        self._begin()
        return places

    def replay(self) -> None:
        """Do it again."""
        current = torch.cuda.current_stream(self.device)
        self.side.wait_stream(current)
        for piece in self.pieces:
            if isinstance(piece, torch.cuda.CUDAGraph):
                piece.replay()
                continue
            if not isinstance(piece.given, nn.Parameter):
                # The graph before makes it; a parameter is there from the start, and work on it
                # goes beside that graph.
                self.side.wait_stream(current)
            with torch.cuda.stream(self.side):
                piece()
            current.wait_stream(self.side)

    def _begin(self) -> None:
        graph = torch.cuda.CUDAGraph()
        # All share the memory of the first one, as what one makes the next one reads.
        first = next((p for p in self.pieces if isinstance(p, torch.cuda.CUDAGraph)), None)
        graph.capture_begin() if first is None else graph.capture_begin(pool=first.pool())
        self.pieces.append(graph)
        self.open = True

    def _end(self) -> None:
        self.open = False
        graph = self.pieces[-1]
        assert isinstance(graph, torch.cuda.CUDAGraph)
        graph.capture_end()


class _Between:
    """Work between two graphs: it writes to where the second one reads."""

    def __init__(self, work: Work, given: Tensor, places: tuple[Tensor, ...]) -> None:
        self.work, self.given, self.places = work, given, places

    @torch.no_grad()
    def __call__(self) -> None:
        for place, found in zip(self.places, self.work(self.given), strict=True):
            place.copy_(found)


def between(work: Work, given: Tensor) -> tuple[Tensor, ...]:
    """Do work that no CUDA graph can hold; where a step is being recorded, between two graphs.

    Args:
        work: tensors from a tensor, always of the same shapes; no gradient goes through it.
        given: what it is called with.

    Returns:
        What it returned; in a recording, places that every replay fills anew.

    Example:
        >>> between(lambda matrix: tuple(torch.linalg.eigh(matrix)), torch.eye(2))[0]
        tensor([1., 1.])
    """
    if _recording is not None and given.is_cuda:
        return _recording.cut(work, given)
    with torch.no_grad():
        return work(given)
