"""Packing several tensors into one message."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from recycle_pp.comm.messages import ALIGNMENT, pack, room, unpack

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.float64]
tensors = st.lists(
    st.builds(
        lambda shape, dtype, turned: (
            (torch.arange(24)[: shape[0] * shape[1]].view(shape) % 2).to(dtype).t()
            if turned
            else (torch.arange(24)[: shape[0] * shape[1]].view(shape)).to(dtype)
        ),
        st.tuples(st.integers(0, 4), st.integers(1, 6)),
        st.sampled_from(DTYPES),
        st.booleans(),
    ),
    min_size=1,
    max_size=4,
)


@given(tensors)
def test_unpacked_tensors_equal_the_packed_ones(sent):
    message, buffer = pack(sent), room(sent, torch.device("cpu"))
    assert message.shape == buffer.shape and message.dtype == buffer.dtype == torch.uint8
    came = unpack(buffer.copy_(message), sent)
    assert [t.dtype for t in came] == [t.dtype for t in sent]
    assert all(torch.equal(a, b) for a, b in zip(sent, came, strict=True))


def test_a_scalar_can_be_packed():
    assert unpack(pack([torch.tensor(3.0), torch.ones(2)]), [torch.empty(()), torch.empty(2)])[0] == 3.0


def test_a_single_tensor_is_not_copied():
    x = torch.randn(3, 5)
    assert pack([x]).data_ptr() == x.data_ptr()


def test_unpacked_tensors_are_aligned_like_new_tensors():
    message = pack([torch.ones(3), torch.ones(5), torch.ones(1)])
    starts = [t.data_ptr() - message.data_ptr() for t in unpack(message, [torch.ones(3), torch.ones(5), torch.ones(1)])]
    assert starts == [0, ALIGNMENT, 2 * ALIGNMENT]
