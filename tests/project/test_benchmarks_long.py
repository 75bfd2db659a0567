"""Benchmarks of long backwards: PyTorch's alone, and the simulation of how threads share groups."""

import pytest

from benchmarks import contenders, dealing, peers


def test_the_backward_of_torch_alone_is_that_of_both():
    torch = contenders.Setting(1, peers.find(1)[0]).torch()
    if torch is None:
        pytest.skip("needs PyTorch")
    x = contenders.operands(2, 24, 8)
    for mine, theirs in zip(torch.backward(x)(), torch.both(x)()[1], strict=True):
        assert (
            torch.result(lambda g=mine: g).tobytes() == torch.result(lambda g=theirs: g).tobytes()
        )


def test_the_simulated_dealing_gains_what_was_measured():
    work = dealing.CASES["16 heads of 1024 x 64"]
    for threads, measured in ((4, 2.9), (8, 4.5), (16, 6.2)):
        assert dealing.gain(work, threads, dealing.in_turn) == pytest.approx(measured, rel=0.08)
        assert dealing.gain(work, threads, dealing.by_home) > 0.97 * threads


def test_the_simulation_does_every_step_once_and_no_faster_than_its_threads():
    work = dealing.Head(1, 1000, 64)
    steps = work.units * work.blocks
    assert len(set(dealing.order(work, 0, 0, work.units))) == steps
    free = dealing.Machine(flops=10 * dealing.UNIT * dealing.BLOCK * work.d, bytes=float("inf"))
    alone = dealing.seconds(work, 1, dealing.by_home, free)
    assert alone == pytest.approx(steps, rel=0.02)
    for threads in (2, 3):
        together = dealing.seconds(work, threads, dealing.by_home, free)
        assert alone / threads < together < alone
