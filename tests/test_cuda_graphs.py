"""A recording in pieces: graphs, and the work between them. Graphs are only played here."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from tammes import cuda_graphs
from tammes.cuda_graphs import Recording, outside_graph


class Stream:
    def __init__(self, log, name="current"):
        self.log, self.name = log, name

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def log(monkeypatch):
    """What graphs and streams were told to do."""
    log = []

    class Graph:
        made = 0

        def __init__(self):
            Graph.made += 1
            self.number = Graph.made

        def capture_begin(self, pool=None):
            log.append(f"begin {self.number}" + (f" in pool of {pool}" if pool else ""))

        def capture_end(self):
            log.append(f"end {self.number}")

        def pool(self):
            return self.number

        def replay(self):
            log.append(f"graph {self.number}")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(log, "side"))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(log))
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    return log


def largest(matrix):
    return (torch.linalg.eigvalsh(matrix)[-1:],)


def recorded(given, work=largest):
    made = Recording(torch.device("cpu"))
    with made.record():
        (place,) = made.interrupt(work, given)
    return made, place


def test_work_ends_a_graph_and_begins_another_with_the_same_memory(log):
    recorded(nn.Parameter(torch.eye(2)))
    assert log == ["begin 1", "end 1", "begin 2 in pool of 1", "end 2"]


def test_every_replay_does_the_work_anew_and_in_its_place(log):
    weight = nn.Parameter(torch.eye(2))
    made, place = recorded(weight)
    for factor in (3.0, 5.0):
        with torch.no_grad():
            weight.copy_(factor * torch.eye(2))
        made.replay()
        assert_close(place, torch.tensor([factor]))


def test_work_on_a_parameter_goes_beside_the_graph_before_it(log):
    made, _ = recorded(nn.Parameter(torch.eye(2)))
    log.clear()
    made.replay()
    assert log == ["side waits for current", "graph 1", "current waits for side", "graph 2"]


def test_work_on_anything_else_waits_for_the_graph_that_makes_it(log):
    made, _ = recorded(torch.eye(2))
    log.clear()
    made.replay()
    assert log[1:4] == ["graph 1", "side waits for current", "current waits for side"]


def test_numbers_that_are_not_there_yet_are_not_looked_at(log):
    nothing = torch.full((2, 2), torch.nan)
    _, place = recorded(nothing)
    assert_close(place, torch.zeros(1))


def test_an_error_leaves_no_recording_behind(log):
    def fails(matrix):
        raise RuntimeError("no luck")

    with pytest.raises(RuntimeError, match="no luck"):
        recorded(torch.eye(2), fails)
    assert cuda_graphs._recording is None
    assert log == ["begin 1", "end 1"]
    with pytest.raises(RuntimeError, match="no luck"), Recording(torch.device("cpu")).record():
        raise RuntimeError("no luck")
    assert log[-1] == "end 2"


def test_without_a_recording_work_is_done_as_it_is():
    weight = nn.Parameter(2 * torch.eye(3))
    (found,) = outside_graph(largest, weight)
    assert_close(found, torch.tensor([2.0]))
    assert not found.requires_grad
