import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch

from centroidkv import Compressor, KVState
from centroidkv.rounds import threads as ours
from centroidkv.rounds.threads import in_parallel


@pytest.fixture(params=[1, 2, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture(params=["limited", "in turn"])
def way(request, monkeypatch):
    """With PyTorch's OpenMP, and where none is found."""
    if request.param == "in turn":
        monkeypatch.setattr(ours, "_limits", lambda: "made up: there is no OpenMP")
    elif ours.why_not_alone() is not None:
        pytest.skip(str(ours.why_not_alone()))
    return request.param


def in_a_new_thread(ask):
    found = []
    thread = threading.Thread(target=lambda: found.append(ask()))
    thread.start()
    thread.join()
    return found[0]


def told():
    """What PyTorch says of the OpenMP and MKL threads of the thread that asks."""
    return torch.__config__.parallel_info().split("Environment")[0]


@pytest.mark.parametrize("items", [1, 2, 7])
def test_every_item_runs_once_and_without_gradients(threads, way, items):
    done, inner = [], set()

    def work(item):
        done.append(item)
        inner.add((torch.get_num_threads(), torch.is_grad_enabled()))

    before = told()
    in_parallel(work, range(items))
    assert sorted(done) == list(range(items))
    assert inner == {(1 if way == "limited" else threads, False)}
    assert (torch.get_num_threads(), torch.is_grad_enabled()) == (threads, True)
    assert told() == before  # OpenMP's and MKL's numbers of this thread
    assert in_a_new_thread(torch.get_num_threads) == threads


@pytest.mark.skipif(ours.why_not_alone() is not None, reason=str(ours.why_not_alone()))
@pytest.mark.parametrize("items", [1, 6])
def test_mkl_is_limited_too(items):
    """Once set_num_threads was called, MKL no longer asks OpenMP."""
    before, inner = torch.get_num_threads(), []
    torch.set_num_threads(3)
    try:
        in_parallel(lambda item: inner.append(told()), range(items))
        assert all("get_max_threads() : 3" not in one and "max_threads() : 1" in one for one in inner), inner
        assert "get_max_threads() : 1" not in told()
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("items", [1, 7])
def test_no_thread_begun_meanwhile_finds_another_number(threads, way, items):
    seen = []

    def work(item):
        seen.append(in_a_new_thread(torch.get_num_threads))

    in_parallel(work, range(items))
    assert seen == [threads] * items


def test_two_hundred_requests_on_threads_leave_everything_as_it_was(threads, way):
    keys = torch.randn(1, 2, 300, 16)
    state, compressor = KVState.from_kv(keys, keys), Compressor.builder().preserve().budget(0.5).build("blocked")
    wanted = compressor(state).keys
    found, kept, before = [], [], told()

    def request():
        first = torch.get_num_threads()
        equal = compressor(state).keys.equal(wanted)
        found.append((first, torch.get_num_threads(), equal))

    for _ in range(25):
        together = [threading.Thread(target=request) for _ in range(8)]
        for thread in together:
            thread.start()
            kept.append(in_a_new_thread(torch.get_num_threads))
        for thread in together:
            thread.join()
    assert set(found) == {(threads, threads, True)}
    assert len(found) == 200
    assert {torch.get_num_threads(), in_a_new_thread(torch.get_num_threads), *kept} == {threads}
    assert told() == before


def test_the_processs_own_setting_is_never_called(threads, way, monkeypatch):
    """Engines replace it by a function that refuses."""
    monkeypatch.setattr(torch, "set_num_threads", lambda count: pytest.fail("called"))
    keys = torch.randn(1, 4, 5000, 64)
    compressor = Compressor.builder().preserve().budget(0.5).build("blocked")
    assert compressor(KVState.from_kv(keys, keys)).slots == 2500


@pytest.mark.parametrize("items", [1, 7])
def test_the_first_error_is_raised_others_end_and_the_setting_comes_back(threads, way, items):
    running = set()

    def work(item):
        running.add(item)
        try:
            if item in (0, 3):
                raise ValueError("first")
            time.sleep(0.01)
        finally:
            running.discard(item)

    before = told()
    with pytest.raises(ValueError, match="first"):
        in_parallel(work, range(items))
    assert not running
    assert torch.get_num_threads() == threads
    assert told() == before


def test_after_an_error_no_further_piece_is_begun(way):
    before, begun = torch.get_num_threads(), []
    torch.set_num_threads(2)

    def work(item):
        begun.append(item)
        if item == 0:
            raise ValueError("first")
        time.sleep(0.02)

    try:
        with pytest.raises(ValueError, match="first"):
            in_parallel(work, range(200))
    finally:
        torch.set_num_threads(before)
    assert len(begun) < 20


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_an_interrupt_ends_it_soon_and_leaves_the_threads(way):
    before, begun, caller = torch.get_num_threads(), [], threading.get_ident()
    torch.set_num_threads(2)

    def work(item):
        begun.append(item)
        if item == 1:
            signal.pthread_kill(caller, signal.SIGINT)
        time.sleep(0.02)

    try:
        for items in (range(200), [1]):
            with pytest.raises(KeyboardInterrupt):
                in_parallel(work, items)
            assert (torch.get_num_threads(), in_a_new_thread(torch.get_num_threads)) == (2, 2)
    finally:
        torch.set_num_threads(before)
    assert len(begun) < 30


@pytest.mark.skipif(not hasattr(os, "fork"), reason="fork")
def test_a_process_forked_after_use_can_use_it_too():
    code = """
        import os, torch
        from centroidkv.rounds.threads import in_parallel
        torch.set_num_threads(2)
        done = torch.zeros(6)
        in_parallel(lambda item: done[item].fill_(1), range(6))
        child = os.fork()
        if child == 0:
            done.zero_()
            in_parallel(lambda item: done[item].fill_(1), range(6))
            os._exit(0 if done.all() and torch.get_num_threads() == 2 else 1)
        print(os.waitpid(child, 0)[1])
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.strip() == "0"


def test_inference_mode_holds_on_every_thread(threads, way):
    """Engines run everything in it, and its tensors can be written in it only."""
    with torch.inference_mode():
        numbers = torch.zeros(7)
        in_parallel(lambda item: numbers[item : item + 1].add_(item), range(7))
    assert numbers.tolist() == list(range(7))


def test_no_items_no_work(threads, way):
    in_parallel(lambda item: pytest.fail("called"), [])
    assert torch.get_num_threads() == threads
