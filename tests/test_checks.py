"""The comparison of all tests catches what it should: faults of one block or one key, in bfloat16, in one tensor."""

import functools

import checks
import jax
import jax.numpy as jnp
import pytest
from cases import Case

from pallas_flash import flash_attention

CASE = Case("checked", B=1, T=256, N=2, H=32, dtype="bfloat16", is_causal=True)
attend = functools.partial(flash_attention, return_residual=True, implementation="xla")


def without_gradient(x, rows):
    """`x`, through which no gradient flows for some rows."""
    return x.at[:, rows].set(jax.lax.stop_gradient(x[:, rows]))


FAULTS = {
    "band shifted by one": lambda q, k, v: attend(q, k, v, is_causal=True, query_offset=1),
    "last keys dropped": lambda q, k, v: attend(q, k, v, is_causal=True, key_value_seq_lengths=jnp.array([240])),
    "no dv for a block": lambda q, k, v: attend(q, k, without_gradient(v, slice(192, 224)), is_causal=True),
    "no dk for a block": lambda q, k, v: attend(q, without_gradient(k, slice(192, 224)), v, is_causal=True),
    "no dq for a block": lambda q, k, v: attend(without_gradient(q, slice(224, 256)), k, v, is_causal=True),
    "a wrong scale": lambda q, k, v: attend(q, k, v, is_causal=True, scale=1.05 / 32**0.5),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_caught(fault):
    with pytest.raises(AssertionError):
        checks.check(CASE, FAULTS[fault])


def test_nan_is_caught():
    def attention(q, k, v):
        out, residual = attend(q, k, v, is_causal=True)
        return out.at[0, 3].set(jnp.nan), residual

    with pytest.raises(AssertionError):
        checks.check(CASE, attention)


def test_right_attention_passes():
    checks.check(CASE, functools.partial(attend, is_causal=True))
