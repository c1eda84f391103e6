"""Needles in text (RULER's tasks, Hsieh et al., 2024) for SmolLM2-135M: what it still finds through a compressed cache.

Claim (TurboQuant, RotorQuant): needles are found as well as in full precision, down to 2 bits.

    python -m experiments.run --config=configs/language/ruler_text.py
    python -m experiments.run --config=configs/language/ruler_text.py --config.grid.model="('FOLDER',)" \\
      --config.grid.tokens='(4096, 32768)' --config.tasks='()'

A number is asked for that a line among 1,024 tokens of prose, code and dialogue tells; that one of many such lines
tells; or four, one after the other. The model answers none of RULER's other tasks in float32, so they are left out. An
empty `tasks` stands for all eight. The decoder of `configs/language/needle_model.py` (`recall`) knows two of them, over
its own words. The newest 128 tokens and the first 4 are exact, and prompts are read in pieces of 128.

The claim does not hold here: of single needles float32 finds all, `eden_4` 0.92, two bits that learn nothing 0.33 to
0.58. `klt_trellis_2+pre_rope` finds 0.92. A row takes 5 to 20 minutes of a core, of codes that learn half an hour; that
of `klt_joint` has not been run. Needs the extra `real`.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    learned = ("klt_trellis_2+pre_rope", "klt_joint_2.167+centered+pre_rope")
    return ConfigDict(
        {
            "experiment": "ruler",
            "tasks": ("niah_single", "niah_multikey", "niah_multiquery"),
            "corpus": "mixed",
            "examples": 3,
            "seeds": 4,
            "chunk": 128,
            "grid": {
                "model": ("smollm2-135m",),
                "keep": ("128+4",),
                "tokens": (1024,),
                "strategy": (
                    *("float32", "eden_4", "eden_2", "eden_unbiased_2", "turboquant_trellis_2", "kivi_2"),
                    *learned,
                ),
            },
        }
    )
