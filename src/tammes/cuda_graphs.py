"""Record a step as CUDA graphs, with eager calls in between that cannot be captured.

A routine that synchronizes with the GPU, such as a matrix decomposition, cannot be captured. So
:func:`outside_graph` ends the graph before such a call and begins another one after it: a replay is
a graph, the eager call, and a graph again.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

Work = Callable[[Tensor], tuple[Tensor, ...]]

_recording: "Recording | None" = None


class Recording:
    """CUDA graphs of one step and the eager calls between them, replayed in order.

    The tensors they read and write must keep their addresses after recording.

    Args:
        device: a CUDA device.
        stream: stream on which calls are captured; a backward pass uses that of its forward pass.
    """

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if stream is None else stream
        self.pieces: list[torch.cuda.CUDAGraph | _EagerCall] = []
        self.side = torch.cuda.Stream(device)
        self.open = False

    @contextmanager
    def record(self) -> Iterator[None]:
        """Capture the calls in the ``with`` block on a separate stream, without running them."""
        global _recording
        torch.cuda.synchronize(self.device)
        gc.collect()
        torch.cuda.empty_cache()
        with torch.cuda.stream(self.stream):
            self._begin()
            _recording = self
            try:
                yield
            finally:
                _recording = None
                if self.open:
                    self._end()

    def interrupt(self, work: Work, argument: Tensor) -> tuple[Tensor, ...]:
        """End the graph, register an eager call, and begin the next graph."""
        self._end()
        with torch.no_grad():
            # Nothing has run yet, so the argument has a shape but no values.
            outputs = work(torch.zeros_like(argument))
        self.pieces.append(_EagerCall(work, argument, outputs))
        self._begin()
        return outputs

    def replay(self) -> None:
        """Replay the graphs and the eager calls."""
        if len(self.pieces) == 1 and isinstance(self.pieces[0], torch.cuda.CUDAGraph):
            self.pieces[0].replay()
            return
        current = torch.cuda.current_stream(self.device)
        self.side.wait_stream(current)
        for piece in self.pieces:
            if isinstance(piece, torch.cuda.CUDAGraph):
                piece.replay()
                continue
            if not isinstance(piece.argument, nn.Parameter):
                # Computed by the graph before. A parameter is available from the start, so work on
                # it runs in parallel to that graph.
                self.side.wait_stream(current)
            with torch.cuda.stream(self.side):
                piece()
            current.wait_stream(self.side)

    def _begin(self) -> None:
        graph = torch.cuda.CUDAGraph()
        # All graphs share the memory pool of the first, since one reads the results of another.
        first = next((p for p in self.pieces if isinstance(p, torch.cuda.CUDAGraph)), None)
        graph.capture_begin() if first is None else graph.capture_begin(pool=first.pool())
        self.pieces.append(graph)
        self.open = True

    def _end(self) -> None:
        self.open = False
        graph = self.pieces[-1]
        assert isinstance(graph, torch.cuda.CUDAGraph)
        graph.capture_end()


class _EagerCall:
    """Eager call between two graphs; it writes its results where the second graph reads them."""

    def __init__(self, work: Work, argument: Tensor, outputs: tuple[Tensor, ...]) -> None:
        self.work, self.argument, self.outputs = work, argument, outputs

    @torch.no_grad()
    def __call__(self) -> None:
        for output, value in zip(self.outputs, self.work(self.argument), strict=True):
            output.copy_(value)


def outside_graph(work: Work, argument: Tensor) -> tuple[Tensor, ...]:
    """Call a function that a CUDA graph cannot capture; in a recording, between two graphs.

    Args:
        work: returns tensors whose shapes are always the same; it has no gradient.
        argument: argument of ``work``.

    Returns:
        The result of ``work``; in a recording, tensors that every replay fills again.

    Example:
        >>> outside_graph(lambda matrix: tuple(torch.linalg.eigh(matrix)), torch.eye(2))[0]
        tensor([1., 1.])
    """
    if _recording is not None and argument.is_cuda:
        return _recording.interrupt(work, argument)
    with torch.no_grad():
        return work(argument)
