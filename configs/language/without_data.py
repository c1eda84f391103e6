"""The best code that learns nothing, at each rate: what a pretrained decoder loses through a compressed cache.

Claim: of such codes trellises with "+turned" lose the least at every rate from 1.75 to 8 bits, and bits that keys have
more than values pay.

    python -m experiments.run --config=configs/language/without_data.py

To see: the first part holds for the mean, not for the median (`kvarn_4`, `kivi_4`). More bits for keys leave 0.81 to
0.92 of the mean divergence of the same bits for both, at 1.75 bits 0.99. They gain on code but at 4.25 bits, and on the
library but at 1.75; by the median they lose at 1.75 to 2.75 and 4.25 bits. Differences below a tenth are within what
texts differ.

`a/b` has keys of a and values of b, whose bits are the mean of both; heads of 64 take 0.25 bits for scales. The rest is
`configs/language/leaderboard.py`, which has more of the rivals. Needs the extra `real`.
"""

from ml_collections import ConfigDict

from configs.language import leaderboard

BITS = ("2/1", "1.5", "2.5/1.5", "2", "3/2", "2.5", "3.5/2.5", "3", "4/3", "3.5", "5/3", "4", "6/4", "5", "6", "8")
"""Bits of keys and of values, or of both."""
RIVALS = ("nested_e8_2", "nested_e8_3", "nested_e8_4", "kvarn_4", "kivi_4", "q8_0")


def get_config() -> ConfigDict:
    config = leaderboard.get_config()
    ours = ["/".join(f"turboquant_trellis_{bits}" for bits in pair.split("/")) + "+turned" for pair in BITS]
    config.update({"grid": {"keep": ("128+4",), "strategy": (*ours, *RIVALS)}})
    return config
