"""Every format's rows against the reference, to the bit, eagerly and under jit: what XLA would gladly rewrite."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvcore
from kvcore.backends.jax_pallas import encoding
from kvcore.backends.reference import encoding as reference
from kvcore.errors import BackendError
from kvcore.kernels.pallas.arithmetic import divide
from kvcore.spec import FORMATS
from tests.support.exact import every_bf16
from tests.support.new_codes import NAME, layers_of, new_code

SCALES = 0.37, 1e-18, 1.3e-38
"""Global scales; large values are beyond fp32 by the second, remainders of quotients below it by the last."""


def hard_rows(dim: int, rng: np.random.Generator) -> np.ndarray:
    """[n, dim] fp32 rows of every kind: all bf16 values, ties, both zeros, huge and tiny, non-finite, random bits."""
    plain = rng.standard_normal((120, dim)).astype(np.float32)
    plain *= np.exp(rng.uniform(-12, 8, (120, 1))).astype(np.float32)
    faulty = plain.copy()
    for value in (np.nan, -np.nan, np.inf, -np.inf, -0.0):
        faulty[rng.random(faulty.shape) < 0.003] = value
    bf16 = every_bf16()
    kinds = [
        plain,
        np.round(plain * 4) / 4,
        plain * np.float32(2.0**110),
        plain * np.float32(2.0**-122),
        plain * np.float32(2.0**-130),
        faulty,
        np.resize(bf16, (-(-len(bf16) // dim), dim)),
        np.resize(rng.permutation(bf16[np.isfinite(bf16)]), (120, dim)),
        rng.integers(0, 2**32, (120, dim), dtype=np.uint32).view(np.float32),
        np.zeros((2, dim), np.float32),
    ]
    return np.concatenate(kinds)


@pytest.mark.parametrize(
    ("name", "scale"),
    [(name, scale) for name in FORMATS for scale in (SCALES if FORMATS[name].global_scaled else (1.0,))],
)
def test_rows_are_the_references(name: str, scale: float, rng: np.random.Generator) -> None:
    format = FORMATS[name]
    dim = format.dim or 128
    values = hard_rows(dim, rng)
    with np.errstate(all="ignore"):
        wanted = reference.encode(name, values, scale)
        decoded = reference.decode(name, wanted, dim, scale)
    got = np.asarray(jax.jit(partial(encoding.encode, name, global_scale=scale))(values))
    wrong = np.argwhere(got != wanted)
    assert not len(wrong), f"{len(wrong)} bytes differ, the first at {wrong[0].tolist()}"
    eager = np.asarray(encoding.encode(name, jnp.asarray(values[:130]), scale))
    assert np.array_equal(eager, wanted[:130])
    back = np.asarray(jax.jit(partial(encoding.decode, name, dim=dim, global_scale=scale))(wanted))
    assert back.dtype == decoded.dtype
    nan = np.isnan(decoded.astype(np.float32))
    assert np.array_equal(np.isnan(back.astype(np.float32)), nan)
    assert back[~nan].tobytes() == decoded[~nan].tobytes()


def test_quotients_are_rounded_correctly(rng: np.random.Generator) -> None:
    """A plain division by a broadcast array is not: XLA multiplies by the reciprocal, and a quarter of them change."""
    values = rng.standard_normal((4000, 512)).astype(np.float32) * np.float32(448)
    by = (np.abs(rng.standard_normal((4000, 1))) + 1e-6).astype(np.float32)
    wanted = (values.astype(np.float64) / by).astype(np.float32)
    assert np.array_equal(np.asarray(jax.jit(divide)(values, by)), wanted)
    assert not np.array_equal(np.asarray(jax.jit(lambda a, b: a / b)(values, by)), wanted)


def test_bf16_rounding_survives_the_simplifier(rng: np.random.Generator) -> None:
    values = rng.standard_normal(10_000).astype(np.float32)
    assert np.array_equal(np.asarray(jax.jit(encoding.to_bf16)(values)), reference.to_bf16(values))


@pytest.mark.sampled
@pytest.mark.parametrize("layout", ["planar", "tpu_tile"])
@pytest.mark.parametrize("role", ["window", "entries", "kv"])
@pytest.mark.parametrize("kind", ["scaled", "plain"])
def test_new_code_is_refused(kind: str, role: str, layout: str) -> None:
    with new_code() as formats:
        spec = layers_of(formats[kind])[role]
        with pytest.raises(BackendError, match=NAME):
            kvcore.create_cache(spec, backend="jax_pallas", max_requests=1, max_tokens=8, layout=layout)
        with pytest.raises(BackendError, match=NAME):
            encoding.encode(formats[kind], jnp.ones((1, 64)))
        with pytest.raises(BackendError, match=NAME):
            encoding.decode(formats[kind], jnp.ones((1, formats[kind].row_bytes), jnp.uint8))


@pytest.mark.sampled
@pytest.mark.parametrize("value", [1e5, np.finfo(np.float32).max], ids=str)
@pytest.mark.parametrize("name", [name for name in FORMATS if not FORMATS[name].hadamard])
def test_no_finite_value_reads_as_infinite(name: str, value: float) -> None:
    dim = FORMATS[name].dim or 128
    row = np.full((2, dim), 0.5, np.float32)
    row[0, ::7], row[1, 1::7] = value, -value
    stored = encoding.encode(name, jnp.asarray(row))
    assert np.array_equal(np.asarray(stored), reference.encode(name, row))
    decoded = np.asarray(encoding.decode(name, stored, dim)).astype(np.float32)
    assert np.isfinite(decoded).all()
    assert (decoded[0, ::7] > 0).all()
