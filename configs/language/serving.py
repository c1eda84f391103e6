"""Continuous batching over pages, in equal bytes: texts of their own, questions on documents, conversations.

Claim (issues of serving engines): a quantized cache holds more texts at a time, and so makes more tokens a second. The
cache has the bytes of four of the trace's longest texts in bfloat16. All texts of a turn are there at once.

In `unshared` 24 prompts of up to 2,048 tokens have nothing in common. In `documents` 32 questions of up to 128 tokens
are on eight documents of 1,088 tokens, one after the other. In `chats` 16 conversations of four turns begin with the
same 576 tokens. Answers have 64 tokens.

    python -m experiments.run --config=configs/language/serving.py

To see: `eden_4` makes 1.4 to 2.9 times as many tokens a second as bfloat16. Trellis codes, which are slow to encode,
make 0.8 to 2.4 times as many, in llama-d128 fewer than bfloat16 but for documents. Nothing else may run beside it.
llama-d128 takes 8 minutes, SmolLM2-135M an hour. Needs the extra `real`.
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
