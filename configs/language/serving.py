"""Continuous batching over pages, in equal bytes: texts of their own, questions on documents, conversations.

Claim (issues of serving engines): a quantized cache holds more texts at a time, and so makes more tokens a second. The
cache has the bytes of four of the trace's longest texts in bfloat16. All texts of a turn are there at once.

In `unshared` 24 prompts of up to 2,048 tokens have nothing in common. In `documents` 32 questions of up to 128 tokens
are on eight documents of 1,088 tokens, one after the other. In `chats` 16 conversations of four turns begin with the
same 576 tokens. Answers have 64 tokens.

    python -m experiments.run --config=configs/language/serving.py

To see: `eden_4` makes 1.3 to 2.6 times as many tokens a second as bfloat16. Trellis codes, which are slow to encode,
make 0.9 to 2.1 times as many, more than bfloat16 with documents and in llama-d128's chats, elsewhere as many. Nothing
else may run beside it. llama-d128 takes 6 minutes, SmolLM2-135M most of an hour. Needs the extra `real`.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "experiment": "serving",
            "held": 4,
            "slots": 16,
            "grid": {
                "model": ("llama-d128", "smollm2-135m"),
                "trace": ("unshared", "documents", "chats"),
                "strategy": ("bfloat16", "eden_4", "turboquant_trellis_3", "turboquant_trellis_2"),
            },
        }
    )
