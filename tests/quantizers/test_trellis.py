"""Trellis-coded quantization: the best path, the ring, the tables, and what it must reach."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rqjax
from experiments.codes import trellis_tables as trellis_tables_experiment
from experiments.data import samples
from rqjax import theory
from rqjax.arrays import viterbi
from rqjax.codebooks import trellis_tables
from rqjax.codebooks.trellis_tables import Companded, Table, Turns
from rqjax.quantizers.trellis import Trellis
from rqjax.quantizers.trellis_per_coordinate import trellis_coded
from rqjax.recipes.allocation import allocate
from tests.tools.suites import some


def levels(state_bits, key=0):
    return jax.random.normal(jax.random.key(key), (2**state_bits,))


def table(state_bits):
    return Table(levels(state_bits), jnp.float32(1))


@jax.jit
def error(trellis, x):
    """Error of a vector relative to its squared norm."""
    return rqjax.metrics.relative_mse(x, trellis.decode(trellis.encode(x)))


@functools.partial(jax.jit, static_argnums=2)
def path(y, values, bits, families=None):
    return viterbi.path([viterbi.Segment(y, values[None], (bits,))], families)


@functools.partial(jax.jit, static_argnums=2)
def ring(y, values, bits):
    return viterbi.tail_biting([viterbi.Segment(y, values[None], (bits,))])


@pytest.mark.parametrize("bits", some([1, 2, 3, 4], [2]))
def test_free_paths_are_the_best_of_all(bits):
    """All streams of 4 - b + 6 b bits, one after the other."""
    y, values = jax.random.normal(jax.random.key(1), (6, 5)), levels(4)
    states = np.asarray(path(y, values, bits))
    y, values = np.asarray(y), np.asarray(values)
    found = ((y - values[states]) ** 2).sum(0)
    least = np.full(5, np.inf)
    for stream in np.array_split(np.arange(2 ** (4 - bits + 6 * bits)), 64):
        windows = [(stream >> bits * t) & 15 for t in range(6)]
        errors = sum((y[t][:, None] - values[window]) ** 2 for t, window in enumerate(windows))
        least = np.minimum(least, errors.min(1))
    np.testing.assert_allclose(found, least, rtol=1e-5)
    assert ((states[:-1] >> bits) == (states[1:] & (16 // 2**bits - 1))).all()


def around(stream, bits, state_bits):
    """The states of rings of codes (n, T), code by code: the first times around find the state to start from."""
    state, states = np.zeros(len(stream), int), []
    for _ in range(1 + -(-16 // stream.shape[1])):
        for code, width in zip(stream.T, np.broadcast_to(bits, stream.shape[1]), strict=True):
            state = (state >> width) | code.astype(int) << (state_bits - width)
            states.append(state)
    return np.stack(states[-stream.shape[1] :], axis=1)


@pytest.mark.full
@pytest.mark.parametrize("bits", some([1, 2, 3, 4], [3]))
def test_rings_are_within_one_percent_of_the_best(bits):
    y, trellis = jax.random.normal(jax.random.key(1), (128, 64)), trellis_coded(1, bits)
    values = trellis.values

    def errors(states):
        return ((y - values[states]) ** 2).sum(0)

    def through(family):
        return errors(path(y, values, bits, jnp.full(64, family, jnp.uint32)))

    best = jax.jit(lambda every: jax.lax.map(through, every).min(0))(jnp.arange(2 ** (8 - bits), dtype=jnp.uint32))
    found = errors(jnp.asarray(around(np.asarray(ring(y, values, bits)).T, bits, 8).T))
    assert best.mean() <= found.mean() < 1.01 * best.mean()


@pytest.mark.parametrize(
    ("dim", "bits", "state_bits"),
    some(
        [
            (128, 1, 12),
            (64, 4, 6),
            (13, 3, 7),
            (8, 1, 8),
            (5, 4, 12),
            (50, 5, 8),
            (16, 8, 8),
        ],
        [(13, 3, 7), (5, 4, 12)],
    ),
)
def test_a_window_over_the_stream_is_the_state(dim, bits, state_bits):
    """Code by code, around the ring; padding is coded, too."""
    trellis = Trellis(table(state_bits), dim=dim, bits=bits)
    codes = jax.jit(trellis.encode)(jax.random.normal(jax.random.key(1), (7, dim)))
    assert trellis.bits_per_vector == 8 * codes[0].nbytes
    lanes = -(-dim // 8)
    indices = np.asarray(rqjax.packing.unpack(codes, bits, 8 * lanes)).reshape(7, 8, lanes)
    states = around(indices.transpose(0, 2, 1).reshape(7, -1), bits, state_bits)
    expected = states.reshape(7, lanes, 8).transpose(0, 2, 1).reshape(7, -1)[:, :dim]
    np.testing.assert_array_equal(trellis.states(codes), expected)
    np.testing.assert_array_equal(trellis.decode(codes), trellis.values[expected])


@pytest.mark.full
@pytest.mark.parametrize(("bits", "dim"), [(2.5, 40), (0.75, 37), (3.125, 13)])
def test_fractional_codes_take_turns_on_one_ring(bits, dim):
    """Bit by bit: the stream holds the codes of coordinates, whose numbers of bits are as even as whole ones can be."""
    code = trellis_coded(dim, bits)
    x = jax.random.normal(jax.random.key(1), (7, dim)) / dim**0.5
    codes = jax.jit(code.encode)(x)
    widths = np.diff(np.floor(bits * np.arange(dim + 1)).astype(int))
    assert widths.sum() == int(bits * dim)
    assert code.bits_per_vector == 8 * codes[0].nbytes == 8 * -(-int(bits * dim) // 8)
    stream = np.unpackbits(np.asarray(codes), axis=1, bitorder="little")
    each = [
        stream[:, end - width : end] @ 2 ** np.arange(width)
        for end, width in zip(np.cumsum(widths), widths, strict=True)
    ]
    states = around(np.stack(each, axis=1), widths, 8)
    np.testing.assert_array_equal(code.states(codes), states)
    turns = code.tables[0]
    tables = [turns.more if width > bits else turns.fewer for width in widths]
    levels = [table(jnp.asarray(states[:, i])) * table.step / dim**0.5 for i, table in enumerate(tables)]
    np.testing.assert_allclose(code.decode(codes), np.stack(levels, axis=1), rtol=1e-6)


REACHED = {
    8: (0.285, 0.0795, 0.0219, 0.0063),
    10: (None, 0.0735, 0.0202, 0.0058),
    12: (None, 0.0715, 0.0196, 0.0053),
}
"""Mean squared error on the sphere at 1, 2, 3, 4 bits and d = 128, exactly d b bits."""


@functools.cache
def distortion(bits, state_bits=8):
    return float(error(trellis_coded(128, bits, state_bits=state_bits), samples.sample("sphere", 1, 1024, 128)[0]))


@pytest.mark.parametrize(("bits", "state_bits"), some([(1.5, 8), (3.5, 8), (2.5, 10)], []))
def test_half_bits_are_on_the_line_of_whole_ones(bits, state_bits):
    """Errors are within 2 % of the geometric mean of the neighbors', whose bits are theirs on the average."""
    found, *neighbors = (distortion(b, state_bits) for b in (bits, bits - 0.5, bits + 0.5))
    assert found < 1.02 * np.sqrt(np.prod(neighbors))


