"""Twins of the operations of warps against their definition in the PTX ISA, 9.7.14.5 and 9.7.9, element by element."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rqjax
from pallas_kernels.gpu import registers, warps
from pallas_kernels.gpu.levels import BLOCK, Levels, Place
from pallas_kernels.gpu.operands import Plan
from pallas_kernels.gpu.rings import Ring
from pallas_kernels.gpu.warp_attention import splits_of
from pallas_kernels.packed import UNIT
from rqjax.backends import hopper_attention
from tests.tools import packed_codes


def words_of(rng, count):
    return [jnp.asarray(x) for x in rng.integers(0, 2**32, (count, 128), np.uint32)]


def signed_byte(word, i):
    return np.int8(np.uint8(word >> 8 * i & 255)).astype(np.int64)


def test_multiply_add_is_mma_m16n8k32():
    """A thread has lane / 4 as its group and lane % 4 as its place in it; fragments as the figures of the ISA."""
    rng = np.random.default_rng(0)
    sums, left, right = rng.integers(-(2**20), 2**20, (4, 128)), words_of(rng, 4), words_of(rng, 2)
    found = warps.multiply_add(
        [[jnp.zeros(128, jnp.int32)] * 4, [jnp.asarray(x, jnp.int32) for x in sums]], [(1, left, right)], interpret=True
    )
    a, b, c = np.zeros((4, 16, 32), int), np.zeros((4, 32, 8), int), np.zeros((4, 16, 8), int)
    d = np.zeros((4, 16, 8), int)
    for thread in range(128):
        warp, group, place = thread // 32, thread % 32 // 4, thread % 4
        for i in range(16):
            row = group if i < 4 or 8 <= i < 12 else group + 8
            a[warp, row, place * 4 + (i & 3) + (16 if i >= 8 else 0)] = signed_byte(int(left[i // 4][thread]), i % 4)
        for i in range(8):
            b[warp, place * 4 + (i & 3) + (16 if i >= 4 else 0), group] = signed_byte(int(right[i // 4][thread]), i % 4)
        for i in range(4):
            c[warp, group + 8 * (i >= 2), place * 2 + (i & 1)] = sums[i, thread]
            d[warp, group + 8 * (i >= 2), place * 2 + (i & 1)] = found[1][i][thread]
    np.testing.assert_array_equal(d, a @ b + c)
    assert not np.any(found[0])


def test_multiply_add_of_float16_is_mma_m16n8k8():
    """A thread has two rows of two columns of the left side, and two rows of a column of the right one."""
    rng = np.random.default_rng(8)
    sums, numbers = rng.normal(size=(4, 128)).astype(np.float32), rng.normal(size=(3, 128, 2)).astype(np.float16)
    words = [jnp.asarray(x.view(np.uint32)[:, 0]) for x in numbers]
    found = warps.multiply_add([[jnp.asarray(x) for x in sums]], [(0, words[:2], words[2:])], interpret=True)[0]
    a, b, c, d = np.zeros((4, 16, 8)), np.zeros((4, 8, 8)), np.zeros((4, 16, 8)), np.zeros((4, 16, 8))
    for thread in range(128):
        warp, group, place = thread // 32, thread % 32 // 4, thread % 4
        for i in range(4):
            row, column = group + 8 * (i >= 2), place * 2 + (i & 1)
            a[warp, row, column] = numbers[i // 2, thread, i % 2]
            c[warp, row, column], d[warp, row, column] = sums[i, thread], found[i][thread]
        for i in range(2):
            b[warp, place * 2 + i, group] = numbers[2, thread, i]
    np.testing.assert_allclose(d, a @ b + c, atol=1e-5)


@pytest.mark.parametrize(("dtype", "left", "right"), [("int32", 4, 2), ("float32", 2, 1)])
def test_fields_of_multiply_add_are_those_of_its_text(dtype, left, right):
    """Results, the left side, the right side and addends, in this order."""
    names = iter(range(99))
    groups = ["{" + ", ".join(f"${next(names)}" for _ in range(count)) + "}" for count in (4, left, right, 4)]
    assert warps.MULTIPLY_ADD[dtype].endswith(" " + ", ".join(groups) + ";")
    assert warps.FIELDS.split(",") == ["=r"] * 4


def test_shuffle_takes_words_of_lanes():
    rng = np.random.default_rng(1)
    x, lane = words_of(rng, 1)[0], jnp.asarray(rng.integers(0, 32, 128), jnp.int32)
    thread = np.arange(128)
    np.testing.assert_array_equal(warps.shuffle(x, lane, interpret=True), x[thread // 32 * 32 + lane])
    np.testing.assert_array_equal(warps.shuffle(x, xor=8, interpret=True), x[thread ^ 8])


def test_complement_flips_all_bits():
    (x,) = words_of(np.random.default_rng(2), 1)
    np.testing.assert_array_equal(warps.complement(x, jnp.uint32(2**32 - 1), interpret=True), ~x)


@pytest.mark.parametrize("columns", [64, 128, 256])
def test_loads_of_tiled_memory_are_neighbors_in_a_row(columns):
    rng = np.random.default_rng(3)
    refs = tuple(jnp.asarray(rng.integers(-128, 128, (32, columns)), jnp.int8) for _ in range(2))
    row, first = rng.integers(0, 32, 128), 16 * rng.integers(0, columns // 16, 128)
    half = rng.integers(0, 2, 128)
    offset = registers.swizzled(row, first, columns, min(columns, 128))
    found = warps.load(refs, jnp.asarray(offset), 4, half=jnp.asarray(half), tiled=True, interpret=True)
    found = np.stack(found, 1).view(np.int8)
    expected = np.stack(refs)[half[:, None], row[:, None], first[:, None] + np.arange(16)]
    np.testing.assert_array_equal(found, expected)


def test_look_ups_join_the_bytes_at_the_halves_of_words():
    rng = np.random.default_rng(7)
    data = jnp.asarray(rng.integers(-128, 128, (256, 128)), jnp.int8)
    offsets = rng.integers(0, data.size, (4, 128, 2)).astype(np.uint16)
    words = [jnp.asarray(x) for x in offsets.view(np.uint32)[..., 0]]
    found = np.stack(warps.look_up(data, words, interpret=True), 1).view(np.int8).reshape(128, 2, 4)
    expected = np.asarray(data).reshape(-1)[offsets].reshape(2, 2, 128, 2).transpose(2, 0, 1, 3).reshape(128, 2, 4)
    np.testing.assert_array_equal(found, expected)
    joined = warps.joined([jnp.asarray(x) for x in np.arange(4, dtype=np.uint32)[:, None] + np.zeros(128, np.uint32)])
    np.testing.assert_array_equal(joined, np.uint32(0x03020100))


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_levels_of_states_are_those_of_the_trellis(bits):
    cache = rqjax.strategy(f"turboquant_trellis_{bits}", jax.random.key(0), 64).cache(1, 1, 512)
    sides = []
    jax.eval_shape(lambda cache: sides.append(hopper_attention._sides(cache)), cache)  # as under jit
    levels = sides[0][0].levels
    expected = rqjax.trellis_coded(64, bits).table(jnp.arange(256, dtype=jnp.uint8))
    table = Ring(64, bits, levels).table(levels)
    np.testing.assert_array_equal(table[0], np.broadcast_to(expected[:, None], (256, 128)))
    assert sides[0][1].levels == levels


def test_numbers_of_sixteen_bits():
    x = jnp.asarray(np.random.default_rng(4).normal(size=(128, 2)), jnp.float16)
    found = warps.halves(jax.lax.bitcast_convert_type(x, jnp.uint32), interpret=True)
    np.testing.assert_array_equal(np.stack(found, 1), x.astype(jnp.float32))


def test_rounds_pairs_to_sixteen_bits():
    x = np.random.default_rng(9).normal(size=(2, 128)).astype(np.float32)
    found = np.asarray(warps.to_halves(*map(jnp.asarray, x), interpret=True)).view(np.float16).reshape(128, 2)
    np.testing.assert_array_equal(found, x.T.astype(np.float16))


def test_stores_are_neighbors():
    class Ref:
        value, dtype = jnp.zeros((8, 128), jnp.uint32), jnp.uint32
        shape = value.shape

        def __getitem__(self, _):
            return self.value

        def __setitem__(self, _, value):
            self.value = value

    ref, words = Ref(), words_of(np.random.default_rng(5), 4)
    warps.store(ref, 16 * jnp.arange(128)[::-1], words, interpret=True)
    np.testing.assert_array_equal(ref.value.reshape(-1, 4)[:128][::-1].T, words)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_products_are_those_of_levels(bits, interleaved):
    """Levels of two rows of keys times columns, by each word of indices in nibbles."""
    rng = np.random.default_rng(bits)
    side, levels = Levels(64, bits, 1, False, True, interleaved), np.asarray(packed_codes.LEVELS[bits], np.int8)
    nibbles = rng.integers(0, 2**bits, (2, 4, 128, 8))
    words = (nibbles << 4 * np.arange(8)).sum(-1).astype(np.uint32)
    rows, right = [list(map(jnp.asarray, row)) for row in words], words_of(rng, 4)
    table = [*side.table(levels), jnp.uint32(2**32 - 1)]
    vectors = list(side.right(right, interpret=True))
    assert len(vectors) * side.loaded == 4
    zero = [jnp.zeros(128, jnp.int32)] * 4
    sums = [zero] * (2 * side.terms)
    for k, vector in enumerate(vectors):
        factors = side.left([row[k * side.loaded :][: side.loaded] for row in rows], table, interpret=True)
        products = [(f.total, f.words, vector[f.first : f.first + 2]) for f in factors]
        sums = warps.multiply_add(sums, products, interpret=True)
    found = np.asarray(sums).reshape(2, side.terms, 2, 2, 4, 8, 4)  # half, term, row half, column, warp, g, q
    found = found[:, -1] - (found[:, 0] if side.terms == 2 else 0)
    y = np.stack(right).view(np.int8).reshape(4, 4, 8, 4, 4).astype(int)  # word, warp, g, q, byte
    for half in range(2):
        x = levels[nibbles[..., half::2]].reshape(2, 4, 4, 8, 4, 4).astype(int)  # row half, word, warp, g, q, byte
        product = np.einsum("rkwgqb,kwcqb->rwgc", x, y).reshape(2, 4, 8, 4, 2)
        np.testing.assert_array_equal(found[half], product.transpose(0, 4, 1, 2, 3))


@pytest.mark.parametrize("halves", [1, 2])
def test_every_token_and_dimension_is_in_one_place(halves):
    """Words of keys have a token in each nibble row, those of values 16 tokens of a warp's 64."""
    dim, rng = 64, np.random.default_rng(6)
    indices = rng.integers(0, 16, (1, 1, BLOCK, dim))
    side, place = Levels(dim, 4, 1, False, True, True), Place.of(halves, True)
    for transposed in (False, True):
        (section,) = (jnp.asarray(x.bits[0, 0]) for x in packed_codes.pack(indices, 4, transposed).sections)
        refs = tuple(jnp.split(section, halves, axis=int(transposed)))
        thread = np.arange(128)
        warp, g, q = thread // 32, thread % 32 // 4, thread % 4
        if transposed:
            words = side.value_words([refs], 16, place)
            row, column = 16 + np.asarray(place.row), 64 * warp + 16 * q
            expected = [indices[0, 0][column[:, None] + np.arange(16), r[:, None]] for r in (row, row + dim // 2)]
        else:
            words = side.key_words([refs], 2, 0, place)
            token = np.asarray(place.token) + 2
            assert (token // UNIT == 4 * warp + g // 2).all()
            expected = [indices[0, 0][t[:, None], 16 * q[:, None] + np.arange(16)] for t in (token, token + 8)]
        data = np.stack(words, 1).view(np.uint8)
        for nibble, some in enumerate(expected):
            np.testing.assert_array_equal(data >> 4 * nibble & 15, some)


def test_shares_fill_whole_waves():
    side = Levels(128, 4, 1, False, True, True)
    plan = Plan(128, 4, 1, None, side, side, False)
    found = [splits_of(plan, n, tokens) for n, tokens in ((64, 16384), (256, 16384), (8, 65536), (64, 4096), (1, 128))]
    assert found == [6, 3, 43, 6, 1]
