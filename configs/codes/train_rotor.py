"""Rotors trained by optax: what learning a rotation, levels and bits takes off the error, on vectors held out.

Claims: on loud channels a learned permutation and learned bivectors take a fifth and more off a single layer of rotors.
Learned levels of each coordinate bring it below a uniform rotation, and bits given by variance to half and less. On
isotropic data nothing hurts, and bits of the norm alone help (0.92).

    python -m experiments.run --config=configs/codes/train_rotor.py
    python -m experiments.run train_rotor --config.grid.data="('file:kv.safetensors#layers.0.k',)"

A quarter of the vectors is held out; of `kv`, windows of text of their own.

`seconds` is a fit of all seeds side by side, with compilation where a shape is new; the committed ones were measured
beside other work. Twenty minutes on two cores.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "experiment": "train_rotor",
            "n": 8192,
            "seeds": 5,
            "grid": {
                "dim": (128, 256),
                "bits": (3,),
                "parametrisation": (
                    "identity",
                    "dense",
                    "klt",
                    "rotor",
                    "rotor:learned",
                    "rotor_permuted",
                    "rotor_permuted:learned",
                    "rotor_chain",
                    "rotor_chain:learned",
                    "rotorquant_learned",
                    "rotor_chain_learned",
                    "rotorquant_allocated",
                ),
                "data": (
                    "sphere",
                    "outlier_channels",
                    "lognormal_channels",
                    "decaying_spectrum",
                    "words",
                    "kv",
                ),
            },
        }
    )
