import threading

import pytest
import torch

from centroidkv.rounds.threads import in_parallel


@pytest.fixture(params=[1, 2, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_every_item_runs_once_on_a_thread_of_its_own_and_without_gradients(threads):
    done, inner = [], set()

    def work(item):
        done.append(item)
        inner.add((torch.get_num_threads(), torch.is_grad_enabled(), threading.get_ident()))

    in_parallel(work, range(7))
    assert sorted(done) == list(range(7))
    assert {(count, grad) for count, grad, _ in inner} == {(1, False)}
    assert torch.get_num_threads() == threads


def test_the_first_error_is_raised_and_the_setting_comes_back(threads):
    def work(item):
        if item == 3:
            raise ValueError("third")

    with pytest.raises(ValueError, match="third"):
        in_parallel(work, range(7))
    assert torch.get_num_threads() == threads


def test_inference_mode_holds_on_every_thread(threads):
    """Engines run everything in it, and its tensors can be written in it only."""
    with torch.inference_mode():
        numbers = torch.zeros(7)
        in_parallel(lambda item: numbers[item : item + 1].add_(item), range(7))
    assert numbers.tolist() == list(range(7))


def test_no_items_no_work(threads):
    in_parallel(lambda item: pytest.fail("called"), [])
    assert torch.get_num_threads() == threads