@pytest.mark.full
def test_errors_fall_with_the_bits():
    """Rates in whole, half, quarter and eighth bits."""
    errors = [distortion(bits) for bits in (0.5, 1, 1.125, 1.5, 2, 2.75, 3, 4, 5.25, 8)]
    assert errors == sorted(errors, reverse=True)


@pytest.mark.parametrize("state_bits", some(REACHED, []))
def test_distortion_on_the_sphere(state_bits):
    for bits, reached in enumerate(REACHED[state_bits], 1):
        if reached:
            assert trellis_coded(128, bits, state_bits=state_bits).bits_per_vector == 128 * bits
            assert theory.shannon_bound(bits) < distortion(bits, state_bits) <= reached


@pytest.mark.full
def test_more_states_are_better_and_each_table_beats_lloyd_max():
    for bits in (1, 2, 3, 4):
        found = [distortion(bits, size) for size in (6, 7, 8)]
        assert found == sorted(found, reverse=True)
        assert found[0] < 0.86 * theory.lloyd_max(bits, dim=128)


@pytest.mark.parametrize("bits", some(range(1, 9), [3]))
def test_companded_levels_are_what_their_numbers_say(bits):
    """Sizes from the middle outwards are the offset and, at each place, the slopes of all bends before it."""
    table = trellis_tables.trained(bits)
    rises = np.zeros(127, int)
    for start, slope in table.bends:
        rises[start:] += slope
    sizes = np.concatenate([[table.offset], table.offset + np.cumsum(rises)]) // (2 if table.whole else 1)
    line = np.concatenate([-sizes[::-1], sizes])
    states = jnp.arange(256)
    folded = states ^ (states >> table.fold) if table.fold else states
    np.testing.assert_array_equal(table(states), line[np.asarray(folded * table.multiplier % 256)])
    text = jax.jit(Trellis(table, dim=128, bits=bits).decode).lower(jnp.zeros((4, 4 * bits), jnp.uint32)).as_text()
    assert "gather" not in text


