"""The format of deltas."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recycle_pp.islands.codec import ROW, Damaged, content_bytes, decode, encode, encoded_bytes, opened, seal

DIGEST = bytes(range(16))


def deltas(size, scale, seed):
    return (np.random.default_rng(seed).standard_normal(size) * scale).astype(np.float32)


@given(st.integers(1, 2000), st.floats(-6, 2), st.integers(0, 9), st.sampled_from([8, 32]))
def test_the_sender_knows_what_a_receiver_decodes(size, exponent, seed, bits):
    codes, sent = encode(deltas(size, 10.0**exponent, seed), bits)
    assert len(codes) == encoded_bytes(size, bits)
    assert decode(codes, size, bits).tobytes() == sent.tobytes()
    content = seal(codes, DIGEST, size, bits)
    assert len(content) == content_bytes(size, bits)
    assert opened(content, DIGEST, size).tobytes() == sent.tobytes()


@given(st.integers(1, 2000), st.floats(-6, 1), st.integers(0, 9))
def test_eight_bits_lose_at_most_half_a_step_of_the_row_s_largest_value(size, exponent, seed):
    values = deltas(size, 10.0**exponent, seed)
    _, sent = encode(values, 8)
    for first in range(0, size, ROW):
        row, after = values[first : first + ROW], sent[first : first + ROW]
        assert np.abs(row - after).max() <= 0.501 * np.abs(row).max() / 127 * (1 + 2**-10)


@pytest.mark.parametrize("value", [0.0, 1e-30, 1e-12, 600.0, 1e30])
def test_values_beyond_the_range_of_scales_are_clipped_and_stay_finite(value):
    _, sent = encode(np.full(300, value, np.float32), 8)
    assert np.isfinite(sent).all() and (np.abs(sent) <= value).all()


@given(st.integers(0, 9))
@settings(max_examples=5)
def test_error_feedback_delivers_the_sum_of_all_deltas(seed):
    residual = total = arrived = np.zeros(700, np.float32)
    for step in range(30):
        values = deltas(700, 1e-3, 100 * seed + step)
        total = total + values
        _, sent = encode(values + residual, 8)
        residual = values + residual - sent
        arrived = arrived + sent
    np.testing.assert_allclose(arrived + residual, total, atol=1e-6)
    assert np.abs(total - arrived).max() < 1e-4  # the error of one encoding, not of thirty


def test_eight_bits_are_a_quarter_of_float32():
    assert 3.9 < encoded_bytes(10**6, 32) / encoded_bytes(10**6, 8) < 4.0


@given(st.data())
def test_damaged_and_foreign_objects_are_refused_with_a_reason(data):
    content = seal(encode(deltas(600, 1e-3, 0), 8)[0], DIGEST, 600, 8)
    kind = data.draw(st.sampled_from(["truncated", "flipped", "layout", "longer", "foreign"]))
    if kind == "truncated":
        content = content[: data.draw(st.integers(0, len(content) - 1))]
    elif kind == "flipped":
        at = data.draw(st.integers(0, len(content) - 1))
        content = content[:at] + bytes([content[at] ^ 1 << data.draw(st.integers(0, 7))]) + content[at + 1 :]
    elif kind == "longer":
        content += b"\0"
    elif kind == "foreign":
        content = data.draw(st.binary(max_size=100))
    with pytest.raises(Damaged, match=r"^its? "):
        opened(content, bytes(16) if kind == "layout" else DIGEST, 600)
