import pytest
import torch

pytest.importorskip("triton")
tool = pytest.importorskip("analysis.tools.kernel_bytes")

SHAPES = [tool.SMALL, tool.Shape(heads=2, slots=128, size=32, chunk=32, removed_share=0.5)]


@pytest.mark.parametrize("shape", SHAPES, ids=["small", "short chunks"])
@pytest.mark.parametrize("kernel", tool.KERNELS, ids=lambda kernel: kernel.name)
def test_the_formula_is_what_is_counted(kernel, shape):
    counter, formula = tool.measure(kernel, shape), kernel.formula(shape)
    assert (counter.asked, counter.read, counter.written) == (formula.asked, formula.read, formula.written)
    assert counter.stored == counter.written  # nothing is written twice


@pytest.mark.parametrize("kernel", tool.KERNELS, ids=lambda kernel: kernel.name)
def test_little_more_than_the_least_is_read_and_written(kernel):
    formula = kernel.formula(tool.LLAMA)
    assert formula.least <= formula.read + formula.written <= 1.03 * formula.least


def test_the_merge_kernel_reads_every_key_and_value_once():
    slots, size = 24, 16
    keys, values = torch.randn(1, 1, slots, size), torch.randn(1, 1, slots, size)
    degree, positions = torch.ones(1, 1, slots), torch.arange(slots)[None, None]
    joins = torch.tensor([[[1, 1, 1, *range(3, slots - 2), 5, 5]]])
    from centroidkv.aggregate.triton import merge_triton

    with tool.counting() as counter:
        out = merge_triton(keys, values, degree, positions, joins)
    for x in (keys, values):
        assert all((times(counter.loads, x, place) == 1) for place in range(0, x.numel(), 7))
    # Degrees of slots that leave are added up before shares of the sum are taken, hence read twice.
    leaves = joins[0, 0] != torch.arange(slots)
    assert [times(counter.loads, degree, place) for place in range(slots)] == (1 + leaves.int()).tolist()
    for x in out:
        assert all((times(counter.stores, x, place) == 1) for place in range(x.numel()))


def times(touched, x, place):
    """How often the number at ``place`` of a contiguous tensor was touched."""
    address = x.data_ptr() + place * x.element_size()
    return sum(int((addresses == address).sum()) for addresses, _ in touched)


def test_counting_ends_with_the_block():
    from triton.runtime.interpreter import interpreter_builder

    with pytest.raises(ZeroDivisionError), tool.counting():
        raise ZeroDivisionError
    assert "create_masked_load" not in vars(interpreter_builder)


def test_counting_needs_the_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(tool.BackendError, match="TRITON_INTERPRET=1"), tool.counting():
        pass