@pytest.mark.parametrize("bits", [3, 4, 5])
def test_codes_that_may_follow_on_a_state_are_spread_evenly(bits):
    """Codes before a state shift its successors by less than their spacing."""
    multiplier = trellis_tables.trained(bits).multiplier
    for before in range(2 ** (8 - bits)):
        places = np.sort((np.arange(2**bits) * 2 ** (8 - bits) + before) * multiplier % 256)
        assert places[0] < 2 ** (8 - bits)
        assert set(np.diff(places)) == {2 ** (8 - bits)}


@pytest.mark.full
def test_lloyd_steps_lower_the_error():
    x = jax.random.laplace(jax.random.key(0), (512, 64))
    code = trellis_coded(64, 2.5, sphere_dim=1)
    errors = [error(code, x)]
    for _ in range(4):
        parts = jax.jit(trellis_tables_experiment.improved)(code, x)
        tables = [Table(levels, jnp.float32(1)) for levels in parts]
        code = dataclasses.replace(code, tables=(Turns(*tables, 2.5),))
        errors.append(error(code, x))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.9 * errors[0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: trellis_coded(128, 9), "expected bits to be a multiple of 1/8 from 0.5 to 8, got 9"),
        (lambda: trellis_coded(128, 2.3), "expected bits to be a multiple of 1/8 from 0.5 to 8, got 2.3"),
        (lambda: trellis_coded(128, 0.375), "expected bits to be a multiple of 1/8 from 0.5 to 8, got 0.375"),
        (
            lambda: trellis_coded(128, 2.25, state_bits=10),
            "expected state_bits to be a whole number from 8 to 8, got 10",
        ),
        (lambda: trellis_coded(8, 0.75), "as many bits as a state has, 8, got 6"),
        (lambda: trellis_coded(128, 2, state_bits=13), "expected state_bits to be a whole number from 6 to 12, got 13"),
        (lambda: trellis_coded(4, 1, state_bits=9), "expected state_bits to be a whole number from 1 to 8, got 9"),
        (lambda: trellis_coded(128, 5, state_bits=10), "expected state_bits to be a whole number from 8 to 8, got 10"),
        (
            lambda: rqjax.TrellisPerCoordinate.gaussian(jnp.zeros(8), jnp.ones(8), (2, 1) + (0,) * 6),
            "as many bits as a state",
        ),
        (
            lambda: rqjax.TrellisPerCoordinate.gaussian(jnp.zeros(4), jnp.ones(4), (2, 4, 3, 1)),
            "expected descending bits",
        ),
    ],
)
def test_trellis_rejects_invalid_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.full
def test_committed_tables_are_what_training_makes():
    """A table is no more than 2 % above one that is trained here for as long as a test may take."""
    short = trellis_tables_experiment.run({"table": (4, 6), "dim": 128, "n": 512, "steps": 60})
    assert error(
        trellis_coded(128, 4, sphere_dim=1, state_bits=6), jax.random.normal(jax.random.key(0), (2048, 128))
    ) < (1.02 * short["mse"])
    for bits, (least, most) in trellis_tables.STATE_BITS.items():
        for state_bits in range(least, most + 1):
            table = trellis_tables.trained(bits, state_bits)
            for part in (table.more, table.fewer) if isinstance(table, Turns) else (table,):
                assert part.state_bits == state_bits
                assert isinstance(part, Companded) == (state_bits == 8)
                assert part.whole == (bits < trellis_tables.FINE)


