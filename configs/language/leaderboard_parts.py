"""The leaderboard with the newest and first tokens in full precision: whole, keys alone in codes, values alone.

Claim (KIVI, KVarN, llama.cpp): keys need more bits than values. Expected: with the same 128 newest and 4 first tokens
in bfloat16 for all, tiles lose the advantage that their own exact tokens give them. The order is that of
`configs/language/leaderboard.py`.

    python -m experiments.run --config=configs/language/leaderboard_parts.py

To see: `klt_trellis+pre_rope` stays the best and `kivi_2`, which has 3 bits, the worst. KVarN is behind trellis and
lattice codes in the mean, except `kvarn_3` in the median of llama-d128. On grids, keys cost 3 to 48 times as much as
values; in codes with the scale of least error, 0.9 to 4 times. Unbiased codes lose 0.23 to 0.47 of the loss of codes of
least error on values, and more on keys.

`a/bfloat16` has codes of keys and exact values, `bfloat16/a` codes of values and exact keys; `bits` is the mean of
both. `bfloat16` alone is the floor: the models compute in float32. KIVI shares scales among 32 tokens and KVarN among
128, so that up to 31 and 127 tokens more are exact. Eight windows, a fourth of the leaderboard's.
"""

from ml_collections import ConfigDict

from configs.language import leaderboard

WHOLE = (
    *("q4_0", "nvfp4", "hadamard_int4", "kivi_2", "kvarn_3", "kvarn_2"),
    *("eden_3", "eden_2", "nested_e8_3", "nested_e8_2", "turboquant_trellis_3", "turboquant_trellis_2"),
    *("eden_unbiased_2", "turboquant_trellis_unbiased_2"),
    *("klt_trellis_3+pre_rope", "klt_trellis_2+pre_rope", "klt_trellis_2"),
)
MIXED = ("eden_2/eden_unbiased_2", "turboquant_trellis_2/turboquant_trellis_unbiased_2")
"""Keys of least error and values without bias."""


def parts(name: str) -> tuple[str, str, str]:
    """Names a strategy, the same with exact values, and with exact keys, to which its options do nothing."""
    base, *options = name.split("+")
    return name, "+".join([f"{base}/bfloat16", *options]), f"bfloat16/{base}"


def get_config() -> ConfigDict:
    config = leaderboard.get_config()
    strategies = dict.fromkeys(part for name in WHOLE for part in parts(name))  # values of +pre_rope are those without
    grid = {"model": ("llama-d128", "qwen2-d64"), "keep": ("128+4",), "strategy": ("bfloat16", *strategies, *MIXED)}
    config.update({"windows": 8, "seeds": 2, "grid": grid})
    return config
