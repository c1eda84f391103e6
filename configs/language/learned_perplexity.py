"""Random, learned and allocated quantizers of keys and values at equal true bits: perplexity of held-out text.

Fitted to every layer and head, keys and values apart, on 6,144 tokens of training text.

    python -m experiments.run --config=configs/language/learned_perplexity.py

`seconds_to_fit` is of all layers and heads for all four seeds, with compilation. The committed table is older: of four
windows of held-out text and without `klt_trellis`, its seconds measured beside other work.
"""

from ml_collections import ConfigDict

from configs.language import toys


def get_config() -> ConfigDict:
    config = toys.get_config()
    strategies = (
        "turboquant_3",
        "eden_3",
        "rotorquant_3",
        "rotor_chain_3",
        "rotorquant_learned_3",
        "rotor_chain_learned_3",
        "rotorquant_allocated_3",
        "rotorquant_allocated_trellis_3",
        "klt_trellis_3",
        "turboquant_trellis_3",
        "turboquant_2",
        "eden_2",
        "rotorquant_2",
        "rotor_chain_2",
        "rotorquant_learned_2",
        "rotor_chain_learned_2",
        "rotorquant_allocated_2",
        "rotorquant_allocated_trellis_2",
        "klt_trellis_2",
        "turboquant_trellis_2",
    )
    config.update({"chunk": 64, "grid": {"strategy": strategies}})
    return config