@pytest.mark.full
def test_one_ring_through_coordinates_of_many_bits():
    """One ring takes a quarter off the error of a transform code of the same bytes."""
    deviation = jnp.exp(-jnp.arange(64) / 16)
    bits = allocate(np.asarray(deviation**2), 128)
    assert len(set(bits)) >= 5
    x = deviation * jax.random.normal(jax.random.key(0), (512, 64))
    codes = [
        kind.gaussian(jnp.zeros(64), deviation, bits) for kind in (rqjax.TrellisPerCoordinate, rqjax.PerCoordinate)
    ]
    trellis, columns = (float(error(code, x)) for code in codes)
    assert codes[0].bits_per_vector == codes[1].bits_per_vector == 128
    assert trellis < 0.75 * columns


@pytest.mark.full
def test_a_path_through_segments_is_the_best_of_all():
    """All streams of a free path through codes of 3 bits, 2 and 0 bits in turns, and 1 bit, with weights."""
    y, weights = jax.random.normal(jax.random.key(1), (5, 5)), jnp.array([4.0, 3.0, 2.0, 5.0, 1.0])
    tables = jnp.stack([levels(4, key) for key in range(4)])[np.array([0, 1, 2, 1, 3])]
    parts = [(slice(0, 1), (3,)), (slice(1, 4), (2, 0)), (slice(4, 5), (1,))]
    segments = [viterbi.Segment(y[part], tables[part][: len(bits)], bits, weights[part]) for part, bits in parts]
    states = viterbi.path(segments)
    found = (weights[:, None] * (y - tables[np.arange(5)[:, None], states]) ** 2).sum(0)
    least = np.full(5, np.inf)
    for stream in np.array_split(np.arange(2 ** (1 + 3 + 2 + 0 + 2 + 1)), 4):
        windows = [(stream >> start) & 15 for start in (0, 2, 2, 4, 5)]
        errors = [w * (v[:, None] - t[s]) ** 2 for w, v, t, s in zip(weights, y, tables, windows, strict=True)]
        least = np.minimum(least, np.sum(errors, axis=0).min(1))
    np.testing.assert_allclose(found, least, rtol=1e-5)


@pytest.mark.full
def test_the_best_gain_brings_loud_coordinates_within_reach():
    """A tenth of the vectors are eight times as loud where bits are few; Gaussian ones lose nothing."""
    deviation = 0.93 ** jnp.arange(64)
    bits = allocate(np.asarray(deviation**2), 128)
    x = deviation * jax.random.normal(jax.random.key(0), (1000, 64))
    loud = x.at[:100, 40:].multiply(8)
    plain, best = (
        rqjax.Scaled(kind.gaussian(jnp.zeros(64), deviation, bits))
        for kind in (rqjax.TrellisPerCoordinate, rqjax.BestGain)
    )
    for y, bound in ((x, 1.01), (loud, 0.85)):
        lost = [np.sum((q.decode(q.encode(y)) - y) ** 2) for q in (plain, best)]
        assert lost[1] < bound * lost[0]
    assert plain.bits_per_vector == best.bits_per_vector
